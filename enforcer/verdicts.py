"""What would happen to a connection from a session to HOST:PORT over TCP, and why. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from enforcer import asking, pins
from enforcer.sessions import Session
from enforcer.vetting import Vetting
from enforcer.writerclient import Entry
from policy.container import HOST_ALIAS
from policy.declaration import OPEN
from policy.hosts import is_address

DNS_PORTS = frozenset({53, 853})


@dataclass(frozen=True)
class Verdict:
    """``addresses`` are those that a program in the session would connect to."""

    allowed: bool
    reason: str
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sight:
    """One session as the kernel and its hosts file have it: entries with its address, name -> addresses.

    ``askers``: the sessions that share its proxy, it among them. ``proxy``: whether that one can ask.
    """

    session: Session
    pins: tuple[Entry, ...]
    host: tuple[Entry, ...]
    hosts: Mapping[str, Sequence[str]]
    open: bool = False
    askers: tuple[Session, ...] = ()
    proxy: bool = False


def judge(sight: Sight, state: pins.State, host: str, port: int) -> Verdict:
    """Say what happens to a TCP connection to ``host`` (canonical, or an address) from this session."""
    session = sight.session
    if session.problems:
        return Verdict(False, f"the session gets nothing: {'; '.join(session.problems)}")
    if host == HOST_ALIAS:
        return _service(sight, port)
    if session.declaration.mode == OPEN:
        return _open(sight, state, host, port)
    if is_address(host):
        return _address(sight, host, port)
    return _named(sight, state, host, port)


def _named(sight: Sight, state: pins.State, host: str, port: int) -> Verdict:
    session = sight.session
    name = next((name for name in session.names if name.host == host), None)
    asked = _asked(sight, host, port) if name is None or port not in name.ports else None
    if asked is not None:
        return asked
    if name is None:
        return Verdict(False, _not_allowed(session, host))
    if port not in name.ports:
        return Verdict(False, f"{host} is allowed on port {_listed(name.ports)}, not on {port}")
    shown = tuple(sight.hosts.get(host, ()))
    if not shown:
        return Verdict(False, f"{host} is allowed, but has no address: {_why(state, session, host)}")
    held = {(entry.dst, entry.port) for entry in sight.pins}
    missing = [address for address in shown if (address, port) not in held]
    if missing:
        return Verdict(False, f"the kernel does not hold {_listed(missing)} for it; see corral status", shown)
    return Verdict(True, f"{host} is allowed on port {_listed(name.ports)}", shown)


def _asked(sight: Sight, host: str, port: int) -> Verdict | None:
    """Judge by what may be asked for; None when there is nobody to ask."""
    session = sight.session
    if session.proxied:
        found = asking.judge(sight.askers, host, port)
        if isinstance(found, asking.Permit):
            if not sight.proxy:
                return Verdict(
                    False, f"{found.entry} allows it, but the proxy does not run; see corral status"
                )
            how = "" if found.protocol == "tls" else ", and what passes need not be TLS"
            return Verdict(True, f"through the proxy: {found.entry} allows it{how}")
        if not session.answered:
            return Verdict(False, found.text)
    if session.answered:
        own = asking.own(session, host, port)
        if isinstance(own, asking.Permit):
            return Verdict(True, f"its addresses are opened when DNS is asked for it: {own.entry} allows it")
        return Verdict(False, own.text)
    return None


def _service(sight: Sight, port: int) -> Verdict:
    services = {service.port: service.name for service in sight.session.declaration.host_services}
    if port not in services:
        told = _listed(services) if services else "none"
        return Verdict(False, f"no host service has port {port} (declared: {told})")
    if all(entry.port != port for entry in sight.host):
        return Verdict(False, f"the kernel does not hold host service {services[port]}; see corral status")
    network = sight.session.network
    return Verdict(
        True, f"host service {services[port]}", (str(network.gateway),) if network is not None else ()
    )


def _open(sight: Sight, state: pins.State, host: str, port: int) -> Verdict:
    if port in DNS_PORTS:
        return Verdict(False, "DNS: names are asked of 127.0.0.11; other resolvers are closed")
    if not sight.open:
        return Verdict(False, "egress.mode is open, and the kernel does not hold it yet; see corral status")
    if not is_address(host):
        return Verdict(True, "egress.mode is open: any name, when its address is public")
    verdict = state.vetting.check(host)
    if not verdict:
        return Verdict(False, f"egress.mode is open, and {host} is {verdict.reason}")
    return Verdict(True, "egress.mode is open: a public address", (host,))


def _address(sight: Sight, address: str, port: int) -> Verdict:
    names = sorted(
        entry.comment.rpartition(" ")[2] for entry in sight.pins if (entry.dst, entry.port) == (address, port)
    )
    if names:
        return Verdict(True, f"it is an address of {_listed(names)}", (address,))
    return Verdict(False, "an address is reachable only while an allowed name has it, on that name's ports")


def _not_allowed(session: Session, host: str) -> str:
    if host in session.overrides.denied:
        return "corral deny took it back"
    if host in session.overrides.listed:
        return "it was allowed for a time that is over, or taken back"
    return "not in the session's policy, and there is no DNS to ask"


def _why(state: pins.State, session: Session, host: str) -> str:
    record = state.names.get(host)
    if record is None or session.container not in state.containers:
        return "not asked yet"
    return record.error or ("not asked yet" if record.state is pins.NameState.NEW else record.state.value)


@dataclass(frozen=True)
class Resolution:
    """What a name would open if it were allowed now."""

    addresses: tuple[str, ...]
    refused: Mapping[str, str]
    error: str | None


def resolution(found: pins.Answer | pins.Failure, vetting: Vetting) -> Resolution:
    """Judge a result of the resolver."""
    if isinstance(found, pins.Failure):
        return Resolution((), {}, f"{found.kind}: {found.detail}" if found.detail else found.kind)
    verdicts = {address: vetting.check(address) for address in found.addresses}
    good = tuple(address for address, verdict in verdicts.items() if verdict)
    refused = {address: verdict.reason for address, verdict in verdicts.items() if not verdict}
    return Resolution(good, refused, None if good else "every address is refused")


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
