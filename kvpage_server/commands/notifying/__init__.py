"""Messages that the server sends by itself: of channels, of keyspace events, and about changed keys that were cached.

Knows the keyspace's events and what a listener is, and no commands.
"""
