"""All steps of a seed, drawn before the run."""
