"""Becomes the agent, when container and network are what they must be: the first program of every sandbox.

Packed into one root-owned file of the image (agent_image/archive.py). Python 3.9 or later, standard library
only.
"""
