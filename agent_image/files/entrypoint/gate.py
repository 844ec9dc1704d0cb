"""The gate: whether the network, tried from inside, is what the policy says. Sockets come from ``tries``.

At most three rounds, each below 1.3 seconds: what a round has not settled is tried again, so that neither a
lost packet nor a busy machine stops a sandbox. What must not be is believed at the first sight of it.
"""

from __future__ import annotations

import json
import socket

from .questions import (
    ANSWERED,
    CLOSED,
    DNS_PORT,
    OUTSIDE_NAME,
    RECORD_TYPES,
    UNLISTED_NAME,
    answer_of,
    question,
)
from .tries import REACHED, Try, exchange

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    Hosts = Mapping[str, Sequence[str]]

VARIABLE = "CORRAL_GATE"
HOSTS = "/etc/hosts"
HOST_ALIAS = "corral-host"
PROXY_ALIAS = "proxy"
EMBEDDED_DNS = "127.0.0.11"

ROUNDS = 3
REJECT_WITHIN = 0.1
# Seconds. A relay accepts at once, and closes again when nothing listens behind it.
LINGER = 0.1
# Connections a round may open to further addresses and ports of names that did not answer yet.
BUDGET = 256

# Seconds. Names of an open sandbox are asked for outside, which takes longer than a refusal.
ANSWER_WAIT = 0.9

ISOLATION = "unlisted host reachable — isolation broken"
CLOSED_REACHED = "closed address {} reachable — isolation broken"
BESIDE = "rules already present for this sandbox; re-checking"
RECHECK = "re-check failed against existing rules"


class Name:
    """An allowed name: ``host``, its ``ports``, and whether it has to have an address and to answer."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        _only(body, "host", "ports", "liveness", "optional")
        self.host, self.ports = body["host"], [_port(port) for port in body["ports"]]
        self.liveness, self.optional = body["liveness"], body["optional"]
        if not isinstance(self.host, str) or not self.host or not self.ports:
            raise ValueError(f"not a name with ports: {body}")
        if not isinstance(self.liveness, bool) or not isinstance(self.optional, bool):
            raise ValueError(f"neither true nor false: {body}")


class Policy:
    """What CORRAL_GATE says.

    probe: {"address", "port"} that no policy allows; here a pair.
    resolver: an address outside that is asked for names.
    names: [{"host", "ports", "liveness", "optional"}].
    services: ports of the host that are reachable as corral-host:<port>.
    beside: whether other sessions of this sandbox run, for which its rules already stand.
    proxy: port of the host's end at which the sandbox's proxy is reached, if it has one; else absent, here 0.
    open: {"closed": [address]} where all public addresses are reachable, else absent; here a list, or None.
    dns: "answer" where names that the policy permits are answered, and no others; else absent, here False.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        given = [key for key in ("open", "proxy", "dns") if isinstance(body, dict) and key in body]
        _only(body, "probe", "resolver", "names", "services", "beside", *given)
        _only(body["probe"], "address", "port")
        self.probe = (_address(body["probe"]["address"]), _port(body["probe"]["port"]))
        self.resolver = _address(body["resolver"])
        self.names = [Name(name) for name in _rows(body["names"])]
        self.services = [_port(port) for port in _rows(body["services"])]
        self.beside = body["beside"]
        if not isinstance(self.beside, bool):
            raise ValueError(f"neither true nor false: {body}")
        self.closed: list[str] | None = None
        self.proxy = _port(body["proxy"]) if "proxy" in given else 0
        self.answered = "dns" in given
        if self.answered and body["dns"] != "answer":
            raise ValueError(f"not a way to answer DNS: {body['dns']!r}")
        if "open" in given:
            _only(body["open"], "closed")
            self.closed = [_address(address) for address in _rows(body["open"]["closed"])]


def parse_policy(text: str) -> Policy:
    """Return what the variable says.

    Raises:
        Exception: it says nothing, or anything that is not exactly understood.
    """
    return Policy(json.loads(text))


