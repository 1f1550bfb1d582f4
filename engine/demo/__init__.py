"""The demonstration: a conversation that begins at one engine and goes on at another, without computing it again.

May lie here: processes, what is asked of them, and what is told. May not come in: anything an engine needs itself.
"""
