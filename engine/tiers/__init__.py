"""The tiers of an agent's memory below the live batch: memory, a page server, files.

Contains: the tiers, the movement of contexts between tiers, and its metrics. Excludes: the engines, and HTTP.
"""
