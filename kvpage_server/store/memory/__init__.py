"""The index: entries by key, pages by request and block, the order of scans.

This package neither decides about eviction nor waits for a disk.
"""
