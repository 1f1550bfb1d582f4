"""LMDB's file, and the threads that write, read and scrub it.

Whatever waits for the disk is here. Nothing here knows which values are in memory.
"""
