"""Messages that the server sends by itself: of channels, of keyspace events, and about changed keys that were cached.

This package distributes the events of the keyspace to their recipients. It depends on no command.
"""
