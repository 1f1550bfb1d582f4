"""Connectors of inference engines to a kvpage-server.

`names` and `jobs` are the common core. They import no engine, and of the server only `client` and `page`. Each other
module connects one engine, and is imported by that engine.
"""
