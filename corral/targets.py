"""What is named on the command line: names, what stands for many names, ports, lengths of time. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from corral.plain import cleaned
from policy.container import HOST_ALIAS
from policy.errors import ArgumentError
from policy.hosts import HostError, is_address, parse_host
from policy.patterns import is_pattern, is_regex, parse_pattern

DEFAULT_PORT = 443
MAX_PORTS = 64
LONGEST = 30 * 86400
DNS_PORTS = frozenset({53, 853})

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"([0-9]{1,6})([smhd])")
_PORT = re.compile(r"[0-9]{1,5}")
_COUNT = re.compile(r"[0-9]{1,9}")
_META = frozenset("*^$()[]{}|\\+?")
QUOTE = "in single quotes, so that the shell leaves it alone"


@dataclass(frozen=True)
class Target:
    """A canonical name, an address, or what stands for many names; and a TCP port, None: not given."""

    host: str
    port: int | None

    @property
    def many(self) -> bool:
        """Whether it stands for many names."""
        return is_pattern(self.host)


def parse_target(text: str, *, force: bool = False, address: bool = False, many: bool = False) -> Target:
    """Read HOST or HOST:PORT.

    Args:
        text: the argument.
        force: accept public DNS-over-HTTPS endpoints.
        address: accept IPv4 addresses and corral-host too.
        many: accept zones and regular expressions too.

    Raises:
        ArgumentError: anything that no policy could name.
    """
    host, number = _split(text)
    if number is not None and not 0 < number < 65536:
        raise ArgumentError(f"{number} is not a port", "write HOST:PORT")
    if address and (host == HOST_ALIAS or (is_address(host) and ":" not in host)):
        return Target(host, number)
    try:
        name = parse_pattern(host, force=force).text if many else parse_host(host, force=force)
        return Target(name, number)
    except HostError as error:
        raise ArgumentError(f"{cleaned(text)}: {error.what}", _fix(host, error, many)) from error


def _split(text: str) -> tuple[str, int | None]:
    host, colon, port = text.rpartition(":")
    # regex:443 is an expression, if not one that is accepted.
    if not colon or not _PORT.fullmatch(port) or host == "regex":
        return text, None
    return host, int(port)


def _fix(host: str, error: HostError, many: bool) -> str | None:
    """Say how it is written, where the shell may have had a hand in it."""
    if not many or not (is_pattern(host) or _META.intersection(host)):
        return error.fix
    example = "'^api[0-9]+\\.example\\.com$'" if is_regex(host) else "'*.example.com'"
    fix = f"{error.fix}; " if error.fix else ""
    return f"{fix}on a command line it stands {QUOTE}: {example}"


def parse_ports(text: str | None, given: int | None) -> tuple[int, ...]:
    """Return the ports to open.

    Args:
        text: ``443,8443``, or None.
        given: the port of HOST:PORT, or None.

    Raises:
        ArgumentError: not ports, too many, or given twice.
    """
    ports: tuple[int, ...] = (given or DEFAULT_PORT,)
    if text is not None:
        if given is not None:
            raise ArgumentError("ports are given twice", "write HOST:PORT, or HOST --ports PORT,PORT")
        parts = text.split(",")
        wrong = [part for part in parts if not _PORT.fullmatch(part) or not 0 < int(part) < 65536]
        if wrong or len(parts) > MAX_PORTS:
            what = (
                f"more than {MAX_PORTS} ports"
                if not wrong
                else f"{cleaned(wrong[0]) or 'nothing'} is not a port"
            )
            raise ArgumentError(what, "write --ports 443,8443")
        ports = tuple(dict.fromkeys(map(int, parts)))
    if DNS_PORTS.intersection(ports):
        raise ArgumentError("a port of DNS: a sandbox has no DNS", "name another port")
    return ports


def parse_duration(text: str) -> float:
    """Return the seconds that ``90s``, ``30m``, ``1h`` or ``2d`` are.

    Raises:
        ArgumentError: anything else, nothing at all, or over 30 days.
    """
    match = _DURATION.fullmatch(text)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= LONGEST:
        raise ArgumentError(f"{cleaned(text)} is not a length of time", "write 30m, 1h or 2d; at most 30d")
    return float(seconds)


def parse_count(option: str, text: str) -> int:
    """Return the number of lines that an option says.

    Raises:
        ArgumentError: it is no whole number, or has more than nine digits.
    """
    if not _COUNT.fullmatch(text):
        raise ArgumentError(f"{option} {cleaned(text)[:80]!r} is no number of lines", f"write {option} 20")
    return int(text)


def duration(seconds: float) -> str:
    """Return a length of time as people say it."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size or seconds == size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"
