"""The process next to the server that answers HTTP: metrics for Prometheus, logins, and its connections to the store.

It queries the store over the Redis protocol. So slow or broken HTTP clients do not delay the server's event loop.
"""
