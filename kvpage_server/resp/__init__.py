"""The Redis protocol, sans I/O: bytes in, commands out; values in, buffers out. Sockets may not come in."""
