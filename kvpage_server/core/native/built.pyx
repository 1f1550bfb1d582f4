"""The digest of the sources that this core was compiled from, see `core/sources.py`."""

cdef extern from *:
    const char *KVPAGE_SOURCES

SOURCES = KVPAGE_SOURCES.decode()
