"""Persistent memory elsewhere: instances on a page server, and safetensors files.

May lie here: what is written and read back. May not come in: graphs, or how a step runs.
"""
