"""How the client speaks to one server: connections, questions as bytes, answers as values, each within a deadline.

This package knows neither pages nor the number of servers.
"""