def parse_hosts(text: str) -> dict[str, list[str]]:
    """Return name -> addresses of a hosts file, in its order."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        for name in names:
            known = found.setdefault(name.lower(), [])
            if address not in known:
                known.append(address)
    return found


def run(
    policy: Policy,
    hosts: Hosts,
    *,
    say: Callable[[str], None],
    attempt: Callable[[Sequence[Try]], None] = exchange,
) -> bool:
    """Check everything, say what came of it, return whether all of it is true.

    Args:
        policy: what must be true.
        hosts: name -> addresses, of the container's hosts file.
        say: takes a line.
        attempt: makes tries at the same time and fills them in.
    """
    if policy.beside:
        say(BESIDE)
    for name in policy.names:
        if hosts.get(name.host):
            say(f"pinned {name.host} -> {' '.join(hosts[name.host])}")
    checks = planned(policy, hosts)
    for _ in range(ROUNDS):
        undecided = [check for check in checks if not check.decided]
        rounds = [(check, check.tries(len(undecided))) for check in undecided]
        attempt([one for _, tries in rounds for one in tries])
        for check, tries in rounds:
            check.hear(tries)
    for check in checks:
        if check.passed:
            say(f"OK: {check.passed}")
            continue
        for problem in check.problems():
            say(f"ERROR: {problem}")
    passed = all(check.passed for check in checks)
    if passed:
        say("egress policy applied")
    elif policy.beside:
        say(f"ERROR: {RECHECK}")
    return passed


def planned(policy: Policy, hosts: Hosts) -> list[Check]:
    """Return the checks in the order in which they are told."""
    gateway = next(iter(hosts.get(HOST_ALIAS, ())), "")
    checks: list[Check] = [Unlisted(policy), DnsClosed(policy, gateway)]
    if policy.closed is not None:
        closed = [policy.probe[0], *policy.closed]
        checks = [
            *(Unlisted(policy, address) for address in closed),
            DnsClosed(policy, gateway, outside=True),
            DnsAnswers(),
        ]
    elif policy.answered:
        named = next((name.host for name in policy.names if hosts.get(name.host)), "")
        checks[1:] = [DnsClosed(policy, gateway, outside=True), DnsPermitted(gateway, named)]
    for name in policy.names:
        addresses = hosts.get(name.host, ())
        if name.liveness if addresses else not name.optional:
            checks.append(Allowed(name, addresses))
    checks += [HostService(port, gateway) for port in policy.services]
    return [*checks, Proxy(policy.proxy, gateway)] if policy.proxy else checks


class Check:
    """Something that must be true. ``passed`` is what to say once it is; ``decided`` ends its tries."""

    def __init__(self) -> None:
        self.passed = ""
        self.decided = False

    def tries(self, undecided: int) -> list[Try]:
        """Return the tries of the next round, in which so many checks take part."""
        raise NotImplementedError

    def hear(self, tries: Sequence[Try]) -> None:
        """Judge a round's tries."""
        raise NotImplementedError

    def problems(self) -> list[str]:
        """Return what is wrong and what helps, when it has not passed."""
        raise NotImplementedError

    def ok(self, text: str) -> None:
        """Settle the check: it has passed."""
        self.passed, self.decided = text, True


class Unlisted(Check):
    """An address that no policy allows is refused at once over TCP, and nothing comes back over UDP.

    With ``closed`` it is one that is closed although all public addresses are open.
    """

    def __init__(self, policy: Policy, closed: str = "") -> None:
        super().__init__()
        self.closed = closed
        self.address, self.port = closed or policy.probe[0], policy.probe[1]
        self.heard: list[Try] = []

    def tries(self, undecided: int) -> list[Try]:
        found = [Try(self.address, self.port)]
        if not self.heard:
            found.append(question(self.address, "A", udp=True, port=self.port))
        return found

    def hear(self, tries: Sequence[Try]) -> None:
        self.heard += tries
        if any(one.kind in REACHED for one in tries):
            self.decided = True
        elif tries[0].kind == "refused" and tries[0].seconds <= REJECT_WITHIN:
            self.ok(f"closed address {self.closed} blocked" if self.closed else "unlisted host blocked")

    def problems(self) -> list[str]:
        if any(one.kind in REACHED for one in self.heard):
            return [CLOSED_REACHED.format(self.closed) if self.closed else ISOLATION]
        best = min(
            (one for one in self.heard if not one.udp), key=lambda one: (one.kind != "refused", one.seconds)
        )
        told = f"unlisted host not refused: {self.address}:{self.port} "
        if best.kind == "refused":
            limit = f"{REJECT_WITHIN * 1000:.0f} ms"
            return [
                f"{told}took {best.seconds * 1000:.0f} ms, more than {limit}; "
                "try again when the host is less busy"
            ]
        if best.kind == "timeout":
            return [
                f"{told}timed out, which proves nothing: the host's rules do not answer; see: corral status"
            ]
        return [f"{told}has no route ({best}), which proves nothing; connect the host to its network"]


