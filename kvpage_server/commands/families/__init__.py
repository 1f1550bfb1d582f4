"""The commands, a module for each family; the import of this package fills the command table.

A function is decorated with its row of the table. Work for every command belongs in `dispatch/`, and functions that
store or find values belong in the store.
"""

from kvpage_server.commands.families import connections, keys, pages, server

__all__ = ["connections", "keys", "pages", "server"]
