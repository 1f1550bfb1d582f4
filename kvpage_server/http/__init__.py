"""HTTP for those who know nobody: bounds of connections, guards of requests, a server that ends when it is told to.

The engine's API and the page server's figures are served with it. Needs uvicorn, starlette and nothing of ours.
"""
