"""The demonstration: a conversation that begins at one engine and goes on at another, without computing it again."""
