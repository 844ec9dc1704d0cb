"""What the host says must be true in this container."""

from __future__ import annotations

import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

OUTSIDE_NAME = "example.com"
NAME = re.compile("[A-Za-z0-9_.-]{1,253}")
REQUIRED = frozenset({"uid", "gid", "home", "gateway", "probe"})
LIMITS = {name: name for name in ("pids", "memory", "cpus", "nofile")}
OPTIONAL = frozenset(
    {
        "mounts_rw",
        "mounts_ro",
        "state",
        "shadows",
        "tmpfs",
        "peers",
        "limits",
        "limits_best_effort",
        "host_services",
        "names",
        "env_file",
        "outside_name",
        "resolvers",
        "profile",
        "connection",
        "runtime",
        "closed",
        "proxy",
        "answered",
    }
)


class Proxy:
    """What is known of the sandbox's proxy.

    port: of the gateway, where it is asked.
    denied: a name that exists, and that it may not be asked for.
    permitted: a (name, port) that it may be asked for, speaking TLS with that name, or None.
    address: its own, or empty.
    only: (address, port) pairs that it may reach now, and a session may not.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        _only(body, "port", "denied", "permitted", "address", "only")
        self.port, self.denied = int(body["port"]), _name(body["denied"])
        self.permitted = _place(body.get("permitted"))
        self.address = str(body.get("address", ""))
        self.only = [(str(address), int(port)) for address, port in body.get("only", [])]


class Answered:
    """What is known of names that are answered at the gateway.

    denied: a name that exists, and that is not answered. permitted: a (name, port) that is, or None.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        _only(body, "denied", "permitted")
        self.denied = _name(body["denied"])
        self.permitted = _place(body.get("permitted"))


def _only(body: Mapping[str, Any], *known: str) -> None:
    unknown = sorted(set(body) - set(known))
    if unknown:
        raise ValueError(f"this checker does not know: {', '.join(unknown)}")


def _name(text: object) -> str:
    if not isinstance(text, str) or not NAME.fullmatch(text):
        raise ValueError(f"not a name: {text!r}")
    return text


def _place(pair: Any) -> tuple[str, int] | None:
    if pair is None:
        return None
    name, port = pair
    return _name(name), int(port)


class Expectations:
    """The expectations, as attributes named like the keys of the JSON object.

    uid, gid: the host user's.
    home: the host user's home on the host.
    gateway: address of the host on the sandbox's network.
    probe: {"address", "port"} of a host outside that no policy allows; here a pair.
    mounts_rw, mounts_ro: the policy's mounts, equal paths on both sides.
    state: corral's own writable mounts: the agent's home, and what outlives the container.
    shadows: corral's own read-only mounts.
    tmpfs: directories in memory.
    peers: name -> address of every other sandbox container of the user.
    limits: "pids", "memory" (bytes), "cpus", "nofile" -> what was asked for.
    limits_best_effort: a limit whose controller is missing is excused.
    host_services: ports that are reachable as corral-host:<port>.
    names: pinned name -> addresses.
    env_file: path of the file of secrets on the host, or null.
    outside_name: a name that exists outside and is not allowed.
    resolvers: addresses that do answer DNS to the host, so that their silence means something.
    closed: addresses that are closed although all public ones are open, or null where they are not.
    proxy: of a sandbox that has one, else null; here a Proxy.
    answered: where permitted names are answered, else null; here an Answered.
    profile: the harness's own checks, [{"kind", "target"}]; here pairs.
    runtime: what runs the container, by default "runc"; another one has a kernel of its own.
    connection: "own" (the default), "none" (no network at all) or "host" (the host's, nothing enforced).

    Raises:
        ValueError, TypeError, KeyError, AttributeError: the object is not of that shape. A key that this
            checker does not know is an error: what it asks for would go unproven.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        unknown = sorted(set(body) - REQUIRED - OPTIONAL)
        if unknown:
            raise ValueError(f"this checker does not know: {', '.join(unknown)}")
        missing = sorted(REQUIRED - set(body))
        if missing:
            raise ValueError(f"not told: {', '.join(missing)}")
        self.uid, self.gid = int(body["uid"]), int(body["gid"])
        self.home = clean(body["home"])
        self.gateway = str(body["gateway"])
        self.probe = (str(body["probe"]["address"]), int(body["probe"]["port"]))
        self.mounts_rw = [clean(path) for path in body.get("mounts_rw", [])]
        self.mounts_ro = [clean(path) for path in body.get("mounts_ro", [])]
        self.state = [clean(path) for path in body.get("state", [])]
        self.shadows = [clean(path) for path in body.get("shadows", [])]
        self.tmpfs = [clean(path) for path in body.get("tmpfs", [])]
        self.peers = {str(name): str(address) for name, address in body.get("peers", {}).items()}
        self.limits = {LIMITS[name]: float(value) for name, value in body.get("limits", {}).items()}
        self.limits_best_effort = bool(body.get("limits_best_effort", False))
        self.host_services = [int(port) for port in body.get("host_services", [])]
        self.names = {str(name): sorted(map(str, found)) for name, found in body.get("names", {}).items()}
        self.env_file = clean(body["env_file"]) if body.get("env_file") else None
        self.outside_name = str(body.get("outside_name", OUTSIDE_NAME))
        self.resolvers = [str(address) for address in body.get("resolvers", [])]
        self.connection = str(body.get("connection", "own"))
        if self.connection not in {"own", "none", "host"}:
            raise ValueError(f"not a connection: {self.connection!r}")
        self.runtime = str(body.get("runtime", "runc"))
        self.profile = [(str(check["kind"]), clean(check["target"])) for check in body.get("profile", [])]

        closed = body.get("closed")
        self.closed = None if closed is None else [str(address) for address in closed]
        proxy, answered = body.get("proxy"), body.get("answered")
        self.proxy = None if proxy is None else Proxy(proxy)
        self.answered = None if answered is None else Answered(answered)

    @property
    def mounts(self) -> list[str]:
        """Every mounted path of the policy."""
        return self.mounts_rw + self.mounts_ro


def clean(path: object) -> str:
    """Return an absolute path in its plain form."""
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        raise ValueError(f"not an absolute path: {path!r}")
    return os.path.normpath(path)


def below(path: str, directory: str) -> bool:
    """Say whether ``path`` lies in ``directory``, at any depth."""
    return path.startswith(directory.rstrip("/") + "/")
