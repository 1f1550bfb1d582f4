"""Benchmarks of this repository: `python -m benchmarks [NAME ...] [--quick]`. A user's own machine: `kvpage bench`.

A benchmark is a module here with a `main(arguments)`; `--quick` is the one argument that all of them take.
"""
