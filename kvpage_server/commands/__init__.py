"""The command table, the dispatcher, and the commands: the code between a client's words and a reply.

This package contains the parts that every command may use: the rows of the table (`registry`), the server and the
client (`context`), arguments, steps. The commands themselves are in `families/`. The package depends on the store and
on the values of replies, and on no socket.
"""
