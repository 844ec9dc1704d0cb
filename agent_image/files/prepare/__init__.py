"""Makes a foreign image fit for an agent: run as root in the one layer that corral adds to it, then removed.

Packed like the entrypoint (agent_image/archive.py). Python 3.9 or later, standard library only.
"""
