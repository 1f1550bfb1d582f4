"""Files and JSON of others, read with bounds."""
