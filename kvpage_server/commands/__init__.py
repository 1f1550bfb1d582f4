"""What each command does, a module a family. Knows the store and the values of replies; knows no socket."""
