"""Eviction and expiry: policies and their queues, quotas, expiry, leases, and the records of evicted pages.

The package decides about units, that is, blocks and keys of strings. It neither removes values nor accesses them.
"""
