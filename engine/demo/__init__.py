"""The demonstration: a conversation that begins at one engine and goes on at another, without computing it again.

Contains: processes, their prompts, and their output. Excludes: parts that an engine needs itself.
"""
