"""The language: a graph as data, the parser of its text, and the builder that makes the same in Python.

May lie here: what a graph says. May not come in: sizes, tensors, or MLX.
"""
