"""The replies of the Redis protocol: values in, pieces of bytes out, without sockets. `core` parses the requests."""
