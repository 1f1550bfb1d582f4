"""From a client's words to a reply: the one command table, what runs a command, and what each command does.

This folder has what every command may use: the table's rows (`registry`), the server and the client (`context`),
arguments, steps. The commands themselves are in `families/`. Knows the store and the values of replies, and no socket.
"""
