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

from policy import proxying
from policy.declaration import ALLOWLIST, ANSWER, OPEN, PROXY
from policy.patterns import is_pattern

_Contradiction = tuple[tuple[str | int, ...], str, str]

OWN, NONE, HOST = "own", "none", "host"
# What Docker calls them; a sandbox's own network has a name.
APART = (NONE, HOST)
_NO_ANSWER = {
    OPEN: "egress.mode is open: every name is answered",
    PROXY: "egress.mode is proxy: programs give names to the proxy, and ask no resolver",
    NONE: "egress.mode is none: there is no network to ask by",
    HOST: "egress.mode is host: there are this host's resolvers",
}


def connection(mode: str) -> str:
    """Return what a policy's ``egress.mode`` makes of a container."""
    return mode if mode in APART else OWN


def contradictions(tree: Mapping[str, Any]) -> Iterator[_Contradiction]:
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
    elif mode == PROXY and egress.get("allow_stale"):
        what = "egress.mode is proxy: names are resolved when they are asked for, so no start waits for them"
        yield ("egress", "allow_stale"), what, "remove it"
    yield from _asked(egress)
    yield from _taken_ports(tree, egress)
    if mode in APART and tree.get("mode") == "daemon":
        # What is always on is watched by its gate's word about the fence, and these have no fence.
        what = f"not available with egress.mode {mode}"
        yield ("mode",), what, "use mode: run, or egress.mode: allowlist"


def _asked(egress: Mapping[str, Any]) -> Iterator[_Contradiction]:
    """Yield what is wished of a proxy or an answerer where there is none."""
    mode = egress.get("mode", ALLOWLIST)
    if egress.get("dns") == ANSWER and mode in (PROXY, OPEN, *APART):
        yield ("egress", "dns"), _NO_ANSWER[mode], "remove it, or use egress.mode: allowlist"
    proxied = is_proxied(egress)
    for index, (host, entry) in enumerate(_entries(egress)):
        at: tuple[str | int, ...] = ("egress", "allow", index)
        if is_pattern(host):
            for key in ("optional", "liveness"):
                if entry.get(key) is not None:
                    what = "an entry for many names is not resolved when a session starts"
                    yield (*at, key), what, f"remove {key}"
        if not proxied:
            for key in ("protocol", "sni"):
                if entry.get(key) is not None:
                    what = "this policy has no proxy that looks at what passes: each name is pinned"
                    yield (*at, key), what, f"remove {key}, or use egress.mode: proxy"
        elif entry.get("protocol") == "tcp" and entry.get("sni") is not None:
            what = "with protocol: tcp nothing looks for a name in what passes"
            yield (*at, "sni"), what, "remove sni, or protocol"


def is_proxied(egress: Mapping[str, Any]) -> bool:
    """Say whether an ``egress`` section as it was read gives its sandbox a proxy."""
    mode = egress.get("mode", ALLOWLIST)
    return mode == PROXY or (mode == ALLOWLIST and any(is_pattern(host) for host, _ in _entries(egress)))


def _entries(egress: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    allow = egress.get("allow")
    for entry in allow if isinstance(allow, list) else ():
        fields = entry if isinstance(entry, dict) else {"host": entry}
        yield str(fields.get("host", "")), fields


def _taken_ports(tree: Mapping[str, Any], egress: Mapping[str, Any]) -> Iterator[_Contradiction]:
    """Yield the host services on ports of the gateway that corral needs itself."""
    # That module imports this one.
    from policy.container import RESOLVER_PORT

    services = tree.get("host_services")
    for index, service in enumerate(services if isinstance(services, list) else ()):
        port = service.get("port") if isinstance(service, dict) else None
        if port == proxying.PORT and is_proxied(egress):
            what = f"port {port} of the gateway leads to this sandbox's proxy"
        elif port == RESOLVER_PORT and (egress.get("dns") == ANSWER or egress.get("mode") == OPEN):
            what = f"port {port} of the gateway is where names are answered"
        else:
            continue
        yield ("host_services", index, "port"), what, "let the service listen on another port"
