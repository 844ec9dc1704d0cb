"""Which addresses a name may open. Pure.

A name in a policy opens public unicast addresses and nothing else: whoever answers for the name must not be
able to point it at the host, at Docker, at a private network or at a cloud's metadata service. The table is
our own, because ``ipaddress.is_global`` calls NAT64, site-local, multicast and 168.63.129.16 global and
differs between Python versions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class _Range:
    network: Network
    what: str
    # The service configuration may lift it; never so for what leads to this host, the link or metadata.
    liftable: bool = False

    @property
    def reason(self) -> str:
        return f"{self.what} ({self.network})"


def _table(rows: Iterable[tuple[str, str, bool]]) -> tuple[_Range, ...]:
    return tuple(_Range(ip_network(network), what, liftable) for network, what, liftable in rows)


# The first match names the reason: narrower before wider.
_V4 = _table(
    (
        ("0.0.0.0/8", "this network", False),
        ("127.0.0.0/8", "loopback", False),
        ("169.254.0.0/16", "link-local/metadata", False),
        ("168.63.129.16/32", "cloud metadata", False),
        ("100.100.100.200/32", "cloud metadata", False),
        ("192.0.0.192/32", "cloud metadata", False),
        ("224.0.0.0/4", "multicast", False),
        ("255.255.255.255/32", "broadcast", False),
        ("240.0.0.0/4", "reserved", False),
        ("10.0.0.0/8", "private", True),
        ("172.16.0.0/12", "private", True),
        ("192.168.0.0/16", "private", True),
        ("100.64.0.0/10", "carrier-grade NAT", True),
        ("192.0.0.0/24", "protocol assignments", True),
        ("192.0.2.0/24", "documentation", True),
        ("198.51.100.0/24", "documentation", True),
        ("203.0.113.0/24", "documentation", True),
        ("192.88.99.0/24", "6to4 relay", True),
        ("198.18.0.0/15", "benchmarking", True),
    )
)
_V6 = _table(
    (
        ("::1/128", "loopback", False),
        ("::/128", "unspecified", False),
        ("::ffff:0:0/96", "IPv4-mapped", False),
        ("::ffff:0:0:0/96", "IPv4-translated", False),
        ("::/96", "IPv4-compatible", False),
        ("64:ff9b::/96", "NAT64", False),
        ("64:ff9b:1::/48", "NAT64", False),
        ("fd00:ec2::/32", "cloud metadata", False),
        ("fd20:ce::254/128", "cloud metadata", False),
        ("fe80::/10", "link-local", False),
        ("fec0::/10", "site-local", False),
        ("ff00::/8", "multicast", False),
        ("2002::/16", "6to4", False),
        ("2001::/32", "Teredo", False),
        ("fc00::/7", "private", True),
        ("2001::/23", "protocol assignments", True),
        ("2001:db8::/32", "documentation", True),
        ("3fff::/20", "documentation", True),
    )
)
_V6_UNICAST = IPv6Network("2000::/3")


@dataclass(frozen=True, slots=True)
class Verdict:
    """``ok``, or ``reason``: the range an address lies in, e.g. ``private (10.0.0.0/8)``."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


_OK = Verdict(True)


@lru_cache(maxsize=8192)
def _parse(address: str) -> Address | None:
    try:
        return ip_address(address)
    except ValueError:
        return None


@dataclass(frozen=True)
class Vetting:
    """The table plus what is known about this host; compare two with ``==`` to see whether anything moved.

    ``permit`` comes from the service configuration and lifts liftable rows of the table for the addresses
    inside it. It never lifts loopback, link-local, metadata, multicast or an address form that carries an
    IPv4 address, nor the three host-dependent sets.
    """

    permit: tuple[Network, ...] = ()
    host_addresses: frozenset[Address] = frozenset()
    docker_subnets: tuple[Network, ...] = ()
    corral_subnets: tuple[Network, ...] = ()

    @classmethod
    def of(
        cls,
        permit: Iterable[str] = (),
        host_addresses: Iterable[str] = (),
        docker_subnets: Iterable[str] = (),
        corral_subnets: Iterable[str] = (),
    ) -> Vetting:
        """Build one from text, in any order and with repetitions.

        Raises:
            ValueError: not an address, or not a network (host bits set count as not a network).
        """
        return cls(
            permit=_networks(permit),
            host_addresses=frozenset(ip_address(address.partition("%")[0]) for address in host_addresses),
            docker_subnets=_networks(docker_subnets),
            corral_subnets=_networks(corral_subnets),
        )

    def check(self, address: str) -> Verdict:
        """Say whether a name may open ``address``, and if not, which range it lies in."""
        parsed = _parse(address) if isinstance(address, str) else None
        if parsed is None:
            return Verdict(False, "not an IP address")
        if isinstance(parsed, IPv6Address) and parsed.scope_id is not None:
            return Verdict(False, "bound to one interface (it has a zone index)")
        reason = self._reason(parsed)
        return Verdict(False, reason) if reason else _OK

    def _reason(self, address: Address) -> str | None:
        row = _row(address)
        if row is not None and not row.liftable:
            return row.reason
        if address in self.host_addresses:
            return "an address of this host"
        for what, networks in (
            ("Docker network", self.docker_subnets),
            ("corral network", self.corral_subnets),
        ):
            for network in networks:
                if address in network:
                    return f"{what} {network}"
        if row is None or any(address in network for network in self.permit):
            return None
        return row.reason


def _networks(texts: Iterable[str]) -> tuple[Network, ...]:
    networks = {ip_network(text) for text in texts}
    return tuple(
        sorted(networks, key=lambda network: (network.version, network.network_address.packed, network))
    )


@lru_cache(maxsize=8192)
def _row(address: Address) -> _Range | None:
    for row in _V4 if address.version == 4 else _V6:
        if address in row.network:
            return row
    if isinstance(address, IPv6Address) and address not in _V6_UNICAST:
        return _Range(_V6_UNICAST, "outside global unicast")
    return None
