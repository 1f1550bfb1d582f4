"""Every parameter, declared once, and code that depends only on parameters: defaults, the log, TLS certificates.

This package does not depend on the server: CONFIG SET applies changed parameters to a running server.
"""
