"""Dumps: the keys of a store in safetensors files, written from a running server, restored to one, or inspected.

This package sends commands with `kvpage_server.client`, and imports no code of the server.
"""
