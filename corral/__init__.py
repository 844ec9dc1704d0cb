"""corral's command line and the life cycle of a sandbox. It declares; it never touches netfilter."""

__version__ = "0.1.0"
