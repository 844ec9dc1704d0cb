"""``corral inspect``: what a session's container was started with, how it ended, and what it said last.

Values of the environment are never shown, and a secret of the policy's env_file that turns up elsewhere is
replaced.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from corral import engine, logs
from corral.context import Invocation
from corral.plain import cleaned, columns
from corral.sessions import Session, as_json
from policy.declaration import LABEL, LABEL_EGRESS
from policy.errors import CorralError
from policy.loader import FILE, load
from policy.secrets import read_env_file

LAST = 20
HIDDEN = "***"
# A shorter text is no secret, and would hide half of what was said.
SHORTEST = 6


@dataclass(frozen=True)
class Ending:
    """How a container ended; times are Docker's, empty while there is none."""

    state: str
    running: bool
    code: int | None
    out_of_memory: bool
    error: str
    started: str
    finished: str


def ending(inspect: Mapping[str, Any]) -> Ending:
    """Return what Docker says of a container's state."""
    found = inspect.get("State") or {}
    running, status = bool(found.get("Running")), str(found.get("Status", ""))
    return Ending(
        status,
        running,
        None if running or status == "created" else int(found.get("ExitCode") or 0),
        bool(found.get("OOMKilled")),
        str(found.get("Error") or ""),
        _time(found.get("StartedAt")),
        _time(found.get("FinishedAt")),
    )


def _time(value: object) -> str:
    text = str(value or "")
    return "" if text.startswith("0001-") else text


def without(value: Any, secrets: Iterable[str]) -> Any:
    """Return JSON-able values with every secret in their texts replaced, the longest first."""
    hidden = sorted({text for text in secrets if len(text) >= SHORTEST}, key=len, reverse=True)
    return _hide(value, hidden)


def _hide(value: Any, hidden: Sequence[str]) -> Any:
    if isinstance(value, str):
        for secret in hidden:
            value = value.replace(secret, HIDDEN)
        return value
    if isinstance(value, Mapping):
        return {key: _hide(item, hidden) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_hide(item, hidden) for item in value]
    return value


def describe(
    session: Session, inspect: Mapping[str, Any], last: Sequence[str], secrets: Iterable[str]
) -> dict[str, Any]:
    """Return everything there is to say about a session. Pure.

    Args:
        session: which.
        inspect: what Docker says of its container.
        last: the last lines of its output.
        secrets: texts that must not appear.
    """
    config, host = inspect.get("Config") or {}, inspect.get("HostConfig") or {}
    labels = {
        name: text for name, text in (config.get("Labels") or {}).items() if str(name).startswith(LABEL)
    }
    declared = str(labels.pop(LABEL_EGRESS, "") or "{}")
    try:
        egress = json.loads(declared)
    except (ValueError, RecursionError):
        egress = declared
    (row,) = as_json([session])
    body = {
        **row,
        "ending": asdict(ending(inspect)),
        "image": str(inspect.get("Image", "")),
        "policy": session.note.policy,
        "command": [*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ())],
        "directory": str(config.get("WorkingDir") or ""),
        "user": str(config.get("User") or ""),
        "terminal": bool(config.get("Tty")),
        "environment": sorted(str(pair).partition("=")[0] for pair in config.get("Env") or ()),
        "mounts": [
            {
                "source": str(mount.get("Source", "")),
                "target": str(mount.get("Target", "")),
                "read_only": bool(mount.get("ReadOnly")),
            }
            for mount in host.get("Mounts") or ()
        ],
        "network": str(host.get("NetworkMode") or ""),
        "limits": {
            "pids": host.get("PidsLimit") or 0,
            "memory": host.get("Memory") or 0,
            "cpus": (host.get("NanoCpus") or 0) / 1e9,
        },
        "labels": labels,
        "egress": egress,
        "last": list(last),
    }
    return dict(without(body, secrets))


def inspect(invocation: Invocation, session: Session, lines: int = LAST) -> dict[str, Any]:
    """Look at a session, a running one or one that has ended.

    Raises:
        EngineError: Docker refuses.
    """
    with engine.errors("looking at the session"):
        found = invocation.api.inspect_container(session.ident)
    pieces = logs.read(invocation, session, follow=False, start=None, tail=lines, stamps=False)
    last = [logs.shown(line, colour=False) for line in logs.lines(pieces)]
    return describe(session, found, last[-lines:] if lines else [], _secrets(invocation, session))


def _secrets(invocation: Invocation, session: Session) -> Iterator[str]:
    """Yield what the env_file of the session's policy says now; what cannot be read hides nothing."""
    user = invocation.user
    with contextlib.suppress(CorralError, OSError):
        loaded = load(Path(session.project) / FILE, home=user.home, environ=dict(user.environ), uid=user.uid)
        if loaded.env_file is not None:
            yield from read_env_file(loaded.env_file, user.uid, reserved=loaded.profile.env).values()


def render(body: Mapping[str, Any]) -> str:
    """Return the text of ``corral inspect``, without a final newline."""
    body = cleaned(body)
    end = body["ending"]
    how = "it runs" if end["running"] else end["state"]
    if end["code"] is not None:
        how += f", exit code {end['code']}"
    if end["out_of_memory"]:
        how += ", it was out of memory"
    if end["error"]:
        how += f": {end['error']}"
    rows = [
        ("session", f"{body['session']} of {body['sandbox']} ({body['purpose']})"),
        ("name", body["name"]),
        ("project", body["project"]),
        ("container", body["container"]),
        ("ended" if not end["running"] else "state", how),
        ("from", end["started"] or "never"),
        ("to", end["finished"] or "-"),
        ("command", " ".join(map(_quoted, body["command"]))),
        ("directory", body["directory"]),
        ("user", body["user"]),
        ("image", body["image"]),
        ("policy", body["policy"] or "unknown"),
        ("network", f"{body['network']} {body['address'] or ''}".strip()),
        ("limits", ", ".join(f"{name} {value or 'none'}" for name, value in body["limits"].items())),
        ("variables", ", ".join(body["environment"])),
    ]
    text = columns(rows)
    text += ["mounts"]
    text += [
        f"  {'ro' if mount['read_only'] else 'rw'} {mount['source']}"
        + (f" at {mount['target']}" if mount["target"] != mount["source"] else "")
        for mount in body["mounts"]
    ]
    text += ["allowed", *(f"  {line}" for line in _reach(body["egress"]))]
    text += ["labels", *(f"  {name}={value}" for name, value in sorted(body["labels"].items()))]
    text += ["last lines", *(f"  {line}" for line in body["last"])]
    return "\n".join(line.rstrip() for line in text)


def _quoted(word: str) -> str:
    import shlex

    return shlex.quote(word)


def _reach(egress: Any) -> Iterator[str]:
    if not isinstance(egress, Mapping):
        yield str(egress)
        return
    for name in egress.get("names") or ():
        yield f"{name.get('host')}:{','.join(map(str, name.get('ports') or ()))}"
    for service in egress.get("host_services") or ():
        yield f"corral-host:{service.get('port')} ({service.get('name')})"
