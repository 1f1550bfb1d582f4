"""`kvpage replay`: recorded requests through the policies of the store, to see which keeps what will be asked for."""
