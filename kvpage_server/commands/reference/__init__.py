"""docs/commands.md, made from the command table and from examples that the tests run."""
