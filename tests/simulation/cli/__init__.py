"""The command line: which seeds are run, and what is said of them."""
