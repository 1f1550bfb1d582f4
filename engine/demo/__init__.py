"""The demonstration: a conversation that begins on one engine and continues on another, which reuses its tokens."""
