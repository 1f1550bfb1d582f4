"""A store's keys in safetensors files: dumped from a running server, restored to one, or inspected without one.

Uses only the server's commands, through `kvpage_server.client`, and none of the server's code.
"""
