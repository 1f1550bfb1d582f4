"""The tiers of agents' contexts below the live batch: memory, a page server, files; and the loads and saves between
them.
"""
