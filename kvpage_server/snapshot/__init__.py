"""A store's keys in safetensors files: dumped from a running server, restored to one, inspected without.

Knows the server by its commands alone, through `kvpage_server.client`; nothing of the server's own may come in.
"""
