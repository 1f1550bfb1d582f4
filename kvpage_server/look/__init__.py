"""Output of `kvpage` for a running store: lines and tables for people, JSON for programs."""
