"""What a running store says of itself, read over the Redis protocol into typed records. Knows no HTTP and no HTML."""
