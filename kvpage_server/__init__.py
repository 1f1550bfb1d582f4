"""A server that speaks the Redis protocol and stores KV pages. It does not import MLX."""

__version__ = "0.1.0"
