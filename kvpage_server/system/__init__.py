"""What the operating system does for us: files that survive, signals, memory, the terminal and what is written to it,
how a program ends.

Imports nothing of ours from outside of this folder, so that everybody may use it.
"""