class DnsClosed(Check):
    """Nobody answers DNS: not the container's own resolver, not the host, nobody outside.

    ``outside``: the first two do, in a sandbox whose names are answered.
    """

    def __init__(self, policy: Policy, gateway: str, outside: bool = False) -> None:
        super().__init__()
        self.outside = outside
        own = [] if outside else [EMBEDDED_DNS, *([gateway] if gateway else [])]
        self.servers = [*own, policy.resolver]
        # A service of the host on this port is the policy's own decision.
        self.accepting = {EMBEDDED_DNS, *([gateway] if DNS_PORT in policy.services else [])}
        self.missing = not gateway
        self.answers: dict[str, str] = {}

    def tries(self, undecided: int) -> list[Try]:
        return [
            question(server, record, udp=udp)
            for server in dict.fromkeys(self.servers)
            for udp in (True, False)
            for record in RECORD_TYPES
        ]

    def hear(self, tries: Sequence[Try]) -> None:
        for one in tries:
            way = "UDP" if one.udp else "TCP"
            if one.kind == "data":
                code, count = answer_of(one.payload, one.data, one.udp)
                # The container's own resolver may say that it knows nobody to ask. Others must not be heard.
                if one.address != EMBEDDED_DNS or count or code not in CLOSED:
                    self.answers.setdefault(one.address, f"answers {code} over {way}")
            elif one.kind in REACHED and one.address not in self.accepting:
                self.answers.setdefault(one.address, f"accepts connections over {way}")
        self.decided = True
        if not self.answers and not self.missing:
            self.ok("DNS outside closed" if self.outside else "DNS closed")

    def problems(self) -> list[str]:
        found = [
            f"DNS reachable: {server} {what} — isolation broken" for server, what in self.answers.items()
        ]
        if self.missing:
            found.append(f"DNS not checked: {HOSTS} has no {HOST_ALIAS}; see: corral status")
        return found


