"""How the client speaks to one server: connections, questions as bytes, answers as values, each within a deadline.

Nothing here knows what a page is, or how many servers there are.
"""
