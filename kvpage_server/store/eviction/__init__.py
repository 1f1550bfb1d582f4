"""What is evicted and when: policies and their queues, quotas, expiry, leases, and the memory of what is gone.

Knows units (a block, or a string's key) and bytes. Nothing here removes a value or knows where it is.
"""
