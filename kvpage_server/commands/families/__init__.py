"""The commands, with a package for each group; the import of this package fills the command table.

A command is a function with a decorator that contains its row of the table. It gets the client and the words after the
command's name, and returns the reply, or raises ReplyError. The docstrings of the groups `page`, `map` and `set` are
the descriptions of replies in docs/commands.md. Work for every command belongs in `dispatch/`, and functions that store
or find values belong in the store.
"""

from kvpage_server.commands.families import connections, keys, pages, server

__all__ = ["connections", "keys", "pages", "server"]
