"""What the probes find: one record a probe. Rules get nothing else. The engine's is ``hostcheck.Facts``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from typing import Any

from corral.membership import Membership
from policy.errors import CorralError, EnforcerError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Who:
    """Who runs this program."""

    membership: Membership


@dataclass(frozen=True)
class Manager:
    """The user's service manager: ``error`` is why it does not answer, ``docker_host`` what it passes on."""

    error: str = ""
    docker_host: str = ""


@dataclass(frozen=True)
class Unit:
    """A unit as systemd sees it. ``missing`` are the paths of its command line that do not exist."""

    load: str = "loaded"
    active: str = "active"
    sub: str = "running"
    enabled: str = "enabled"
    missing: tuple[str, ...] = ()

    @property
    def known(self) -> bool:
        """Whether there is such a unit."""
        return self.load != "not-found"


@dataclass(frozen=True)
class EnforcerUnit:
    """The enforcer's unit of the user."""

    unit: Unit


@dataclass(frozen=True)
class SandboxUnits:
    """The units of the user's sandboxes that are always on, by name."""

    units: Mapping[str, Unit] = field(default_factory=dict)


@dataclass(frozen=True)
class SystemUnits:
    """The units of the system, by name; the user's own, as far as there are any, where the engine is too."""

    units: Mapping[str, Unit]
    rootless: bool = False

    def get(self, name: str) -> Unit:
        """Return a unit; for an engine of the user's own, one that is not needed there is well."""
        return self.units.get(name, Unit()) if self.rootless else self.units[name]


@dataclass(frozen=True)
class Enforcer:
    """What the enforcer says to ``version``, or why it says nothing."""

    answer: Row | None = None
    error: EnforcerError | None = None

    @property
    def writer(self) -> Row:
        """What it says about the writer; CannotTell is the caller's matter when there is no answer."""
        found = (self.answer or {}).get("writer")
        return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True)
class WriterSocket:
    """The writer's socket."""

    path: str
    exists: bool = True
    permitted: bool = True


@dataclass(frozen=True)
class Skeleton:
    """The problems the writer found in the kernel's rules now, as text, and the driver it uses."""

    problems: tuple[str, ...] = ()
    driver: str = ""


@dataclass(frozen=True)
class Sysctls:
    """Kernel settings; None where the kernel has no such file."""

    ip_forward: int | None = 1
    bridge4: int | None = 1
    bridge6: int | None = 1
    ipv6_off: int | None = 0
    user_namespaces: int | None = 1


@dataclass(frozen=True)
class Tables:
    """What ``iptables`` is: ``legacy``, ``nf_tables`` or empty (not installed, or too old to say)."""

    variant: str = "nf_tables"


@dataclass(frozen=True)
class Programs:
    """Programs that are missing, with the package of each."""

    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Linger:
    """Whether the user's services outlive the login."""

    on: bool = True


@dataclass(frozen=True)
class Firewalls:
    """Other programs that keep rules, and are active."""

    active: tuple[str, ...] = ()


@dataclass(frozen=True)
class Routing:
    """Addresses and routes of this host.

    ``bridges`` are corral's own; ``lookups`` what the kernel says for an address of each. ``rules`` and
    ``routes`` are rows of ``ip -j rule`` and ``ip -j -4 route show table all``. ``outside`` is whether there
    is a route to an address that belongs to nobody.
    """

    bridges: Mapping[str, IPv4Network] = field(default_factory=dict)
    lookups: Mapping[str, Row] = field(default_factory=dict)
    rules: tuple[Row, ...] = ()
    routes: tuple[Row, ...] = ()
    outside: bool = True


@dataclass(frozen=True)
class Settings:
    """The service's configuration: why it is invalid, and where subnets come from.

    ``newer`` is why corral's files cannot be used: a newer version wrote them.
    """

    error: CorralError | None = None
    newer: CorralError | None = None
    ranges: tuple[IPv4Network, ...] = ()


@dataclass(frozen=True)
class Resolvers:
    """Name servers the enforcer asks, each with why it is of no use (empty: it answers)."""

    answers: Mapping[str, str]


@dataclass(frozen=True)
class Modules:
    """Kernel modules by state: loaded, built-in, loadable, absent, unknown.

    ``release`` is the running kernel's, ``gone`` whether its modules are not on the disk, but another's are.
    """

    states: Mapping[str, str]
    release: str = ""
    gone: bool = False


@dataclass(frozen=True)
class Disk:
    """Room below a path: bytes and inodes that the user may still use."""

    path: str
    free: int
    inodes: int


@dataclass(frozen=True)
class Disks:
    """Room where corral and Docker write."""

    disks: tuple[Disk, ...]


@dataclass(frozen=True)
class Security:
    """Security modules of the kernel: ``selinux`` is enforcing, permissive or empty."""

    selinux: str = ""
    apparmor: bool = False
