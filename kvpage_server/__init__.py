"""A server that speaks the Redis protocol and keeps KV pages. MLX never comes in here."""

__version__ = "0.1.0"
