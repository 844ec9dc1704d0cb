"""What a session's container looks like, decided from the policy and the user's environment. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from corral import runtimes, secretchannel, startplace
from corral.state import EMPTY
from corral.user import User
from policy import proxying
from policy.connection import OWN
from policy.container import HOME, WORKSPACE, Limits, Mount, SessionSpec
from policy.declaration import ANSWER, OPEN, Declaration
from policy.identity import StatePaths
from policy.loader import LoadedPolicy
from policy.records import dataclass

# Also what is defined where less is imported.
__all__ = ["User"]

SERVICE = "main"
SESSION_VARIABLE = "CORRAL_SESSION_ID"
GATE_VARIABLE = "CORRAL_GATE"
MOUNTS_VARIABLE = "CORRAL_MOUNTS"
SECRETS_VARIABLE = "CORRAL_SECRETS"
WORKSPACE_VARIABLE = "CORRAL_WORKSPACE"
SHELL = ("/bin/bash",)

_TERM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_ZONE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+/-]{0,63}")
# The locales the image has. Naming another one makes every setlocale() in the container fail.
_LOCALES = re.compile(r"C|POSIX|C\.(UTF-8|utf8)")
LOCALE = "C.UTF-8"

Place = tuple[str, int, int]


@dataclass(frozen=True)
class Terminal:
    """What the session is attached to: a terminal or not, its size in columns and rows, and an open stdin."""

    tty: bool = False
    stdin: bool = False
    columns: int = 0
    rows: int = 0


@dataclass(frozen=True)
class Request:
    """One container to start: what for, which command, attached to what.

    ``name``: what its user calls it. ``start``: where the command starts, None: where its user is.
    ``variables``: of its environment, delivered like secrets.
    """

    purpose: str
    argv: tuple[str, ...]
    session: str
    terminal: Terminal = Terminal()
    name: str = ""
    start: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Outside:
    """Addresses that every session must find closed: ``probe``, which no policy can allow, and a resolver.

    ``beside``: other sessions of the sandbox exist, so its rules are there already. ``closed``: what is
    closed to one that reaches all public addresses.
    """

    probe: str
    probe_port: int
    resolver: str
    beside: bool = False
    closed: tuple[str, ...] = ()


def gate(declaration: Declaration, outside: Outside) -> str:
    """Return what the entrypoint checks before it becomes the program (agent_image.files.entrypoint.gate)."""
    body: dict[str, Any] = {
        "probe": {"address": outside.probe, "port": outside.probe_port},
        "resolver": outside.resolver,
        "names": [name.model_dump(mode="json") for name in declaration.names],
        "services": sorted({service.port for service in declaration.host_services}),
        "beside": outside.beside,
    }
    if declaration.proxied:
        body["proxy"] = proxying.PORT
    if declaration.dns == ANSWER:
        body["dns"] = ANSWER
    if declaration.mode == OPEN:
        body["open"] = {"closed": list(outside.closed)}
    return json.dumps(body, separators=(",", ":"))


def gate_of(loaded: LoadedPolicy, outside: Outside) -> str:
    """Return what the entrypoint checks, by how the container is connected."""
    if loaded.connection == OWN:
        return gate(loaded.declaration, outside)
    body = {
        "connection": loaded.connection,
        "probe": {"address": outside.probe, "port": outside.probe_port},
    }
    return json.dumps(body, separators=(",", ":"))


def command(loaded: LoadedPolicy, given: Sequence[str]) -> tuple[str, ...]:
    """Return the argv of ``corral run``: the command after ``--``, else the harness itself."""
    return tuple(given) or loaded.profile.argv("interactive", loaded.options)


def environment(
    loaded: LoadedPolicy,
    user: User,
    request: Request,
    outside: Outside,
    places: Sequence[Place],
    *,
    secrets: bool = False,
) -> dict[str, str]:
    """Return the container's environment. Nothing of the host's comes along but what is named here.

    Args:
        loaded, user, request, outside: see ``plan``.
        places: what the policy's mounts led to when they were looked at.
        secrets: whether the entrypoint has secrets to fetch; they themselves are not in it.
    """
    env = {"LANG": _locale(user.environ)}
    if request.terminal.tty:
        term = user.environ.get("TERM", "")
        env["TERM"] = term if _TERM.fullmatch(term) else "xterm"
        colours = user.environ.get("COLORTERM", "")
        if _TERM.fullmatch(colours):
            env["COLORTERM"] = colours
    if _ZONE.fullmatch(user.zone):
        env["TZ"] = user.zone
    for key, names in (
        ("name", ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME")),
        ("email", ("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL")),
    ):
        if user.git.get(key):
            env.update(dict.fromkeys(names, user.git[key]))
    # Corral's own outranks what the profile fixes.
    own = {
        "HOME": HOME,
        SESSION_VARIABLE: request.name or request.session,
        GATE_VARIABLE: gate_of(loaded, outside),
    }
    # A kernel of its own has other numbers for them than this host's.
    rows = list(places) if loaded.policy.runtime == runtimes.RUNC else []
    own[MOUNTS_VARIABLE] = json.dumps(rows, separators=(",", ":"), ensure_ascii=False)
    if secrets:
        own[SECRETS_VARIABLE] = f"{HOME}/{secretchannel.NAME}"
    if loaded.workspace:
        own[WORKSPACE_VARIABLE] = WORKSPACE
    own.update(_proxied(loaded))
    return {**env, **loaded.profile.environment(loaded.options), **own}


def _proxied(loaded: LoadedPolicy) -> dict[str, str]:
    """Return what leads programs to the sandbox's proxy, if it has one."""
    if not loaded.declaration.proxied:
        return {}
    # Most sandboxes have none.
    from corral import proxyenv

    return proxyenv.variables(loaded.declaration)


