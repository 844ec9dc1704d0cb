"""The writer: the only part of corral that touches netfilter.

It runs from a root-owned copy with CAP_NET_ADMIN and CAP_NET_RAW and nothing else, so this package imports
the standard library and pyroute2 only, and trusts nothing that arrives on its socket.
"""
