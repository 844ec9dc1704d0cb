"""Sessions as the service knows them, for tests of what is pure."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

from enforcer.sessions import Network, Session
from policy import proxying
from policy.declaration import Declaration, Pattern
from policy.identity import Sandbox

BOX = Sandbox("demo-0a0b0c0d")
NETWORK = Network(BOX.network, BOX.bridge, IPv4Network("172.16.0.0/26"), IPv4Address("172.16.0.1"))


def session(number: int = 1, *patterns: Pattern, **changes: Any) -> Session:
    """Return a running session of mode proxy with these patterns; ``changes`` replace any field."""
    fields: dict[str, Any] = {
        "container": f"c{number}",
        "name": f"corral-c{number}",
        "sandbox": BOX,
        "service": "main",
        "session": f"{number:08x}",
        "address": f"172.16.0.{number + 1}",
        "hostname": "main",
        "hosts_file": Path("/nowhere"),
        "declaration": Declaration(mode="proxy", patterns=patterns),
        "network": NETWORK,
        "running": True,
    }
    return Session(**{**fields, **changes})


def proxy(number: int = 9, **changes: Any) -> Session:
    """Return the sandbox's proxy."""
    fields = {"service": proxying.SERVICE, "declaration": Declaration(), "purpose": proxying.PURPOSE}
    return session(number, **{**fields, **changes})
