"""The index: entries by key, blocks by request, the bits of a block's pages, and the order of scans.

The package depends on neither eviction nor the disk.
"""
