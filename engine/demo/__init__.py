"""The demonstration: a conversation that begins at one engine and continues at another, which does not compute the
beginning again.

Contains: processes, their prompts, and their output. Excludes: parts that an engine needs itself.
"""
