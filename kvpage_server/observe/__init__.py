"""A running store as typed records, read over the Redis protocol. This package has no HTTP and no HTML."""
