"""Execution of every command: lookup, admission, preparation, call, statistics and MONITOR.

Knows commands only by their row in the table: no command is named here.
"""
