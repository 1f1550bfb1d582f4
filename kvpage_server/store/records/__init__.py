"""The description of a value on disk, as bytes: a record of its own, or a row in the sheet of its block.

Nothing here has a file, or knows what is in memory.
"""
