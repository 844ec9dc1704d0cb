"""Sandboxes that are always on, as units of the user's systemd, which run ``corral up --foreground``."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral import process
from corral.install import USER_UNIT, write_unit
from corral.membership import membership
from corral.relay import NO_MANAGER, environment, properties
from corral.session import User
from corral.unitwords import directory, executable, quoted
from corral.user import user_units
from policy.errors import CorralError
from policy.identity import Sandbox
from policy.loader import LoadedPolicy
from policy.mounts import is_within

PREFIX = "corral-sandbox-"
UNIT = re.compile(rf"{PREFIX}[0-9a-f]{{8}}\.service")
# The first systemd whose pauses between restarts can grow.
GROWING = 254
FIRST, STEPS, LONGEST = 1, 8, 300
# Where they cannot: seconds between two.
FIXED = 15
# What a command of the user's has, and a unit has only when it is told.
KEPT = (
    "PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "DOCKER_HOST",
    "DOCKER_CONTEXT",
    "DOCKER_CONFIG",
    "CORRAL_SANDBOX_IMAGE",
)
LINGER = Path("/var/lib/systemd/linger")
# For a build of the image, and what a busy machine makes of it.
START_TIMEOUT = "30min"


@dataclass(frozen=True)
class State:
    """One unit, as systemd knows it: ``active`` and ``sub`` state, ``enabled``: started at boot."""

    unit: str
    known: bool = False
    enabled: bool = False
    active: str = "inactive"
    sub: str = "dead"

    def body(self) -> dict[str, object]:
        """Return it for programs."""
        return {"unit": self.unit, "enabled": self.enabled, "active": self.active, "sub": self.sub}


def unit_of(sandbox: Sandbox) -> str:
    """Return the name of a sandbox's unit."""
    return f"{PREFIX}{sandbox.token}.service"


def trusted(search: str, writable: Sequence[Path]) -> str:
    """Return a PATH without what an agent could put a program into: what it writes, and relative places.

    A unit keeps it for good, and what it finds there runs on the host.
    """
    places = [place for place in search.split(os.pathsep) if place.startswith("/")]
    return os.pathsep.join(
        place
        for place in dict.fromkeys(places)
        if not any(
            is_within(real, str(path)) for path in writable for real in (place, os.path.realpath(place))
        )
    )


