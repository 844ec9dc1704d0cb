"""What a user allowed or denied one running container, beside what its labels declare. Pure, and its file.

Both come through the enforcer's socket, which is the user's alone, and both live as long as the container.
The file is written before a name is opened and after one is closed; when it cannot be read its container gets
nothing at all, because a denial may have been in it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from policy import savedfile
from policy.declaration import ANSWER, PROXY, Declaration, Name, Pattern
from policy.errors import EnforcerError
from policy.hosts import HostError, parse_host
from policy.patterns import is_regex, parse_pattern

LONGEST = 30 * 86400.0  # seconds
MAX_GRANTS = 64
MAX_PORTS = 64
MAX_DENIED = 1024
VERSION = 1
# With patterns in it, which what reads version 1 alone does not know: it then opens nothing, as it must.
WITH_PATTERNS = 2
_IDENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")

Ports = Mapping[int, float | None]


@dataclass(frozen=True)
class Overrides:
    """``granted``: name -> port -> when it ends (the service's clock; None: with the container).

    ``denied``: declared names and patterns that were taken back, and names that a pattern would match.
    ``listed``: every name that was ever granted, in order: the hosts file keeps their places. ``patterns``:
    what may be asked for and is not pinned, like ``granted``: zones, expressions, names of mode proxy.
    """

    granted: Mapping[str, Ports] = field(default_factory=dict)
    denied: frozenset[str] = frozenset()
    listed: tuple[str, ...] = ()
    patterns: Mapping[str, Ports] = field(default_factory=dict)

    def names(self, declaration: Declaration) -> tuple[Name, ...]:
        """Return what is pinned for the container: declared and not denied, and granted."""
        if declaration.mode == PROXY:
            return ()
        found = {name.host: name for name in declaration.names if name.host not in self.denied}
        for host, ports in self.granted.items():
            known = found.get(host)
            if known is None:
                found[host] = Name(host=host, ports=tuple(sorted(ports)), optional=True)
            elif not ports.keys() <= set(known.ports):
                merged = tuple(sorted({*known.ports, *ports}))
                found[host] = known.model_copy(update={"ports": merged})
        return tuple(found.values())

    def asked(self, declaration: Declaration) -> tuple[tuple[Pattern, float], ...]:
        """Return what the container may ask for, of a proxy or the answerer, and when that ends.

        What was taken back is left out; a single name that was is refused by ``taken``.
        """
        if not asks(declaration):
            return ()
        forever = float("inf")
        found = [(pattern, forever) for pattern in declaration.patterns if pattern.host not in self.denied]
        for granted in (self.granted, self.patterns):
            found += [
                (Pattern(host=host, ports=(port,)), forever if until is None else until)
                for host, ports in granted.items()
                for port, until in ports.items()
            ]
        return tuple(found)

    def taken(self, name: str) -> bool:
        """Tell whether a name was taken back: then only what was granted by this very name opens it."""
        return name in self.denied

    def places(self, declaration: Declaration) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the hosts file: declared ones, and those that came later."""
        declared = tuple(name.host for name in declaration.names)
        return declared, tuple(host for host in self.listed if host not in declared)

    def ends(self, host: str, declaration: Declaration) -> dict[int, float | None]:
        """Return the ports of a name that are granted and not declared, with when each ends."""
        own = {
            port
            for name in declaration.names
            if name.host == host and host not in self.denied
            for port in name.ports
        }
        return {port: until for port, until in self.granted.get(host, {}).items() if port not in own}

    def allow(self, host: str, ports: tuple[int, ...], until: float | None) -> Overrides:
        """Return this with ``host`` granted on ``ports``; what is granted for longer stays so.

        Raises:
            EnforcerError: more than one container may be granted.
        """
        granted = {**self.granted, host: _merged(self.granted.get(host, {}), ports, until)}
        listed = self.listed if host in self.listed else (*self.listed, host)
        _bound(len(listed), granted[host])
        return replace(self, granted=granted, listed=listed)

    def allow_asking(self, text: str, ports: tuple[int, ...], until: float | None) -> Overrides:
        """Return this with a pattern, or a name that is not pinned, granted; like ``allow``."""
        patterns = {**self.patterns, text: _merged(self.patterns.get(text, {}), ports, until)}
        _bound(len(patterns), patterns[text])
        return replace(self, patterns=patterns)

    def deny(self, host: str, declaration: Declaration, matched: bool = False) -> Overrides:
        """Return this with a name or a pattern taken back, whoever gave it.

        ``matched``: a pattern that stays would open the name all the same.
        """
        declared = host in {entry.host for entry in declaration.names} | {
            p.host for p in declaration.patterns
        }
        granted = {name: ports for name, ports in self.granted.items() if name != host}
        patterns = {text: ports for text, ports in self.patterns.items() if text != host}
        denied = self.denied | ({host} if declared or matched else set())
        if len(denied) > MAX_DENIED:
            raise EnforcerError(
                f"more than {MAX_DENIED} names were taken back from one session",
                "deny the pattern, or end it",
            )
        return replace(self, granted=granted, patterns=patterns, denied=denied)

    def opens(self, before: Overrides, declaration: Declaration) -> bool:
        """Tell whether this lets a container reach anything that ``before`` does not, or for longer."""

        def reach(overrides: Overrides) -> dict[tuple[str, int], float]:
            forever = float("inf")
            found = {(n.host, port): forever for n in overrides.names(declaration) for port in n.ports}
            for host, port in found:
                until = overrides.ends(host, declaration).get(port)
                found[host, port] = forever if until is None else until
            for pattern, until in overrides.asked(declaration):
                for port in pattern.ports:
                    key = (f"asked for: {pattern.host}", port)
                    found[key] = max(until, found.get(key, 0.0))
            return found

        old = reach(before)
        return any(until > old.get(key, 0.0) for key, until in reach(self).items())

    def at(self, now: float) -> Overrides:
        """Return this without what has ended; itself when nothing has."""
        granted, patterns = _left(self.granted, now), _left(self.patterns, now)
        if granted == self.granted and patterns == self.patterns:
            return self
        return replace(self, granted=granted, patterns=patterns)


def asks(declaration: Declaration) -> bool:
    """Tell whether a container can ask for names: of its sandbox's proxy, or of the answerer."""
    return declaration.proxied or declaration.dns == ANSWER


def is_pattern(text: str) -> bool:
    """Tell whether an entry stands for many names."""
    return text.startswith("*.") or is_regex(text)


def _merged(old: Ports, ports: tuple[int, ...], until: float | None) -> dict[int, float | None]:
    merged = dict(old)
    for port in ports:
        known = old.get(port, 0.0)
        merged[port] = None if until is None or known is None else max(until, known)
    return merged


def _bound(names: int, ports: Ports) -> None:
    if names > MAX_GRANTS or len(ports) > MAX_PORTS:
        raise EnforcerError(
            f"one session can be granted {MAX_GRANTS} names of {MAX_PORTS} ports, and no more",
            "list what it needs in corral.yaml and start a new session",
        )


def _left(granted: Mapping[str, Ports], now: float) -> dict[str, Ports]:
    found = {
        host: {port: until for port, until in ports.items() if until is None or until > now}
        for host, ports in granted.items()
    }
    return {host: ports for host, ports in found.items() if ports}


def dump(overrides: Overrides, now: float, wall: float) -> str:
    """Return the saved form; ``now`` is the service's clock and ``wall`` the time of day at this moment."""

    def timed(granted: Mapping[str, Ports]) -> dict[str, dict[str, float | None]]:
        return {
            host: {str(port): None if until is None else until - now + wall for port, until in ports.items()}
            for host, ports in granted.items()
        }

    body: dict[str, Any] = {"version": VERSION, "wall": wall, "granted": timed(overrides.granted)}
    if overrides.patterns or any(map(is_pattern, overrides.denied)):
        body |= {"version": WITH_PATTERNS, "patterns": timed(overrides.patterns)}
    return json.dumps({**body, "denied": sorted(overrides.denied), "listed": list(overrides.listed)})


def parse(text: str, now: float, wall: float) -> Overrides:
    """Read the saved form. Nothing lasts longer than it had left when it was saved, whatever the clock says.

    Raises:
        ValueError: another version, or not what ``dump`` returns.
    """
    body = savedfile.parse(text)
    try:
        if body["version"] not in (VERSION, WITH_PATTERNS):
            raise ValueError(f"it has version {body['version']!r}, not {VERSION} or {WITH_PATTERNS}")
        wide = body["version"] == WITH_PATTERNS
        saved = float(body["wall"])
        if not math.isfinite(saved):
            raise ValueError(f"it is damaged: {saved} is not a time")

        def until(value: Any) -> float | None:
            if value is None:
                return None
            left = min(float(value) - wall, float(value) - saved, LONGEST)
            # Not a number compares as false: it has ended.
            return now + left if left > 0 else now

        granted = {
            _host(host): {_port(port): until(value) for port, value in ports.items()}
            for host, ports in body["granted"].items()
        }
        patterns = {
            _pattern(text): {_port(port): until(value) for port, value in ports.items()}
            for text, ports in (body["patterns"] if wide else {}).items()
        }
        denied = frozenset((_pattern if wide else _host)(host) for host in body["denied"])
        listed = tuple(dict.fromkeys(_host(host) for host in body["listed"]))
    except (KeyError, TypeError, AttributeError, OverflowError, HostError) as error:
        raise ValueError(f"it is damaged: {error!r}") from error
    if max(len(listed), len(patterns)) > MAX_GRANTS or any(
        len(ports) > MAX_PORTS for ports in (*granted.values(), *patterns.values())
    ):
        raise ValueError("it is damaged: it grants more than one session can have")
    if not granted.keys() <= set(listed):
        raise ValueError("it is damaged: a granted name has no place")
    return Overrides(granted, denied, listed, patterns).at(now)


def _host(text: Any) -> str:
    if not isinstance(text, str) or parse_host(text, force=True) != text:
        raise ValueError(f"it is damaged: {text!r} is not a name")
    return text


def _pattern(text: Any) -> str:
    if not isinstance(text, str) or not is_pattern(text):
        return _host(text)
    parse_pattern(text, force=True)
    return text


def _port(text: Any) -> int:
    port = int(text)
    if not 0 < port < 65536:
        raise ValueError(f"it is damaged: {port} is not a port")
    return port


class Store:
    """One file for each container that has overrides."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _path(self, container: str) -> Path:
        if not _IDENT.fullmatch(container):
            raise EnforcerError(f"{container!r} is not the id of a container")
        return self._directory / f"{container}.json"

    def load(self, container: str, now: float, wall: float) -> Overrides | None:
        """Return a container's overrides; none at all when it has no file.

        Raises:
            EnforcerError: the file is there and cannot be used.
        """
        path = self._path(container)
        try:
            return parse(savedfile.text(path), now, wall)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise EnforcerError(
                f"what was allowed and denied in it cannot be read from {path}: {error}",
                "start a new session; the file goes with the container",
            ) from error

    def save(self, container: str, overrides: Overrides, now: float, wall: float) -> None:
        """Make a container's overrides outlive this process.

        Raises:
            EnforcerError: the disk refuses.
        """
        path = self._path(container)
        partial = path.with_suffix(".new")
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with partial.open("w", encoding="utf-8") as stream:
                stream.write(dump(overrides, now, wall))
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(path)
        except OSError as error:
            raise EnforcerError(f"cannot write {path}: {error.strerror}") from error

    def spoil(self, container: str) -> str:
        """Empty a container's file, which needs no space; return what a restart makes of it, as text."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._path(container).open("w") as stream:
                os.fsync(stream.fileno())
        except OSError as error:
            return f"a restart of the enforcer may bring back what was closed ({error.strerror})"
        return "after a restart of the enforcer the session reaches nothing, unless it could be saved before"

    def drop(self, container: str) -> None:
        """Forget a container that is no more."""
        if _IDENT.fullmatch(container):
            self._path(container).unlink(missing_ok=True)
            self._path(container).with_suffix(".new").unlink(missing_ok=True)

    def containers(self) -> set[str]:
        """Return the containers that have a file."""
        try:
            return {path.stem for path in self._directory.glob("*.json")}
        except OSError:
            return set()
