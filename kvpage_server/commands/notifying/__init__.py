"""Messages that the server sends by itself: of channels, of keyspace events, and about changed keys that were cached.

The keyspace's events and their recipients. This package knows no commands.
"""