def delivered(loaded: LoadedPolicy, secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets that reach the program: what the profile or corral fixes is none of them."""
    return {name: value for name, value in secrets.items() if name not in fixed(loaded)}


def fixed(loaded: LoadedPolicy) -> frozenset[str]:
    """Return the variables that nobody but the profile and corral sets."""
    own = {"HOME", SESSION_VARIABLE, WORKSPACE_VARIABLE, *_proxied(loaded)}
    return frozenset({*loaded.profile.environment(loaded.options), *own})


def _locale(environ: Mapping[str, str]) -> str:
    wanted = environ.get("LC_ALL") or environ.get("LANG") or LOCALE
    return wanted if _LOCALES.fullmatch(wanted) else LOCALE


def mounts(
    loaded: LoadedPolicy, paths: StatePaths, session: str, protected: Sequence[Mount] = ()
) -> tuple[Mount, ...]:
    """Return every mount but the hosts file: the policy's, the home directory, and what belongs into it.

    The home directory is the session's own and goes with it; the state directories in it stay. ``protected``
    are the parts of writable mounts that are read-only all the same.
    """
    profile = loaded.profile
    home = Mount(str(paths.session_home(session)), HOME)
    state = tuple(Mount(str(paths.home / part), profile.state_path(part)) for part in profile.state_dirs)
    shadows = tuple(
        Mount(str(paths.root / EMPTY), f"{HOME}/{part}", read_only=True) for part in profile.shadow
    )
    managed = tuple(
        Mount(str(paths.managed / directory.path), f"{HOME}/{directory.path}", read_only=True)
        for directory in profile.managed_dirs
    )
    workspace = (Mount(str(paths.workspace), WORKSPACE),) if loaded.workspace else ()
    return (home, *loaded.mounts, *protected, *workspace, *state, *managed, *shadows)


def workdir(loaded: LoadedPolicy, start: Path) -> str:
    """Return where the command starts: the given directory when the session sees it, else the project."""
    if loaded.policy.mode != "run":
        return HOME
    seen = (*startplace.reachable(loaded), Path(WORKSPACE))
    return str(start if any(start.is_relative_to(place) for place in seen) else loaded.project)


def plan(
    loaded: LoadedPolicy,
    user: User,
    request: Request,
    *,
    paths: StatePaths,
    places: Sequence[Place],
    protected: Sequence[Mount],
    secrets: bool,
    image: str,
    address: str,
    start: Path,
    ipv6: bool,
    outside: Outside,
    limits: Limits,
    gateway: str = "",
) -> SessionSpec:
    """Return everything ``policy.container.create_body`` needs.

    Args:
        loaded: the policy.
        user: who runs it.
        request: which container.
        paths: the sandbox's files.
        places: (path, device, inode) of the policy's mounts, as they were when they were looked at.
        protected: see ``mounts``.
        secrets: whether there are any to fetch.
        image: id or tag of the image.
        address: IPv4 address of the container.
        start: the user's working directory, resolved.
        ipv6: whether the kernel has IPv6.
        outside: what must be closed to it.
        limits: how much of the host it may use.
        gateway: the host's address on its network.
    """
    return SessionSpec(
        sandbox=loaded.sandbox,
        service=SERVICE,
        session=request.session,
        purpose=request.purpose,
        uid=user.uid,
        gid=user.gid,
        image=image,
        address=address,
        gateway=gateway,
        hosts_file=str(paths.hosts(request.session)),
        project=str(loaded.project),
        workdir=workdir(loaded, start),
        argv=request.argv,
        declaration=loaded.declaration,
        mounts=mounts(loaded, paths, request.session, protected),
        env=environment(loaded, user, request, outside, places, secrets=secrets),
        tty=request.terminal.tty,
        stdin=request.terminal.stdin,
        ipv6=ipv6,
        limits=limits,
        rootless=user.rootless,
        connection=loaded.connection,
        runtime=runtimes.field(loaded.policy.runtime),
    )
