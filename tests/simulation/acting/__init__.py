"""Execution of the steps: the lives of a server, its clients, engines and tools, and faults of the world."""
