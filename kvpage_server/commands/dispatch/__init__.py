"""Execution of every command: lookup, admission, preparation, call, statistics and MONITOR.

This package depends on no command by name, only on the rows of the table.
"""
