"""Names that this host's own package clients are configured with, for ``egress.from_host``.

What npm, pip, apt and git are told on the host, a sandbox on the same network needs too. Only files that
belong to the user or the machine are read, never the project's: the agent writes there. Of a URL its host and
port are taken, and nothing else: user, password and path stay where they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from policy.clientfiles import git_urls
from policy.declaration import ANSWER, PROXY, Declaration, Name
from policy.hostclient import HostFiles, apt_sources, npm_settings, pip_settings
from policy.hosts import HostError, parse_host
from policy.records import dataclass
from policy.schema import DNS_PORTS, Build, with_port
from policy.urls import UrlError, redact, split_http

_DEFAULT_PORTS = {"http": 80, "https": 443}
_SCP = re.compile(r"[^/:@]+@[^/:]+:")


@dataclass(frozen=True)
class Found:
    """One name a client is configured with: ``client`` is npm, pip, apt or git."""

    client: str
    host: str
    port: int


@dataclass(frozen=True)
class FromHost:
    """``found`` in the order of the clients; ``notes`` say what was not taken and why, and hold no secret."""

    found: tuple[Found, ...] = ()
    notes: tuple[str, ...] = ()

    def client(self, host: str) -> str | None:
        """Return which client a name comes from."""
        return next((found.client for found in self.found if found.host == host), None)


@dataclass(frozen=True)
class _Wanted:
    build: Build
    home: Path
    environ: Mapping[str, str]
    files: HostFiles
    suite: str


def from_host(
    clients: Iterable[str], build: Build, home: Path, environ: Mapping[str, str], files: HostFiles, suite: str
) -> FromHost:
    """Return the names that these clients need.

    Args:
        clients: of npm, pip, apt, git.
        build: the policy's; a registry or mirror that it sets is what the image's client uses.
        home, environ, files: the user's.
        suite: Debian suite of the image; sources of other suites are of no use in it.
    """
    wanted = _Wanted(build, home, environ, files, suite)
    found: dict[Found, None] = {}
    notes: list[str] = []
    for client in clients:
        before = len(found)
        for url in dict.fromkeys(filter(None, _CLIENTS[client](wanted))):
            try:
                found[_found(client, url)] = None
            except (UrlError, HostError) as error:
                notes.append(f"{client}: {_shown(url)} not taken: {error}")
        if len(found) == before and not any(note.startswith(f"{client}: ") for note in notes):
            notes.append(f"{client}: this host configures none; list what it needs in egress.allow")
    return FromHost(tuple(found), tuple(notes))


def declared(declaration: Declaration, found: FromHost) -> Declaration:
    """Return ``declaration`` with these names added; one that was there gets the port.

    They are optional and need not answer: they were not written into the policy one by one. Where names are
    asked for they may be, too; where none is pinned, these are not either.
    """
    patterns = {pattern.host: pattern for pattern in declaration.patterns}
    if patterns or declaration.mode == PROXY or declaration.dns == ANSWER:
        for one in found.found:
            patterns[one.host] = with_port(patterns.get(one.host), one.host, one.port)
    declaration = declaration.model_copy(update={"patterns": tuple(patterns.values())})
    if declaration.mode == PROXY:
        return declaration
    names = {name.host: name for name in declaration.names}
    for one in found.found:
        known = names.get(one.host)
        if known is None:
            names[one.host] = Name(host=one.host, ports=(one.port,), optional=True, liveness=False)
        elif one.port not in known.ports:
            names[one.host] = known.model_copy(update={"ports": (*known.ports, one.port)})
    return declaration.model_copy(update={"names": tuple(names.values())})


def _found(client: str, url: str) -> Found:
    parts = split_http(url, credentials=True)
    port = parts.port or _DEFAULT_PORTS[parts.scheme.lower()]
    if port in DNS_PORTS:
        raise HostError("a port of DNS")
    return Found(client, parse_host(parts.hostname or ""), port)


def _shown(url: str) -> str:
    """Return a URL as far as it may be shown: no user, password or query, nothing unprintable."""
    bare = redact(url.partition("?")[0].partition("#")[0])
    return "".join(char if char.isprintable() else "?" for char in bare[:200])


def _npm(wanted: _Wanted) -> Iterable[str]:
    found = npm_settings(wanted.home, wanted.environ, wanted.files)
    yield _picked(wanted.build.npm_registry, found.get("registry"))
    # A scope with a registry of its own: @company:registry=https://…
    yield from (value for key, value in found.items() if key.startswith("@") and key.endswith(":registry"))


def _pip(wanted: _Wanted) -> Iterable[str]:
    found = pip_settings(wanted.home, wanted.environ, wanted.files)
    yield _picked(wanted.build.pip_index, found.get("index-url"))
    yield from found.get("extra-index-url", "").split()
    yield from wanted.environ.get("PIP_EXTRA_INDEX_URL", "").split()


def _apt(wanted: _Wanted) -> Iterable[str]:
    if wanted.build.apt_mirror is not None:
        yield wanted.build.apt_mirror
        return
    for source in apt_sources(wanted.files):
        base = source.suite.rstrip("/").partition("-")[0].partition("/")[0]
        if source.is_distribution and base == wanted.suite:
            yield source.uri


def _git(wanted: _Wanted) -> Iterable[str]:
    config = wanted.environ.get("XDG_CONFIG_HOME", "") or f"{wanted.home}/.config"
    for path in ("/etc/gitconfig", f"{config}/git/config", f"{wanted.home}/.gitconfig"):
        for url in git_urls(wanted.files.read(path) or ""):
            # Without a scheme it is ssh, which is asked for with its port in egress.allow.
            yield f"ssh://{url}" if _SCP.match(url) else url


def _picked(own: str | None, theirs: str | None) -> str:
    """The policy's wish is what the image's client uses; an empty text means its own default."""
    return (theirs if own is None else own) or ""


_CLIENTS = {"npm": _npm, "pip": _pip, "apt": _apt, "git": _git}
