"""The store's web page, for the process beside the server. The engine's page uses `shared`, too."""
