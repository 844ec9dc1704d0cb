"""The small internet as tests see it: names that change at run time, a query log, packet counters."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import connections, execute, layout, network
from .execute import LabError, Process
from .layout import Layout
from .state import State

DEFAULT_TTL = 60


@dataclass(frozen=True)
class Query:
    """A question the DNS server was asked; `source` is the address it came from."""

    name: str
    type: str
    source: str


@dataclass(frozen=True)
class Record:
    addresses: tuple[str, ...]
    ttl: int


class Internet:
    """Handle on the internet of one lab. Several handles may exist; the truth lies in the lab's directory."""

    def __init__(self, lab: Layout, state: State) -> None:
        self._lab = lab
        self._state = state
        self.addresses = dict(layout.ADDRESSES)
        """gateway, resolver, allowed1, allowed2, and forbidden, forbidden6: those that no policy names."""
        self.sink_port = layout.SINK_PORT
        self.echo_port = layout.ECHO_PORT

    @property
    def ca_pem(self) -> str:
        """Certificate of the CA that signed every server's certificate."""
        return self._lab.ca_certificate.read_text()

    @property
    def files(self) -> Path:
        """A directory whose files every server has below `/files/`, as soon as they are there."""
        return self._lab.files

    @property
    def names(self) -> dict[str, list[str]]:
        """What the DNS server answers now."""
        return {name: list(record.addresses) for name, record in self._records().items()}

    def set_name(self, name: str, addresses: Iterable[str], ttl: int = DEFAULT_TTL) -> None:
        """From now on `name` has exactly these addresses; no question meanwhile goes unanswered."""
        record = Record(tuple(addresses), ttl)
        for address in record.addresses:
            ipaddress.ip_address(address)
        self._publish(self._records() | {name: record})

    def remove_name(self, name: str) -> None:
        """From now on `name` does not exist (NXDOMAIN)."""
        records = self._records()
        if name not in records:
            raise LabError(f"the internet has no name {name}")
        del records[name]
        self._publish(records)

    def reset_names(self) -> None:
        """The names a fresh internet has."""
        wanted = {name: Record(tuple(addresses), DEFAULT_TTL) for name, addresses in layout.NAMES.items()}
        if self._records() != wanted:
            self._publish(wanted)

    def mark(self) -> int:
        """A point in the query log, for `queries`."""
        return self._log.stat().st_size

    def queries(self, since: int = 0, name: str | None = None) -> list[Query]:
        """Questions since a mark, oldest first; of one name when given."""
        with self._log.open("rb") as log:
            log.seek(since)
            found = parse_queries(log.read().decode(errors="replace"))
        return [query for query in found if name is None or query.name == name.lower()]

    def packets(self, address: str, proto: str | None = None, port: int | None = None) -> int:
        """Packets that arrived for `address` since the last reset, whether anything listens there or not."""
        if ipaddress.ip_address(address).version == 6:
            if port is not None:
                raise ValueError("ports are counted for IPv4 only")
            return network.count(network.read_counters(self._lab, "packets6"), address, proto, None)
        kind = "packets4" if port is None else "ports4"
        return network.count(network.read_counters(self._lab, kind), address, proto, port)

    def all_packets(self) -> dict[tuple[str, ...], int]:
        """(protocol, address) -> packets, and ICMP by type and code: for a message that says what went where."""
        kinds = ("packets4", "packets6", "icmp4")
        return {key: count for kind in kinds for key, count in network.read_counters(self._lab, kind).items()}

    def stuck(self) -> list[tuple[str, str, str, str]]:
        """(address, port, client, its port) of connections whose server gets no answer."""
        return connections.stuck(self._lab)

    def end_stuck(self) -> None:
        """End what servers go on sending to clients of an earlier test that are gone."""
        connections.end_stuck(self._lab)

    def reset_counters(self) -> None:
        network.reset_counters(self._lab)

    @property
    def _log(self) -> Path:
        return self._lab.run / "dns.log"

    @property
    def _zone(self) -> Path:
        return self._lab.run / "dnsmasq.conf"

    def _records(self) -> dict[str, Record]:
        return parse_zone(execute.read_text(self._zone))

    def _publish(self, records: dict[str, Record]) -> None:
        """Start a server with the new records, turn the traffic to it, end the former one."""
        former = self._state.get("dns")
        port = (
            network.DNS_PORTS[1]
            if self._state.note("dns_port") == str(network.DNS_PORTS[0])
            else network.DNS_PORTS[0]
        )
        staged = self._zone.with_suffix(".next")
        staged.write_text(zone(records))
        begin = self._log.stat().st_size if self._log.exists() else 0
        process = self._start(staged, port)
        self._state.put("dns-next", process)
        pid = f"dnsmasq[{process.pid}]: started"
        execute.wait_until(lambda: self._said(pid, begin, process), "the DNS server starts", timeout=10)
        network.steer_dns(self._lab, port)
        staged.replace(self._zone)
        self._state.put("dns", process, dns_port=str(port))
        self._state.drop("dns-next")
        if former:
            former.kill_group()  # it forks for each TCP connection, and the fork holds the port

    def _start(self, config: Path, port: int) -> Process:
        dnsmasq = Path(self._state.note("dnsmasq"))
        argv = [
            execute.tool("nsenter"), f"--net={layout.netns_path(self._lab.inet_netns)}",
            str(dnsmasq), "--keep-in-foreground", f"--conf-file={config}", f"--port={port}",
            f"--listen-address={layout.RESOLVER}", "--bind-interfaces", "--no-resolv", "--no-hosts",
            "--local=//", "--local=/#/", "--cache-size=0", "--log-queries=extra",
            f"--log-facility={self._log}", "--user=root", "--pid-file=",
        ]  # fmt: skip
        return execute.start_daemon(
            argv, log=self._lab.run / "dnsmasq.out", cgroups=self._state.groups.make("internet")
        )

    def _said(self, text: str, begin: int, process: Process) -> bool:
        if not process.alive():
            out = execute.read_text(self._lab.run / "dnsmasq.out") + execute.read_text(self._log)[-2000:]
            raise LabError(f"the DNS server ended at once\n{out}")
        return text in execute.read_text(self._log)[begin:]


def zone(records: dict[str, Record]) -> str:
    """dnsmasq configuration: one host-record line per address, so that a name may have several."""
    lines = [
        f"host-record={name.lower()},{address},{record.ttl}"
        for name, record in sorted(records.items())
        for address in record.addresses
    ]
    return "\n".join([*lines, ""])


def parse_zone(text: str) -> dict[str, Record]:
    """The inverse of `zone`."""
    found: dict[str, Record] = {}
    for line in text.splitlines():
        kind, _, value = line.partition("=")
        if kind == "host-record":
            name, address, ttl = value.split(",")
            former = found.get(name, Record((), int(ttl)))
            found[name] = Record((*former.addresses, address), int(ttl))
    return found


def parse_queries(log: str) -> list[Query]:
    """Query lines of dnsmasq's log."""
    lines = re.findall(r"query\[([^\]]+)\] (\S+) from (\S+)$", log, re.MULTILINE)
    return [Query(name.lower(), kind, source) for kind, name, source in lines]
