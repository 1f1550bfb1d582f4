"""What a dump is on disk: its directory, its files, the entries in them, and how names of keys and planes are spelt.

No server is asked here, and none is known.
"""
