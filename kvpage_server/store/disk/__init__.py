"""Values on disk: LMDB's file and its records, what writes and reads them behind the loop's back, what is lent from it.

Whatever waits for the disk is here and runs in a thread of its own. Nothing here decides what memory keeps.
"""
