cdef enum:
    # Bytes from which on data is copied, hashed or sent without the interpreter's lock. For less, to get the lock back
    # costs more than other threads gain.
    UNLOCKED_FROM = 16 * 1024
