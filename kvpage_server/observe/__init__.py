"""A running store, read over the Redis protocol into typed records. Nothing here knows HTTP or HTML."""
