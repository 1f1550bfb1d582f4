"""From a client's words to a reply: the one command table, what runs a command, and what each command does.

Here lies what every command may use: the table's rows (`registry`), the server and the client (`context`), arguments,
steps. What a command does lies in `families/`. Knows the store and the values of replies; knows no socket.
"""
