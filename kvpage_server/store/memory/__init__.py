"""The index: entries by key, pages by request and block, the order of scans.

Eviction and the disk are outside this package.
"""
