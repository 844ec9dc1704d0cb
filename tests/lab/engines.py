"""The engines a lab can have: which Debian brings which, and what its box needs. Facts only."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .execute import LabError

VARIABLE = "CORRAL_LAB_ENGINE"

_COMMON = (
    "bash-completion",
    "ca-certificates",
    "conntrack",
    "curl",
    "dbus",
    "dbus-user-session",
    "docker.io",
    "git",
    "ipset",
    "iproute2",
    "iptables",
    "iputils-ping",
    "jq",
    "libpam-systemd",
    "make",
    "nftables",
    "openssl",
    "pipx",
    "procps",
    "python3",
    "python3-venv",
    "rootlesskit",
    "slirp4netns",
    "sudo",
    "systemd",
    "systemd-resolved",
    "systemd-sysv",
    "tmux",
    "uidmap",
)

_NEWER = ("docker-buildx", "docker-cli", "docker-compose")


@dataclass(frozen=True)
class Engine:
    """A Debian suite and the engine it has. The suite's name is the engine's name, but for variants."""

    name: str
    version: str | None
    """What the engine's version begins with; None for a suite that moves on."""
    extra: tuple[str, ...] = ()
    """Packages beside the common ones: the suites cut the engine differently."""
    cgroup1: bool = False
    """Whether its systemd is to run with controllers of cgroup 1 where the machine has them there."""
    own_boot_id: bool = True
    """False where systemd tells processes of other boots by a boot id that it reads from a fresh /proc."""
    released: bool = True
    """Whether it has an archive of updates and one of security fixes."""
    base: str = ""
    """The Debian suite, where that is not the name: then only tests that name this engine run on it."""
    rules: str = ""
    """Where the engine keeps its rules, if not in nft's iptables: legacy, or none (``iptables: false``)."""
    rootless: bool = False
    """Whether its engine is the user's own."""

    @property
    def suite(self) -> str:
        """The Debian suite of the box."""
        return self.base or self.name

    @property
    def packages(self) -> tuple[str, ...]:
        """Debian packages of the box, beside minbase."""
        return tuple(sorted({*_COMMON, *self.extra}))


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("bookworm", "20.10.24", cgroup1=True),
        Engine(
            "bookworm-legacy",
            "20.10.24",
            extra=("gcc", "libc6-dev", "python3-dev"),
            cgroup1=True,
            base="bookworm",
            rules="legacy",
        ),
        Engine("trixie-own", "26.1.5", extra=_NEWER, base="trixie", rules="none"),
        Engine("rootless", "26.1.5", extra=_NEWER, base="trixie", rootless=True),
        Engine("trixie", "26.1.5", extra=_NEWER),
        Engine("sid", None, extra=_NEWER, own_boot_id=False, released=False),
    )
}
DEFAULT = "trixie"


def chosen(name: str | None = None, environ: Mapping[str, str] = os.environ) -> Engine:
    """The engine of that name, else the one the environment names, else the default. Raises LabError."""
    name = name or environ.get(VARIABLE) or DEFAULT
    try:
        return ENGINES[name]
    except KeyError:
        raise LabError(f"no lab has the engine {name!r}", f"one of {', '.join(ENGINES)}") from None


def why_not(engine: Engine, names: Sequence[str], reason: str) -> str | None:
    """Why a test that is for the named engines does not run on this one; None when it does.

    Raises LabError for an unknown engine and for a restriction nobody gave a reason for.
    """
    for name in names:
        chosen(name)
    if not names or not reason:
        raise LabError(
            "a test is kept from engines without saying which, or why", 'engine("sid", reason="…")'
        )
    return None if engine.name in names else f"not on {engine.name}, but on {', '.join(names)}: {reason}"


def why_not_unmarked(engine: Engine) -> str | None:
    """Return why a test that names no engine does not run on this one; None when it does."""
    if engine.rootless:
        return "about the system's engine; see test_rootless*.py"
    return f"{engine.name} is for the tests that name it" if engine.base else None
