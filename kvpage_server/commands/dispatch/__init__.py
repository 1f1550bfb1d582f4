"""What happens to every command: it is found, admitted, made ready, run, counted and shown.

Knows commands by their row in the table alone: no command's name is written here.
"""
