"""What a row of the command table has: the keys of the arguments, what has to be in memory, usage, reply.

There are no commands here, and no clients.
"""