class DnsAnswers(Check):
    """Names are answered by the container's own resolver, which asks the service on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.last = "no answer"

    def tries(self, undecided: int) -> list[Try]:
        return [question(EMBEDDED_DNS, "A", udp=True, wait=ANSWER_WAIT)]

    def hear(self, tries: Sequence[Try]) -> None:
        for one in tries:
            self.last = str(one)
            if one.kind == "data":
                code, _ = answer_of(one.payload, one.data, one.udp)
                self.last = code
                # Whether that name exists is its owner's business.
                if code in ANSWERED:
                    self.ok("names are answered")

    def problems(self) -> list[str]:
        return [
            f"names are not answered ({self.last}): can this host resolve {OUTSIDE_NAME}? See: corral status"
        ]


class DnsPermitted(Check):
    """The container's own resolver and the gateway deny the name that no policy has, and know ``named``.

    That the first is NXDOMAIN shows that the service on the host was asked: nobody else may be.
    """

    def __init__(self, gateway: str, named: str) -> None:
        super().__init__()
        self.named = named
        self.left = {
            (server, udp): "no answer" for server in (EMBEDDED_DNS, gateway) for udp in (True, False)
        }
        self.permitted = "" if not named else "no answer"
        self.wrong = ""
        self.decided = self.missing = not gateway

    def tries(self, undecided: int) -> list[Try]:
        found = [
            question(server, "A", udp=udp, wait=ANSWER_WAIT, name=UNLISTED_NAME) for server, udp in self.left
        ]
        if self.permitted:
            found.append(question(EMBEDDED_DNS, "A", udp=True, wait=ANSWER_WAIT, name=self.named))
        return found

    def hear(self, tries: Sequence[Try]) -> None:
        places = [*self.left, None]
        for number, one in enumerate(tries):
            place = places[number]
            said, count = answer_of(one.payload, one.data, one.udp) if one.kind == "data" else (str(one), 0)
            if place is None:
                self.permitted = "" if (said, count > 0) == ("NOERROR", True) else said
            elif said == "NXDOMAIN" and not count:
                del self.left[place]
            else:
                self.left[place] = said
                if count or said == "NOERROR":
                    self.wrong, self.decided = f"{one.address} says {said}, {count} records", True
        if not (self.left or self.permitted or self.decided):
            self.ok("names of the policy are answered, others are not")

    def problems(self) -> list[str]:
        if self.missing:
            return [f"DNS not checked: {HOSTS} has no {HOST_ALIAS}; see: corral status"]
        if self.wrong:
            return [f"a name that is not allowed is answered: {self.wrong} — isolation broken"]
        advice = "see: corral status"
        found = [
            f"names are not answered: {server} over {'UDP' if udp else 'TCP'}: {said}; {advice}"
            for (server, udp), said in self.left.items()
        ]
        if self.permitted:
            found.append(f"allowlisted host {self.named} is not answered by DNS: {self.permitted}; {advice}")
        return found


class Allowed(Check):
    """A name connects at one of its addresses on one of its ports."""

    def __init__(self, name: Name, addresses: Sequence[str]) -> None:
        super().__init__()
        self.name, self.addresses = name, addresses
        places = [(i + j, i, j) for i in range(len(addresses)) for j in range(len(name.ports))]
        # Along the diagonals: early on, every address and every port has its turn.
        self.left = [(addresses[i], name.ports[j]) for _, i, j in sorted(places)]
        self.heard: dict[tuple[str, int], Try] = {}
        self.decided = not addresses

    def tries(self, undecided: int) -> list[Try]:
        count = max(2, BUDGET // undecided) if self.heard else 1
        # What was tried comes last: a server that was slow has another chance.
        turn, self.left = self.left[:count], self.left[count:] + self.left[:count]
        return [Try(address, port) for address, port in turn]

    def hear(self, tries: Sequence[Try]) -> None:
        for one in tries:
            self.heard[one.address, one.port] = one
            if one.kind in REACHED and not self.passed:
                self.ok(f"allowlisted host {self.name.host} ({one.address}) reachable")

    def problems(self) -> list[str]:
        told = f"allowlisted host {self.name.host} not reachable: "
        if not self.addresses:
            return [f"{told}{HOSTS} has no address for it; see: corral status"]
        ports = f"port{'s' * (len(self.name.ports) > 1)} {', '.join(map(str, self.name.ports))}"
        kinds = ", ".join(dict.fromkeys(one.kind for one in self.heard.values()))
        advice = "if it is not meant to answer there, set liveness: false for it in corral.yaml"
        return [f"{told}{' '.join(self.addresses)} on {ports}: {kinds}; {advice}"]


class HostService(Check):
    """A service of the host accepts a connection, and so does what stands behind its relay."""

    def __init__(self, port: int, gateway: str) -> None:
        super().__init__()
        self.port, self.gateway = port, gateway
        self.last: Try | None = None
        self.decided = not gateway
        self.what, self.alias = f"host service {port}", HOST_ALIAS
        self.nobody = f"nothing listens on 127.0.0.1:{port} of the host; start it there"

    def tries(self, undecided: int) -> list[Try]:
        return [Try(self.gateway, self.port, linger=LINGER)]

    def hear(self, tries: Sequence[Try]) -> None:
        self.last = tries[0]
        if self.last.kind in {"connected", "data"}:
            self.ok(f"{self.what} reachable")

    def problems(self) -> list[str]:
        told = f"{self.what} not reachable: "
        if self.last is None:
            return [f"{told}{HOSTS} has no {HOST_ALIAS}; see: corral status"]
        if self.last.kind == "closed":
            return [f"{told}{self.nobody}"]
        place = f"{self.alias}:{self.port}"
        return [f"{told}{place} {self.last}; see: systemctl --user status 'corral-relay-*'"]


class Proxy(HostService):
    """The sandbox's proxy takes connections, behind a relay as a host service does."""

    def __init__(self, port: int, gateway: str) -> None:
        super().__init__(port, gateway)
        self.what, self.alias = "the sandbox's proxy", PROXY_ALIAS
        self.nobody = "it does not take connections; see: corral status, corral logs --proxy"


def _only(body: Mapping[str, Any], *keys: str) -> None:
    if not isinstance(body, dict) or set(body) != set(keys):
        raise ValueError(f"not an object with {', '.join(keys)}: {body!r}")


def _rows(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"not a list: {value!r}")
    return value


def _address(value: Any) -> str:
    socket.inet_pton(socket.AF_INET, value)
    return str(value)


def _port(value: Any) -> int:
    if type(value) is not int or not 0 < value < 65536:
        raise ValueError(f"not a port: {value!r}")
    return value
