cdef enum:
    # From this number of bytes on, data is copied, hashed or sent without the interpreter's lock. For fewer bytes,
    # getting the lock back costs more time than other threads gain.
    UNLOCKED_FROM = 16 * 1024
