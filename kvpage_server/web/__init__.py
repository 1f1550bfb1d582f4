"""What a browser is shown of the store, by the process beside the server; what is in `shared`, the engine shows too."""
