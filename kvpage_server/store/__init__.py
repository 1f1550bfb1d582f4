"""Where pages live. Knows the page contract; knows nothing of the protocol or of sockets."""
