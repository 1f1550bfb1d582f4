"""What `kvpage` shows of a running store: to people as lines and tables, to programs as JSON."""
