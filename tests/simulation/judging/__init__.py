"""What was wrong with a reply, or with what the server holds."""
