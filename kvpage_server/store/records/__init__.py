"""What describes a value on disk, as bytes: a record of its own, or a row in the sheet that a block's pages share.

Nothing here has a file, or knows what is in memory. Memory keeps rows of what rests, so this lies below both.
"""
