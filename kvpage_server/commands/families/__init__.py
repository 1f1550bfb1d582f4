"""What each command does, a module a family; importing this fills the command table.

A function here is a row of the table and what the command does. What is done for every command lies in `dispatch/`,
what a family needs of the store in the store.
"""

from kvpage_server.commands.families import connections, keys, pages, server

__all__ = ["connections", "keys", "pages", "server"]
