"""Pages and blocks on several servers through the same PageClient: on a Valkey or Redis Cluster, or side by side.

Here lie the map of a cluster, a block as one value, and what each method of a client asks of which node. A method is a
*plan* (`plan.py`), which does no I/O: it says what to ask of which nodes at once, and is told what came of it. Only
`nodes.py`, for threads, and AsyncPageClient wait. What is asked in which words of a single server lies above, in
`kvpage_server.client`.
"""
