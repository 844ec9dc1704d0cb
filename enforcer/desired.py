"""Sessions and pins to kernel elements and hosts lines. Pure; the only place that decides what is allowed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from math import ceil, inf, isfinite
from types import MappingProxyType

from enforcer import hostsfile, pins
from enforcer.gatewaydns import Place
from enforcer.granting import Opened
from enforcer.sessions import Network, Session
from enforcer.writerclient import Entry
from policy import proxying
from policy.container import resolver_rows

Row = tuple[str, str, int, str]

ENDING = 5  # seconds
PER_SOURCE = 1024  # what the writer takes for one container
ALTOGETHER = 65536  # and for all of a user's
BYTES = 6 << 20  # of a request; the writer takes 8 MiB with all that is not an element
NOTHING: Mapping[str, Iterable[Opened]] = MappingProxyType({})
_ODD = re.compile(r"[^A-Za-z0-9_. :/-]")


@dataclass(frozen=True)
class Ruleset:
    """The full desired state of one user: bridges, and (source, protocol, port, destination) -> comment.

    ``ends``: when the permission for some pins ends, by the service's clock. ``open``: the sources that may
    reach all public addresses, and their comments.
    """

    sandboxes: tuple[Network, ...]
    pins: Mapping[Row, str]
    host: Mapping[Row, str]
    ends: Mapping[Row, float] = field(default_factory=dict)
    open: Mapping[str, str] = field(default_factory=dict)

    def lives(self, now: float) -> list[list[object]]:
        """Return what ends, with the seconds that it is to live on when nobody renews it any more.

        Longer than the service needs to take it back itself, from the hosts file first.
        """
        return [[*row, max(1, ceil(end - now)) + ENDING] for row, end in self.ends.items()]

    def sandbox_rows(self) -> list[dict[str, str]]:
        """Return the bridges as the writer takes them."""
        return [
            {"bridge": net.bridge, "subnet": str(net.subnet), "gateway": str(net.gateway)}
            for net in self.sandboxes
        ]


def comment(session: Session, what: str) -> str:
    """Return what a person sees beside a kernel element."""
    return _ODD.sub("?", f"{session.sandbox.id} {session.service} {what}")[:200]


def size(row: Row, text: str) -> int:
    """Return at most how many bytes an element takes in a request: with its comment, and with its life."""
    src, proto, _, dst = row
    return 2 * (len(src) + len(proto) + 5 + len(dst)) + len(text) + 50


def desired(
    sessions: Collection[Session],
    networks: Iterable[Network],
    allowed: Mapping[str, Mapping[str, tuple[pins.Grant, ...]]],
    kept: Iterable[tuple[Row, str, float | None]] = (),
    opened: Mapping[str, Iterable[Opened]] = NOTHING,
) -> Ruleset:
    """Return what the kernel should hold.

    A session with problems contributes nothing. ``kept`` are elements that stand already and whose name has
    not been asked since this service started: a restart takes nothing away before it knows better. ``opened``
    maps containers to what was opened on demand, the most wanted first. Pins come before both: what the
    writer would refuse, of one container or altogether, it refuses with all the rest.
    """
    pin_rows: dict[Row, str] = {}
    host_rows: dict[Row, str] = {}
    ends: dict[Row, float] = {}
    open_rows: dict[str, str] = {}
    contested = _contested(sessions)
    for session in sessions:
        if session.problems or session.network is None:
            continue
        for name, grants in sorted(allowed.get(session.container, {}).items()):
            until = session.overrides.ends(name, session.declaration)
            for grant in grants:
                for port in grant.ports:
                    row = (session.address, "tcp", port, grant.address)
                    # Names that share an address keep it as long as the last of them.
                    ends[row] = max(_forever(until.get(port)), ends.get(row, 0.0))
                    pin_rows.setdefault(row, comment(session, name))
        host_rows |= _host_rows(session, str(session.network.gateway), session.network in contested)
        if session.open:
            open_rows[session.address] = comment(session, "open")
    count = Counter(row[0] for row in pin_rows)
    room = BYTES - sum(size(row, text) for rows in (pin_rows, host_rows) for row, text in rows.items())

    def add(row: Row, text: str, end: float) -> None:
        nonlocal room
        if row in pin_rows:
            ends[row] = max(end, ends[row])
        elif count[row[0]] < PER_SOURCE and len(pin_rows) < ALTOGETHER and size(row, text) <= room:
            pin_rows[row], ends[row] = text, end
            count[row[0]] += 1
            room -= size(row, text)

    for row, text, until_then in kept:
        if row not in pin_rows:
            add(row, text, _forever(until_then))
    for session in sessions:
        if not session.problems and session.network is not None:
            for door in opened.get(session.container, ()):
                row = (session.address, "tcp", door.port, door.address)
                add(row, comment(session, door.name), door.end)
    # A network that differs from corral's own is claimed all the same: its gateway stays closed to others.
    ends = {row: end for row, end in ends.items() if isfinite(end)}
    boxes = tuple(sorted(networks, key=lambda net: net.bridge))
    return Ruleset(boxes, pin_rows, host_rows, ends, open_rows)


def _contested(sessions: Iterable[Session]) -> set[Network]:
    """Return the networks where one relay would have to be both: the proxy and somebody's host service.

    The command line refuses the second such session. Two that start at once may both get past that.
    """
    wanted: dict[Network, set[bool]] = {}
    for session in sessions:
        if session.problems or session.network is None:
            continue
        kinds = wanted.setdefault(session.network, set())
        if session.proxied:
            kinds.add(True)
        if any(service.port == proxying.PORT for service in session.declaration.host_services):
            kinds.add(False)
    return {network for network, kinds in wanted.items() if len(kinds) > 1}


def _host_rows(session: Session, gateway: str, contested: bool) -> dict[Row, str]:
    services = [("tcp", service.port, service.name) for service in session.declaration.host_services]
    if session.proxied:
        services.append(("tcp", proxying.PORT, proxying.ALIAS))
    if contested:
        # Nobody knows whose relay it is, so neither session may reach what was meant for the other.
        services = [service for service in services if service[1] != proxying.PORT]
    rows = {(session.address, proto, port, gateway): comment(session, name) for proto, port, name in services}
    if session.asks:
        rows |= dict.fromkeys(resolver_rows(session.address, gateway), comment(session, "dns"))
    return rows


def _forever(end: float | None) -> float:
    return inf if end is None else end


def resolvers(sessions: Iterable[Session]) -> list[Place]:
    """Return where names are answered and for whom, one place for each bridge."""
    sources: dict[Network, set[str]] = {}
    for session in sessions:
        if session.asks and session.network is not None:
            sources.setdefault(session.network, set()).add(session.address)
    return [Place(net.bridge, str(net.gateway), frozenset(found)) for net, found in sources.items()]


def keep(
    held: Iterable[Entry],
    sessions: Iterable[Session],
    untried: Mapping[str, frozenset[str]],
    vet: Callable[[str], bool],
) -> list[tuple[Row, str, float | None]]:
    """Return the standing elements of names that were not asked yet: (element, comment, when it ends).

    ``untried`` maps container ids to such names; ``vet`` tells whether a name may open an address.
    """
    wanted = {
        (session.address, comment(session, name)): session.overrides.ends(name, session.declaration)
        for session in sessions
        if not session.problems
        for name in untried.get(session.container, frozenset())
    }
    ports = {(session.address, port) for session in sessions for name in session.names for port in name.ports}
    return [
        (
            (entry.src, entry.proto, entry.port, entry.dst),
            entry.comment,
            wanted[entry.src, entry.comment].get(entry.port),
        )
        for entry in held
        if (entry.src, entry.comment) in wanted and (entry.src, entry.port) in ports and vet(entry.dst)
    ]


def shown_names(
    session: Session,
    wanted: Mapping[str, tuple[str, ...]],
    standing: Mapping[str, Iterable[str]],
    waiting: Iterable[str],
    live: AbstractSet[tuple[str, int]],
    vet: Callable[[str], bool],
) -> dict[str, tuple[str, ...]]:
    """Return what a hosts file may say now: of ``wanted``, what the kernel, ``live``, holds on all its ports.

    Of ``standing``, what the file says, stays what ``vet`` passes and the kernel holds: for names in
    ``waiting``, which were not asked yet, and for those of which the kernel has nothing that is wanted yet.
    """
    shown = {}
    for name in session.names:

        def good(address: str, ports: tuple[int, ...] = name.ports) -> bool:
            return all((address, port) in live for port in ports)

        found = tuple(filter(good, wanted.get(name.host, ())))
        if name.host in waiting or (wanted.get(name.host) and not found):
            stays = [address for address in standing.get(name.host, ()) if vet(address) and good(address)]
            found = tuple(dict.fromkeys([*found, *stays]))[: hostsfile.SLOTS]
        shown[name.host] = found
    return shown


def hosts_content(session: Session, published: Mapping[str, Iterable[str]]) -> bytes:
    """Return the hosts file of a session."""
    gateway = str(session.network.gateway) if session.network is not None else "127.0.0.1"
    declared, later = session.overrides.places(session.declaration)
    return hostsfile.render(
        session.hostname, session.address, gateway, declared, published, later, proxied=session.proxied
    )


def live(rows: Iterable[Row], sessions: Iterable[Session]) -> dict[str, frozenset[tuple[str, int]]]:
    """Return container id -> (address, port) pairs that are open for it when the kernel holds ``rows``."""
    by_source: dict[str, set[tuple[str, int]]] = {}
    for src, _, port, dst in rows:
        by_source.setdefault(src, set()).add((dst, port))
    return {session.container: frozenset(by_source.get(session.address, ())) for session in sessions}
