"""The proxy of a sandbox: tunnels TLS to names that the enforcer allows, and nothing else.

Packed into one root-owned file of the image (agent_image/archive.py). Python 3.9 or later, standard library
only. It is not trusted: it can reach only what the enforcer opened for it.
"""
