"""Every parameter, declared once, and what is made of parameters alone: defaults, the log, TLS's certificates.

Knows no server: what a changed parameter does to a running one is said where CONFIG SET is.
"""
