"""What the operating system does for us: files that survive, signals, memory, the terminal, how a program ends.

Imports nothing of ours from outside of this folder, so that everybody may use it.
"""
