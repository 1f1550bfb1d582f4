"""What goes and when: policies and their queues, quotas, expiry; what is spared; and what is remembered of it.

Knows units (a block, or the key of a string) and bytes. Nothing here removes a value or knows where it lies.
"""
