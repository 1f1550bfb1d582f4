"""What happens to every command: it is found, admitted, made ready, run, counted and shown.

Knows commands only by their row in the table: no command is named here.
"""
