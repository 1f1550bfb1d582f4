"""The disk tier below memory: the LMDB file, write-behind, the disk's limit, loading, and borrowed reads.

While the server runs, only threads wait for the disk, never the event loop.
"""
