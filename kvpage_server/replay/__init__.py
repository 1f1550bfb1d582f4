"""`kvpage replay`: replays recorded requests with the store's policies, to see which policy keeps what is requested
again."""
