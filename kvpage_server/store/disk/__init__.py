"""The disk below memory: what is stored there, what goes when it is full, what is fetched or lent to replies.

Knows the store's contents. Waits for no disk itself: the threads of `file/` do.
"""
