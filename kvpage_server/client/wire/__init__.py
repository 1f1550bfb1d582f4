"""The client's protocol with one server: connections, requests as bytes, replies as values, and deadlines.

This package depends neither on pages nor on the number of servers.
"""
