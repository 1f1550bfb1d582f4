"""Doing the steps: the lives of a server, its clients, engines and tools, and what the world does to them."""
