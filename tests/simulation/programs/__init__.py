"""What is to happen: all steps of a seed, drawn before anything happens."""
