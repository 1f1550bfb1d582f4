cdef enum:
    UNLOCKED_FROM = 16 * 1024  # bytes copied, hashed or sent without the interpreter's lock; below, getting it back costs more
