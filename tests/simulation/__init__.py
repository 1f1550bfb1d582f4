"""The whole server in a simulated world: time, network, disk and threads follow from one number. See README.md."""
