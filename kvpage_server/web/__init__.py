"""The store's web page, for the HTTP process next to the server. The engine's page uses `shared`, too."""
