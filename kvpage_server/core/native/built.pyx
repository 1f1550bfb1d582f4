"""What this compiled core was made of."""

cdef extern from *:
    const char *KVPAGE_SOURCES

SOURCES = KVPAGE_SOURCES.decode()
