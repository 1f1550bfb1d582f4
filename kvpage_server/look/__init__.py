"""What `kvpage` shows of a running store: lines and tables for people, JSON for programs."""
