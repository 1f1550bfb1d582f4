"""Sockets: listeners, sessions, transports and memory limits of connections. `commands` does not import this
package.
"""
