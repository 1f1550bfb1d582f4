"""The tiers of an agent's memory below the live batch."""
