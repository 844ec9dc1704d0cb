"""How a sandbox is connected, by its ``egress.mode``. Pure.

======  ==================================================================================================
own     a network of its own, behind the fence: what the kernel lets out is what the policy lists
none    no network: the container has only its own loopback interface
host    this host's network, with nothing in between: nothing is enforced
======  ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from policy.declaration import OPEN

OWN, NONE, HOST = "own", "none", "host"
# What Docker calls them; a sandbox's own network has a name.
APART = (NONE, HOST)


def connection(mode: str) -> str:
    """Return what a policy's ``egress.mode`` makes of a container."""
    return mode if mode in APART else OWN


def contradictions(tree: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield what a policy wants that its egress mode cannot keep: where it is, what is wrong, the fix.

    ``tree`` is the file as it was read, valid or not.
    """
    egress = tree.get("egress")
    egress = egress if isinstance(egress, dict) else {}
    mode = egress.get("mode")
    if mode == NONE:
        fix = "remove it, or use egress.mode: allowlist"
        for key in ("allow", "from_host"):
            if egress.get(key):
                yield ("egress", key), "egress.mode is none: there is no network to reach it by", fix
        if tree.get("host_services"):
            what = "egress.mode is none: a service of this host cannot be reached without a network"
            yield ("host_services",), what, fix
    elif mode == OPEN:
        # A list that limits nothing must not look as if it did.
        for key in ("allow", "from_host", "allow_stale"):
            if egress.get(key):
                what = "egress.mode is open: all public addresses are reachable, whatever names have them"
                yield ("egress", key), what, "remove it, or use egress.mode: allowlist"
    elif mode == HOST and tree.get("host_services"):
        what = "egress.mode is host: there is no corral-host, and services of this host are at 127.0.0.1"
        yield ("host_services",), what, "remove host_services, or use egress.mode: allowlist"
    if mode in APART and tree.get("mode") == "daemon":
        # What is always on is watched by its gate's word about the fence, and these have no fence.
        what = f"not available with egress.mode {mode}"
        yield ("mode",), what, "use mode: run, or egress.mode: allowlist"
