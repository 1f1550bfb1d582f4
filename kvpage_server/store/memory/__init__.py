"""What there is: entries by key, pages by request and block, the order of scans.

Nothing here decides what goes or when, or waits for a disk.
"""