def text(
    loaded: LoadedPolicy,
    program: str,
    environ: Mapping[str, str],
    systemd: int,
    writable: Sequence[Path] = (),
) -> str:
    """Return the unit file.

    Args:
        loaded: the policy; the unit reads it anew each time.
        program: absolute path of corral.
        environ: the user's environment.
        systemd: its version.
        writable: directories that the agent can write.

    Raises:
        CorralError: a path has a character that a unit cannot say.
    """
    environ = {**environ, "PATH": trusted(environ.get("PATH", ""), writable)}
    pause = [f"RestartSec={FIRST}", f"RestartSteps={STEPS}", f"RestartMaxDelaySec={LONGEST}"]
    lines = [
        "# Written by corral enable. corral disable takes it away.",
        "[Unit]",
        f"Description=corral: sandbox {loaded.sandbox.id}",
        "Documentation=man:corral(1)",
        f"Wants={USER_UNIT}",
        f"After={USER_UNIT}",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=notify",
        f"WorkingDirectory={directory(loaded.project)}",
        f"ExecStart={executable(program)} up --foreground",
        *(f"Environment={quoted(f'{name}={environ[name]}')}" for name in KEPT if environ.get(name)),
        "Restart=always",
        *(pause if systemd >= GROWING else [f"RestartSec={FIXED}"]),
        "# A policy that is invalid or that nobody approved does not become so by trying again.",
        "RestartPreventExitStatus=2",
        "SuccessExitStatus=143",
        f"TimeoutStartSec={START_TIMEOUT}",
        "TimeoutStopSec=60",
        "KillMode=mixed",
        "UMask=0077",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def program(environ: Mapping[str, str], writable: Sequence[Path]) -> str:
    """Return the absolute path of corral, by PATH: the one that stays when corral is upgraded.

    Args:
        environ: the user's.
        writable: directories that the agent can write.

    Raises:
        CorralError: there is none, or the agent could replace it.
    """
    directories = [part for part in environ.get("PATH", "").split(os.pathsep) if part.startswith("/")]
    found = shutil.which("corral", path=os.pathsep.join(directories)) if directories else None
    if found is None:
        raise CorralError(
            "corral is not on your PATH, and a unit needs a path that stays",
            "pipx install puts it into ~/.local/bin: pipx ensurepath, then a new login, then corral enable",
        )
    for place in (found, os.path.realpath(found)):
        inside = next((str(path) for path in writable if is_within(place, str(path))), None)
        if inside is not None:
            raise CorralError(
                f"{place} lies in {inside}, where the agent could replace it", "install corral elsewhere"
            )
    return found


def lingers(uid: int, directory: Path = LINGER) -> bool:
    """Say whether a user's services run without a login."""
    return (directory / membership(uid).user).exists()


def linger_fix(uid: int) -> str:
    """Return how they are made to."""
    return f"sudo loginctl enable-linger {membership(uid).user}"


def require_linger(uid: int, directory: Path = LINGER) -> None:
    """Refuse what would outlive the service that keeps it fenced.

    Raises:
        CorralError: the user does not linger.
    """
    if not lingers(uid, directory):
        raise CorralError(
            "your services end when you log out, the enforcer too, and an agent that is always on would not",
            f"{linger_fix(uid)}; without it: corral up --foreground, which ends with the login",
        )


class Manager:
    """The units of one user."""

    def __init__(self, user: User) -> None:
        self._user = user
        self._environ = environment(user.environ, user.uid)
        self.directory = user_units(user.home, user.environ)

    def _systemctl(self, *words: str, check: bool = True, timeout: float = 60) -> process.Completed:
        argv = ("systemctl", "--user", *words)
        return process.run(argv, environ=self._environ, check=check, timeout=timeout, hint=NO_MANAGER)

    def file(self, sandbox: Sandbox) -> Path:
        """Return where a sandbox's unit file is."""
        return self.directory / unit_of(sandbox)

    def version(self) -> int:
        """Return systemd's version, 0 when it does not say."""
        match = re.match(r"systemd (\d+)", self._systemctl("--version").stdout)
        return int(match[1]) if match else 0

    def state(self, sandbox: Sandbox) -> State:
        """Ask for a unit; without a file there is none."""
        unit = unit_of(sandbox)
        if not self.file(sandbox).exists():
            return State(unit)
        shown = properties(
            self._systemctl("show", "-p", "ActiveState,SubState,UnitFileState", unit, check=False).stdout
        )
        return State(
            unit,
            known=True,
            enabled=shown.get("UnitFileState") == "enabled",
            active=shown.get("ActiveState", "unknown"),
            sub=shown.get("SubState", "unknown"),
        )

    def enabled(self, sandbox: Sandbox) -> bool:
        """Say whether a sandbox has a unit that starts at boot."""
        return self.state(sandbox).enabled

    def write(self, sandbox: Sandbox, content: str) -> None:
        """Write a unit file and have it started at boot.

        Raises:
            CorralError: the disk or systemd refuses; a file that was not there before is not there after.
        """
        file = self.file(sandbox)
        new = not file.exists()
        write_unit(file, content)
        try:
            self._systemctl("daemon-reload")
            self._systemctl("enable", unit_of(sandbox))
        except CorralError:
            if new:
                file.unlink(missing_ok=True)
            raise

    def start(self, sandbox: Sandbox) -> None:
        """Start a unit, and wait until its agent is up.

        Raises:
            CorralError: it is not; systemd goes on trying, unless the policy is what is wrong.
        """
        unit = unit_of(sandbox)
        self._systemctl("reset-failed", unit, check=False)
        try:
            self._systemctl("start", unit, timeout=2000)
        except process.ProgramError as error:
            raise CorralError(
                f"{unit} did not start: {error.message}",
                f"journalctl --user -u {unit}; systemd goes on trying, unless the policy is what is wrong",
            ) from error

    def stop(self, sandbox: Sandbox) -> bool:
        """Stop a unit and its agent; return whether there was anything to stop. It starts again at boot."""
        if self.state(sandbox).active in {"inactive", "unknown"}:
            return False
        self._systemctl("stop", unit_of(sandbox), timeout=120)
        return True

    def disable(self, sandbox: Sandbox) -> bool:
        """Have a unit not started at boot any more; return whether there is one. What runs goes on.

        Raises:
            CorralError: systemd refuses.
        """
        found = self.state(sandbox)
        if not found.known:
            return False
        self._systemctl("disable", unit_of(sandbox))
        self.tidy(sandbox)
        return True

    def tidy(self, sandbox: Sandbox) -> None:
        """Remove the file of a unit that is neither enabled nor running."""
        found = self.state(sandbox)
        if found.known and not found.enabled and found.active in {"inactive", "failed"}:
            self.file(sandbox).unlink(missing_ok=True)
            self._systemctl("daemon-reload")
            self._systemctl("reset-failed", found.unit, check=False)
