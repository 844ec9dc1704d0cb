"""Techniques of escaping from a container and of looking around in one, tried in a sandbox and beside it."""
