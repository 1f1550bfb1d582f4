"""The tiers of an agent's memory below the live batch: memory, a page server, files.

May lie here: a tier, what moves contexts between tiers, and what counts it. May not come in: the engines, or HTTP.
"""
