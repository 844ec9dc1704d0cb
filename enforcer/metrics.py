"""What the service counts, as text that Prometheus reads (format 0.0.4). Pure.

Names and labels are an interface: they stay. Labels have few values: states, parts, and the sandboxes of one
user. Counters begin at 0 with each start of the service, ``corral_repairs_total`` with that of the writer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Timing:
    """How often something was done, and the seconds that took in all and last."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Take in one more."""
        self.count += 1
        self.seconds += seconds


@dataclass
class Metrics:
    """Counters of one life of the service.

    ``drift`` maps parts of the rules to differences found, ``dials`` results to lines that proxies sent.
    """

    reconcile: Timing = field(default_factory=Timing)
    apply: Timing = field(default_factory=Timing)
    refreshes: Counter[str] = field(default_factory=Counter)
    drift: Counter[str] = field(default_factory=Counter)
    dials: Counter[str] = field(default_factory=Counter)
    connections: int = 0
    writer_errors: int = 0

    @property
    def reconnects(self) -> int:
        """How often Docker was found again."""
        return max(0, self.connections - 1)


@dataclass(frozen=True)
class Now:
    """What is as it is at the moment of asking. ``repairs`` is None when the writer does not tell."""

    version: str
    docker: bool
    writer: bool
    repairs: int | None
    pins: int
    host_entries: int
    sessions: Mapping[str, int]
    names: Mapping[str, int]
    strangers: int
    denied: Mapping[str, int]
    asked: Mapping[str, int]
    lookups: Mapping[str, int]
    lost: int


def render(metrics: Metrics, now: Now) -> str:
    """Return the body of ``GET /metrics``."""
    page = _Page()
    page.gauge("corral_build_info", "The version of the service, as a label.", {"version": now.version}, 1)
    page.gauge("corral_docker_up", "Whether Docker's events are being followed.", {}, int(now.docker))
    page.gauge("corral_writer_up", "Whether the netfilter writer answers.", {}, int(now.writer))
    page.gauge("corral_pins", "Elements that let a session reach an address.", {}, now.pins)
    page.gauge("corral_host_entries", "Elements for services of this host.", {}, now.host_entries)
    page.gauge("corral_strangers", "Containers that reach into a sandbox's network.", {}, now.strangers)
    page.family("corral_sessions", "gauge", "Sessions by state.", "state", now.sessions)
    page.family("corral_names", "gauge", "Names of all policies by state.", "state", now.names)
    page.family(
        "corral_refreshes_total", "counter", "Names asked for, by result.", "result", metrics.refreshes
    )
    page.family(
        "corral_dials_total", "counter", "Lines that proxies sent, by result.", "result", metrics.dials
    )
    if now.repairs is not None:
        page.counter("corral_repairs_total", "Times that the writer mended the rules.", now.repairs)
    page.family(
        "corral_drift_total", "counter", "Differences found in the kernel, by part.", "part", metrics.drift
    )
    page.timing("corral_reconcile_seconds", "Full passes over what Docker reports.", metrics.reconcile)
    page.timing("corral_apply_seconds", "Writing the desired state and reading it back.", metrics.apply)
    page.counter("corral_docker_reconnects_total", "Times that Docker was found again.", metrics.reconnects)
    page.counter(
        "corral_writer_errors_total", "Requests the writer failed or refused.", metrics.writer_errors
    )
    page.family(
        "corral_denied_packets_total",
        "counter",
        "Packets refused, without corral's own checks.",
        "sandbox",
        now.denied,
    )
    page.family(
        "corral_denied_names_total",
        "counter",
        "Names asked for and refused, each time, without corral's own checks.",
        "sandbox",
        now.asked,
    )
    page.family(
        "corral_dead_resolver_questions_total",
        "counter",
        "Datagrams that met no listener inside a sandbox: lookups, nearly all of them.",
        "sandbox",
        now.lookups,
    )
    page.counter("corral_denied_log_lost_total", "Records of refused packets that nobody read.", now.lost)
    return page.text()


class _Page:
    def __init__(self) -> None:
        self._lines: list[str] = []

    def _head(self, name: str, kind: str, text: str) -> None:
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]

    def gauge(self, name: str, text: str, labels: Mapping[str, str], value: float) -> None:
        self._head(name, "gauge", text)
        self._sample(name, labels, value)

    def counter(self, name: str, text: str, value: float) -> None:
        self._head(name, "counter", text)
        self._sample(name, {}, value)

    def family(self, name: str, kind: str, text: str, label: str, values: Mapping[str, float]) -> None:
        self._head(name, kind, text)
        for key in sorted(values):
            self._sample(name, {label: key}, values[key])

    def timing(self, name: str, text: str, timing: Timing) -> None:
        self._head(name, "summary", f"{text} Seconds.")
        self._sample(f"{name}_sum", {}, timing.seconds)
        self._sample(f"{name}_count", {}, timing.count)

    def _sample(self, name: str, labels: Mapping[str, str], value: float) -> None:
        shown = ",".join(f'{key}="{escape(text)}"' for key, text in labels.items())
        self._lines.append(f"{name}{{{shown}}} {value}" if shown else f"{name} {value}")

    def text(self) -> str:
        return "\n".join([*self._lines, ""])


def escape(text: str) -> str:
    """Return a label's value as it stands between quotation marks."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def counted(states: Iterable[str]) -> dict[str, int]:
    """Return how often each state occurs."""
    return dict(Counter(states))
