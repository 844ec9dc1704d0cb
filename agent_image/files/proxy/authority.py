"""The target of a CONNECT, and the one form names are compared in. Pure.

``canonical`` is ``policy.hosts.canonical_wire_name`` written again, because nothing of corral is in the
image; a test holds the two together.
"""

from __future__ import annotations

import re

MAX_NAME = 253
MAX_LABEL = 63
MAX_PORT = 65535

_LABEL = re.compile(r"[a-z0-9_-]+")
_NUMERIC = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")
# Neither a sign nor a leading zero: one number has one spelling.
_PORT = re.compile(r"[1-9][0-9]{0,4}")


class BadName(ValueError):
    """Not a name, or not a name with a port. The text says why, and never holds the input."""


def canonical(raw: str) -> str:
    """Return a name from the wire in lower case and without one final dot. Nothing is decoded or mapped.

    Raises:
        BadName: empty, too long, an empty label, a character outside [A-Za-z0-9_-], an IP address.
    """
    if not raw.isascii():
        raise BadName("a name must be ASCII")
    name = (raw[:-1] if raw.endswith(".") else raw).lower()
    if not name or len(name) > MAX_NAME:
        raise BadName("an empty name or a name that is too long")
    labels = name.split(".")
    if any(len(label) > MAX_LABEL or not _LABEL.fullmatch(label) for label in labels):
        raise BadName("a label that no host name has")
    if _NUMERIC.fullmatch(labels[-1]):
        raise BadName("an IP address, not a name")
    return name


def parse(target: str) -> tuple[str, int]:
    """Return (canonical name, port) of ``name:port``.

    Raises:
        BadName: anything else: a user, a path, brackets, an address, a port that is no number of 1 to 65535.
    """
    name, colon, port = target.rpartition(":")
    if not colon:
        raise BadName("a target without a port")
    if not _PORT.fullmatch(port) or int(port) > MAX_PORT:
        raise BadName("a port that is not a number from 1 to 65535")
    return canonical(name), int(port)
