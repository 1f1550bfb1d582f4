"""Output of `kvpage` for a running store: lines and tables for the terminal, JSON for programs."""
