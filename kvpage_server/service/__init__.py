"""The service: what it says when it begins, does again and again, and renews when it is told to."""
