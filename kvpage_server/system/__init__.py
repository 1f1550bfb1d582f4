"""What the operating system does for us: durable files, signals, memory, the terminal, and how a program ends.

Imports nothing of ours from outside this folder, so every room may use it.
"""
