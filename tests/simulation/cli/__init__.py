"""The command line: seeds to run, and output."""
