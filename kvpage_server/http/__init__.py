"""What the engine's API and the page server's web page share: limits of connections, checks of requests, and a server
that stops when it is told to. Needs uvicorn and starlette, and nothing of ours."""
