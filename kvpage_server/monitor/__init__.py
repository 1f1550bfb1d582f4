"""The process beside the server that answers HTTP: figures for Prometheus, who may look, and the way to the store.

All it knows of the store it asks over the Redis protocol, so that nobody who reads, slowly or wrongly, costs the server
more than the question.
"""
