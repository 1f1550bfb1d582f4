"""Parts of the batch engine: requests, their blocks, and the model runner, which also detects a changed model."""
