"""The disk below memory: what is stored there, what goes when it is full, what comes back or is lent to replies.

Knows the store's contents; waits for no disk itself, that is for the threads of `file/`.
"""
