"""What a policy allows, as a value that can be kept, hashed and compared. Pure.

A revision has three parts, by how a difference is judged:

========  ===========================================================================================
grants    what may be done, one entry each; one that is new is a widening, one that is gone is not
amounts   how much of the host may be used; more of it is a widening
settings  everything else, by key: whatever differs is a widening, because nobody can say which of two
          configurations of a harness or a build lets an agent do more
========  ===========================================================================================

A key of the schema that this module does not know is a setting, so a key that is added later cannot widen a
sandbox unseen.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from policy.connection import NONE
from policy.container import PIDS_LIMIT
from policy.declaration import ANSWER, OPEN, Pattern
from policy.errors import PolicyError
from policy.limits import default_memory, parse_memory
from policy.loader import LoadedPolicy
from policy.records import dataclass
from policy.schema import DNS_PORTS

SCHEMA = 1

Grant = tuple[str, str]
"""(kind, subject): ("reach", "api.example.com:443"), ("write", "/home/me/project"), ..."""

READ, WRITE, REACH, SERVICE, SECRETS, NETWORK = "read", "write", "reach", "host-service", "secrets", "network"
# How a name is reached that is asked for, behind its port; what is pinned has nothing there, as anything
# passes to its addresses. For a zone or expression there is one way only.
PROXIED = " through the proxy"
NO_SNI, TCP = " without SNI", " as tcp"
LOOSER: Mapping[str, tuple[str, ...]] = {"": (NO_SNI, TCP), NO_SNI: (TCP,), TCP: ()}
PUBLIC: Grant = (NETWORK, "all public addresses, on every port but those of DNS")
HOST_NETWORK: Grant = (NETWORK, "all of this host's")
# An amount, so that having none is less than what every policy without this key has: a network of its own.
NETWORKS = "egress.networks"
EFFORT: Grant = ("limits", "start without a limit that this host cannot keep")
ANSWERS: Grant = ("dns", "what is allowed is answered, and opened to all programs for any protocol")
STALE: Grant = ("stale", "start on remembered addresses of names that cannot be resolved")
KEEP: Grant = ("keep", "containers after their session")
UNPROTECTED: Grant = ("protect", "leave files that this host executes unprotected")

# What a name may have beside its ports: it says when a session starts, not what it reaches.
_NAME_FIELDS = frozenset({"host", "ports", "optional", "liveness"})
# What grants are made of.
_PATTERN_FIELDS = frozenset({"host", "ports", "protocol", "sni"})
# Keys that grants and amounts are made of, and the name, which tells which sandbox this is.
_HANDLED: dict[str, frozenset[str] | None] = {
    "name": None,
    "mounts": frozenset({"rw", "ro", "project"}),
    # What from_host adds are names, which are grants.
    "egress": frozenset({"mode", "allow", "profile_defaults", "from_host", "allow_stale", "dns"}),
    "host_services": None,
    "secrets": frozenset({"env_file"}),
    "limits": frozenset({"pids", "memory", "cpus", "best_effort"}),
    "protect": None,
    "keep": None,
}
_SUBJECT = re.compile(rf"([^ ]+:[0-9]+)({PROXIED})?({NO_SNI}|{TCP}|)")
_PART = re.compile(r"[\w-]+")
_USERINFO = re.compile(r"//[^/\s@]*@")


@dataclass(frozen=True)
class Machine:
    """What a limit that is not given means here: ``memory`` in bytes."""

    memory: int


@dataclass(frozen=True)
class Revision:
    """See the module. An amount of None is the default, in the unit of its key (bytes, processors, ...)."""

    grants: frozenset[Grant] = frozenset()
    amounts: Mapping[str, float | None] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    def canonical(self) -> str:
        """Return the one JSON text of it."""
        body = {
            "schema": SCHEMA,
            "grants": sorted(map(list, self.grants)),
            "amounts": dict(self.amounts),
            "settings": dict(self.settings),
        }
        return json.dumps(body, sort_keys=True, separators=(",", ":"))

    @property
    def sha256(self) -> str:
        """Hex digest of the canonical form."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()

    @classmethod
    def parse(cls, text: str) -> Revision:
        """Read a canonical form.

        Raises:
            PolicyError: it is not one, or another version's.
        """
        try:
            body = json.loads(text)
            if body["schema"] != SCHEMA:
                raise ValueError("schema")
            found = cls(
                frozenset((str(kind), str(subject)) for kind, subject in body["grants"]),
                {str(key): None if value is None else float(value) for key, value in body["amounts"].items()},
                {str(key): str(value) for key, value in body["settings"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PolicyError("this is no revision of a policy") from error
        if found.canonical() != text:
            raise PolicyError("this is not the canonical form of a revision")
        return found


@dataclass(frozen=True)
class Change:
    """One difference; ``text`` is one printable line without credentials."""

    sign: str
    text: str
    widens: bool

    def line(self) -> str:
        """Return it as a line of a diff."""
        return f"{self.sign} {self.text}"


def revision(loaded: LoadedPolicy) -> Revision:
    """Return what a policy allows, with the profile's own names and with resolved paths."""
    policy = loaded.policy
    limits = policy.limits
    dump = policy.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    return Revision(
        grants=frozenset(_grants(loaded)),
        amounts={
            "limits.pids": float(limits.pids),
            "limits.memory": None if limits.memory is None else float(parse_memory(limits.memory)),
            "limits.cpus": None if limits.cpus is None else float(limits.cpus),
            **({NETWORKS: 0.0} if loaded.connection == NONE else {}),
        },
        settings={
            "profile": json.dumps(loaded.profile.name),
            "mode": json.dumps(policy.mode),
            **dict(_settings(dump)),
            **dict(_unknown(loaded)),
        },
    )


def _grants(loaded: LoadedPolicy) -> Iterator[Grant]:
    policy = loaded.policy
    for mount in loaded.mounts:
        yield READ, mount.source
        if not mount.read_only:
            yield WRITE, mount.source
    # A copy of them, or of what is there.
    for path in loaded.profile.carried(loaded.options):
        yield READ, f"~/{path}"
    yield from _reach(loaded)
    for service in loaded.declaration.host_services:
        yield SERVICE, str(service.port)
    if policy.egress.mode == OPEN:
        yield PUBLIC
    if policy.egress.mode == "host":
        yield HOST_NETWORK
    if loaded.declaration.dns == ANSWER:
        yield ANSWERS
    if loaded.env_file is not None:
        yield SECRETS, str(loaded.env_file)
    permissions = (
        (policy.limits.best_effort, EFFORT),
        (policy.egress.allow_stale, STALE),
        (policy.keep, KEEP),
        (not policy.protect, UNPROTECTED),
    )
    yield from (grant for given, grant in permissions if given)


def _reach(loaded: LoadedPolicy) -> Iterator[Grant]:
    for name in loaded.declaration.names:
        more = _more(name.model_dump(mode="json", exclude_defaults=True), _NAME_FIELDS)
        for port in name.ports:
            yield REACH, f"{name.host}:{port}{more}"
    pinned = {(name.host, port) for name in loaded.declaration.names for port in name.ports}
    for pattern in loaded.declaration.patterns:
        more = _more(pattern.model_dump(mode="json", exclude_defaults=True), _PATTERN_FIELDS)
        way = f"{PROXIED if pattern.exact else ''}{_way(pattern)}{more}"
        for port in pattern.ports:
            # Asking for what is pinned is nothing more, unless more passes.
            if way != PROXIED or (pattern.host, port) not in pinned:
                yield REACH, f"{pattern.host}:{port}{way}"
    declared = {name.host for name in loaded.declaration.names}
    declared |= {pattern.host for pattern in loaded.declaration.patterns}
    for entry in loaded.policy.egress.allow:
        if entry.host not in declared:
            yield from ((REACH, f"{entry.host}:{port}") for port in entry.ports)


def _way(pattern: Pattern) -> str:
    if pattern.protocol == "tcp":
        return TCP
    return "" if pattern.sni else NO_SNI


def _more(fields: Mapping[str, Any], handled: frozenset[str]) -> str:
    """Return what an entry has that grants are not made of."""
    extra = {key: value for key, value in fields.items() if key not in handled}
    return f" {_json(extra)}" if extra else ""


def _unknown(loaded: LoadedPolicy) -> Iterator[tuple[str, str]]:
    """Yield what entries and the declaration have beside what grants are made of."""
    for entry in loaded.policy.egress.allow:
        for key, value in entry.model_dump(mode="json", exclude_defaults=True).items():
            if key not in _NAME_FIELDS | _PATTERN_FIELDS:
                yield f"egress.allow.{entry.host}.{key}", _json(value)
    for key, value in loaded.declaration.model_dump(mode="json", exclude_defaults=True).items():
        if key not in {"mode", "names", "patterns", "dns", "host_services", "allow_stale"}:
            yield f"declaration.{key}", _json(value)


def _settings(dump: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in dump.items():
        below = _HANDLED.get(key, frozenset())
        if below is None:
            continue
        if below:
            value = {part: item for part, item in value.items() if part not in below}  # noqa: PLW2901
            yield from _leaves(key, value) if value else ()
        else:
            yield from _leaves(key, value)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for part, item in value.items():
            # A part with a dot in it is not two parts.
            yield from _leaves(f"{key}.{part if _PART.fullmatch(part) else _json(part)}", item)
    elif value == {} and key.count(".") < 2:
        # A section that is there and empty says nothing; deeper it is a value of a harness's own.
        return
    else:
        yield key, _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def compare(old: Revision | None, new: Revision, machine: Machine) -> tuple[Change, ...]:
    """Return what differs, widenings first; without an old revision all of the new one widens.

    Args:
        old: what was approved.
        new: what is asked for.
        machine: what limits that are not given mean.
    """
    if old is None:
        changes = [Change("+", grant_text(grant), widens=True) for grant in sorted(new.grants)]
        changes += [
            Change("+", f"{key}: {shown(value)}", widens=True) for key, value in sorted(new.settings.items())
        ]
        return (
            *changes,
            *(
                Change("+", f"{key}: {_amount_text(key, value)}", widens=True)
                for key, value in sorted(new.amounts.items())
                if not _is_default(key, value)
            ),
        )
    changes = [Change("+", grant_text(g), not _covered(g, old)) for g in sorted(new.grants - old.grants)]
    changes += [Change("-", grant_text(g), widens=False) for g in sorted(old.grants - new.grants)]
    changes += _setting_changes(old.settings, new.settings)
    changes += _amount_changes(old.amounts, new.amounts, machine)
    return tuple(sorted(changes, key=lambda change: not change.widens))


def widens(changes: tuple[Change, ...]) -> bool:
    """Say whether any of the changes allows more."""
    return any(change.widens for change in changes)


def _covered(grant: Grant, old: Revision) -> bool:
    """Say whether the old revision allowed a grant in other words."""
    reaches = grant[0] == REACH
    if HOST_NETWORK in old.grants and (reaches or grant[0] == SERVICE or grant in (PUBLIC, ANSWERS)):
        return True
    if reaches:
        return _reached(grant[1], old)
    return PUBLIC in old.grants and grant == ANSWERS


def _reached(wanted: str, old: Revision) -> bool:
    match = _SUBJECT.fullmatch(wanted)
    if match is None:
        # One with more to it than is known here.
        return False
    subject, proxied, way = match[1], match[2] or "", match[3]
    # To a pinned name's addresses anything passes.
    if proxied and (REACH, subject) in old.grants:
        return True
    # A name on a port of DNS or a pattern is more than all addresses.
    if PUBLIC in old.grants and _public(subject):
        return True
    return any((REACH, f"{subject}{proxied}{looser}") in old.grants for looser in LOOSER[way])


def _public(subject: str) -> bool:
    host, _, port = subject.rpartition(":")
    return port.isdecimal() and int(port) not in DNS_PORTS and not set(host) & set(" *:{")


def _setting_changes(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Change]:
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if before != after:
            told = f"{'default' if before is None else shown(before)} -> "
            told += "default" if after is None else shown(after)
            yield Change("~", f"{key}: {told}", widens=True)


def _amount_changes(
    old: Mapping[str, float | None], new: Mapping[str, float | None], machine: Machine
) -> Iterator[Change]:
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if before != after:
            more = _meaning(key, after, machine) > _meaning(key, before, machine)
            yield Change("~", f"{key}: {_amount_text(key, before)} -> {_amount_text(key, after)}", more)


def _meaning(key: str, value: float | None, machine: Machine) -> float:
    if value is not None:
        return value
    return float(default_memory(machine.memory)) if key == "limits.memory" else math.inf


def _is_default(key: str, value: float | None) -> bool:
    # A network less is nothing that is granted.
    return key == NETWORKS or value is None or (key == "limits.pids" and value == PIDS_LIMIT)


def _amount_text(key: str, value: float | None) -> str:
    if key == NETWORKS:
        return "one" if value is None else "none"
    if value is None:
        return "default"
    return f"{value / 2**20:.10g} MiB" if key == "limits.memory" else f"{value:.10g}"


def grant_text(grant: Grant) -> str:
    """Return a grant as one printable line."""
    return shown(" ".join(grant))


def shown(text: str) -> str:
    """Return all of ``text``, escaped where it is not plain, without the credentials of URLs."""
    visible = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )
    return _USERINFO.sub("//***@", visible)
