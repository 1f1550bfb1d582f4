"""Eviction and expiry: policies and their queues, quotas, expiry, leases, and the records of evicted pages.

Knows units (a block, or a string's key) and bytes. Nothing here removes a value or knows where it is.
"""
