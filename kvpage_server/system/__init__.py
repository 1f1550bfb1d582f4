"""The operating system: durable files, the process, the terminal, and exit codes.

The modules of this package import only each other, so every package may import them.
"""
