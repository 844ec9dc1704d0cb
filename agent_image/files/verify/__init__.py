"""Proves from inside a sandbox container that its fence holds.

Packed into one root-owned file of the image (agent_image/archive.py). Python 3.9 or later, standard library
only: it trusts nothing but the kernel.
"""
