"""A store's keys in safetensors files: dumped from a running server, restored to one, or inspected without one.

This package sends commands with `kvpage_server.client`, and imports no code of the server.
"""
