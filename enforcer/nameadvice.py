"""Why a name was refused, in words, and what would allow it. Pure.

What a policy says now is looked up by names and zones alone, at a cost that does not depend on the name: the
names are those of an untrusted program, and a regular expression that is slow on one of two thousand names
would be slow on all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from enforcer.denied import DNS_PORTS
from enforcer.sessions import Session
from policy.hosts import HostError, parse_host

DEFAULT_PORT = 443
SHOWN = 4  # sessions or ports
DENIED, NO_SNI, NOT_TLS = "denied", "no-sni", "not-tls"

WORDS: Mapping[str, str] = {
    DENIED: "not allowed",
    "resolve": "it could not be resolved",
    "refused-address": "its addresses are private, reserved or this host's own",
    "sni-mismatch": "the TLS connection then named another host",
    NO_SNI: "the TLS connection named no host",
    NOT_TLS: "what was sent is not TLS",
    "bad-hello": "the beginning of the TLS connection could not be read",
    "second-hello": "the TLS connection named another host at the second try",
    "busy": "too many names or connections at once; it may be asked for again",
}


@dataclass(frozen=True)
class Advice:
    """``note``: why. ``line``: an entry of ``egress.allow`` that allows it; ``command``: what does so now."""

    note: str
    line: str | None = None
    command: str | None = None


@dataclass(frozen=True)
class Reach:
    """What one session may reach or ask for: names and zones -> ports; and names that were taken back."""

    ports: Mapping[str, frozenset[int]]
    taken: frozenset[str] = frozenset()

    def of(self, name: str) -> frozenset[int]:
        """Return the ports on which names and zones allow a name."""
        found = self.ports.get(name, frozenset())
        rest = "" if name in self.taken else name
        while "." in rest:
            rest = rest.partition(".")[2]
            found |= self.ports.get("*." + rest, frozenset())
        return found


def reach(session: Session) -> Reach:
    """Return what a session may reach or ask for now."""
    rows = [(one.host, one.ports) for one, _ in session.overrides.asked(session.declaration)]
    rows += [(one.host, one.ports) for one in session.names]
    found: dict[str, frozenset[int]] = {}
    for host, ports in rows:
        found[host] = found.get(host, frozenset()) | frozenset(ports)
    return Reach(found, session.overrides.denied)


def entry(name: str, ports: Iterable[int] = (DEFAULT_PORT,), extra: str = "") -> str:
    """Return an item of ``egress.allow`` as it is written in corral.yaml."""
    quoted = f"'{name}'" if _is_number(name) else name
    wanted = list(ports)
    shown = f", ports: [{', '.join(map(str, wanted))}]" if wanted != [DEFAULT_PORT] else ""
    return f"- {{host: {quoted}{shown}{extra}}}" if shown or extra else f"- {quoted}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def advice(name: str, port: int, reason: str, living: Iterable[tuple[str, Reach]] = ()) -> Advice:
    """Explain one refusal.

    Args:
        name: canonical, as it was asked for.
        port: 0 when it was asked for by DNS.
        reason: one of ``WORDS``.
        living: (what a session is called, what it may reach) of the sandbox's sessions now.
    """
    note = WORDS[reason]
    if reason not in (DENIED, NO_SNI, NOT_TLS):
        return Advice(note)
    never = _never(name, port)
    if never is not None:
        return Advice(f"{note}: {never}")
    wanted, reached = port or DEFAULT_PORT, dict(living)
    if reason != DENIED:
        extra = ", sni: false" if reason == NO_SNI else ", protocol: tcp"
        known = frozenset[int]().union(*(one.ports.get(name, frozenset()) for one in reached.values()))
        # Of two entries for one name the strict wish wins.
        instead = "; the line goes in the place of the entry of that name" if known else ""
        return Advice(note + instead, entry(name, sorted({*known, wanted}), extra))
    ports = {called: one.of(name) for called, one in reached.items()}
    lacking = [called for called, known in ports.items() if wanted not in known]
    if ports and not lacking:
        return Advice("not allowed at that time; it is now")
    target = name if wanted == DEFAULT_PORT else f"{name}:{port}"
    if any(name in one.taken for one in reached.values()):
        return Advice(f"{note}: taken back by corral deny", None, f"corral allow {target}")
    return Advice(note + _where(wanted, ports, lacking), entry(name, [wanted]), f"corral allow {target}")


def _never(name: str, port: int) -> str | None:
    """Return why no policy can have a name on a port; None when one can."""
    try:
        parse_host(name)
    except HostError as error:
        return error.what
    return "a port of DNS" if port in DNS_PORTS else None


def _where(port: int, ports: Mapping[str, frozenset[int]], lacking: Sequence[str]) -> str:
    if len(lacking) < len(ports):
        # What one session may not reach, none gets through the proxy that they share.
        return f" in {', '.join(sorted(lacking)[:SHOWN])}"
    others = sorted(frozenset[int]().union(*ports.values()))[:SHOWN]
    return f" on port {port}, only on {', '.join(map(str, others))}" if others else ""
