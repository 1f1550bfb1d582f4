"""From a client's words to a reply: the command table, the dispatcher, and the commands.

This package contains the parts that every command may use: the table's rows (`registry`), the server and the client
(`context`), arguments, steps. The commands themselves are in `families/`. Knows the store and the values of replies,
and no socket.
"""
