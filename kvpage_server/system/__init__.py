"""The operating system: durable files, signals, memory, the terminal, and exit codes.

Imports nothing of ours from outside this folder, so every room may use it.
"""
