"""The disk below memory: stored values, its limit, loading, and reads that replies borrow.

Knows the store's contents. Waits for no disk itself: the threads of `file/` do.
"""
