"""COR-040 to COR-059: the enforcer, the netfilter writer, and the service managers they run in. Pure."""

from __future__ import annotations

from corral.context import check_same
from corral.doctor.model import CannotTell, Found, Severity
from corral.doctor.records import (
    Enforcer,
    EnforcerUnit,
    Linger,
    Manager,
    SandboxUnits,
    Settings,
    SystemUnits,
    Who,
    WriterSocket,
)
from corral.doctor.table import check
from corral.membership import service_fix
from policy.errors import EnforcerError

BROKEN, ADVICE = Severity.BROKEN, Severity.ADVICE
INSTALL = "corral install"
START = "systemctl --user start corral-enforcer"
JOURNAL = "journalctl --user -u corral-enforcer"
STAGED = "Staged in a system test."
SKELETON, SOCKET, WRITER = "corral-skeleton.service", "corral-netfilter.socket", "corral-netfilter.service"


@check(
    "COR-040",
    "your service manager does not answer",
    BROKEN,
    Manager,
    Who,
    probe="systemctl --user, at XDG_RUNTIME_DIR (without one at /run/user/UID).",
    cause="The enforcer and the relays of host services are units of the user's systemd. It runs from "
    "login to "
    "logout, or always for a user who lingers.",
    fix="sudo loginctl enable-linger USER",
    note=STAGED,
)
def no_manager(manager: Manager, who: Who) -> Found | None:
    """See the table."""
    if not manager.error:
        return None
    return Found(manager.error, f"sudo loginctl enable-linger {who.membership.user}")


@check(
    "COR-041",
    "the enforcer is not installed",
    BROKEN,
    EnforcerUnit,
    probe="The unit corral-enforcer.service of your service manager.",
    cause="corral install has not been run by this user, or its unit file is gone.",
    fix=INSTALL,
    note=STAGED,
)
def not_installed(enforcer: EnforcerUnit) -> Found | None:
    """See the table."""
    return None if enforcer.unit.known else Found("there is no unit corral-enforcer.service")


@check(
    "COR-042",
    "the enforcer's unit starts a program that is gone",
    BROKEN,
    EnforcerUnit,
    probe="The paths in the unit's ExecStart.",
    cause="corral was moved, removed, or installed another way since corral install was run.",
    fix=INSTALL,
    note=STAGED,
)
def stale_unit(enforcer: EnforcerUnit) -> Found | None:
    """See the table."""
    gone = enforcer.unit.missing
    return Found(f"corral-enforcer.service starts {', '.join(gone)}, which does not exist") if gone else None


def _explained(enforcer: EnforcerUnit, settings: Settings) -> bool:
    return not enforcer.unit.known or bool(enforcer.unit.missing) or settings.error is not None


@check(
    "COR-043",
    "the enforcer does not run",
    BROKEN,
    EnforcerUnit,
    Settings,
    probe="The state of corral-enforcer.service.",
    cause="It was stopped. Running sandboxes keep what they have for an hour at most; none can be started.",
    fix=START,
    note=STAGED,
)
def not_running(enforcer: EnforcerUnit, settings: Settings) -> Found | None:
    """See the table."""
    unit = enforcer.unit
    if _explained(enforcer, settings) or unit.active in ("active", "activating", "reloading"):
        return None
    return Found(f"corral-enforcer.service is {unit.active} ({unit.sub})")


@check(
    "COR-044",
    "the enforcer ends again and again",
    BROKEN,
    EnforcerUnit,
    Settings,
    probe="The state of corral-enforcer.service: waiting to be started again.",
    cause="It ends by itself soon after its start.",
    fix=f"{JOURNAL} says why",
    note=STAGED,
)
def crash_loop(enforcer: EnforcerUnit, settings: Settings) -> Found | None:
    """See the table."""
    if _explained(enforcer, settings) or enforcer.unit.sub != "auto-restart":
        return None
    return Found("corral-enforcer.service waits to be started again after it ended by itself")


def _failing(system: SystemUnits) -> bool:
    """Whether the writer does not get up; one that was merely stopped is started by its socket."""
    return system.get(WRITER).active in ("failed", "activating")


@check(
    "COR-045",
    "the enforcer runs and does not answer",
    BROKEN,
    EnforcerUnit,
    Enforcer,
    SystemUnits,
    probe="Its `version`, asked at its socket, while its unit is active.",
    cause="It hangs, waits for a netfilter writer that hangs, is still starting, or listens elsewhere "
    "(XDG_RUNTIME_DIR differs).",
    fix=f"systemctl --user restart corral-enforcer; {JOURNAL}",
    note="Staged in a system test.",
)
def silent(enforcer: EnforcerUnit, asked: Enforcer, system: SystemUnits) -> Found | None:
    """See the table; a writer that ends again and again is a check of its own."""
    if enforcer.unit.active != "active" or asked.error is None or _failing(system):
        return None
    return Found(asked.error.message)


@check(
    "COR-046",
    "enforcer.toml is not valid",
    BROKEN,
    Settings,
    probe="~/.config/corral/enforcer.toml, read as the enforcer reads it.",
    cause="The enforcer ends at its start, and is not started again until the file is put right.",
    fix=f"correct the file, then: {START}",
    note=STAGED,
)
def bad_settings(settings: Settings) -> Found | None:
    """See the table."""
    return Found(settings.error.message) if settings.error is not None else None


@check(
    "COR-047",
    "versions differ",
    BROKEN,
    Enforcer,
    probe="The versions of the command line, the enforcer and the netfilter writer, as they tell them.",
    cause="One of the three was upgraded, or was not started anew after an upgrade.",
    fix=INSTALL,
)
def versions(asked: Enforcer) -> Found | None:
    """See the table."""
    if asked.answer is None:
        raise CannotTell("the enforcer does not answer")
    try:
        check_same(asked.answer)
    except EnforcerError as error:
        return Found(error.message, error.hint)
    return None


@check(
    "COR-048",
    "corral's files are a newer version's",
    BROKEN,
    Settings,
    probe="The schema version in ~/.local/share/corral.",
    cause="corral was replaced by an older version, which does not know what the newer one wrote.",
    fix="upgrade corral",
)
def newer_state(settings: Settings) -> Found | None:
    """See the table."""
    return Found(settings.newer.message, settings.newer.hint) if settings.newer is not None else None


@check(
    "COR-049",
    "the netfilter writer is not installed or does not listen",
    BROKEN,
    WriterSocket,
    SystemUnits,
    probe="The socket /run/corral/netfilter.sock, and the unit that makes it.",
    cause="corral install has not been run on this machine, or corral-netfilter.socket was stopped.",
    fix=INSTALL,
    note=STAGED,
)
def no_socket(socket: WriterSocket, system: SystemUnits) -> Found | None:
    """See the table."""
    unit = system.get(SOCKET)
    if socket.exists and unit.active == "active":
        return None
    if system.rootless:
        unit = system.get(WRITER)
        fix = f"systemctl --user restart {WRITER}; journalctl --user -u {WRITER}" if unit.known else INSTALL
        return Found(f"nothing listens at {socket.path}", fix)
    if not unit.known:
        return Found(f"there is no unit {SOCKET}")
    return Found(f"{SOCKET} is {unit.active}", f"sudo systemctl start {SOCKET} {WRITER}")


@check(
    "COR-050",
    "the netfilter writer's socket is closed to you",
    BROKEN,
    WriterSocket,
    Enforcer,
    Who,
    probe="What the enforcer met when it opened the socket; without an enforcer, what this process may do.",
    cause="Members of group docker may use it. A service manager from before joining does not know of it, "
    "nor "
    "does what it started.",
    fix="sudo usermod -aG docker USER; sudo systemctl restart user@UID.service",
    note=STAGED,
)
def closed_socket(socket: WriterSocket, asked: Enforcer, who: Who) -> Found | None:
    """See the table."""
    if not socket.exists:
        return None
    error = str(asked.writer.get("error") or "") if not asked.writer.get("reachable", True) else ""
    if asked.answer is None and not socket.permitted:
        error = f"no permission for {socket.path}"
    if "permission" not in error.lower():
        return None
    return Found(error, service_fix(who.membership, error))


@check(
    "COR-051",
    "the netfilter writer does not answer",
    BROKEN,
    WriterSocket,
    SystemUnits,
    Enforcer,
    probe="The state of corral-netfilter.service, and what the enforcer met when it asked the writer.",
    cause="It ends at its start, or hangs. The rules it loaded stand; nothing new is granted.",
    fix=f"sudo systemctl restart {WRITER}; journalctl -u {WRITER} says why",
    note=STAGED,
)
def silent_writer(socket: WriterSocket, system: SystemUnits, asked: Enforcer) -> Found | None:
    """See the table."""
    unit, own = system.get(WRITER), system.rootless
    fix = f"systemctl --user restart {WRITER}; journalctl --user -u {WRITER} says why" if own else None
    if not socket.exists or unit.missing or system.get(SOCKET).active != "active":
        return None
    if asked.writer.get("reachable", asked.answer is not None):
        return None
    if _failing(system):
        return Found(f"{WRITER} is {unit.active} ({unit.sub})", fix)
    if asked.answer is None:
        return None
    error = str(asked.writer.get("error") or "no reason was told")
    return None if "permission" in error.lower() else Found(error, fix)


@check(
    "COR-052",
    "corral's rules are not loaded at boot",
    BROKEN,
    SystemUnits,
    probe="Whether corral-skeleton.service, corral-netfilter.socket and corral-netfilter.service are "
    "enabled.",
    cause="After the next boot Docker could start a container of a sandbox before there is a rule.",
    fix=f"sudo systemctl enable {SKELETON} {SOCKET} {WRITER}",
    note=STAGED,
)
def not_at_boot(system: SystemUnits) -> Found | None:
    """See the table."""
    off = [
        f"{name} is {unit.enabled}" for name, unit in system.units.items() if _off(unit.known, unit.enabled)
    ]
    fix = f"systemctl --user enable {WRITER}" if system.rootless else None
    return Found(", ".join(off), fix) if off else None


def _off(known: bool, enabled: str) -> bool:
    return known and enabled not in ("enabled", "enabled-runtime", "static", "generated")


@check(
    "COR-053",
    "a unit of the system starts a program that is gone",
    BROKEN,
    SystemUnits,
    probe="The paths in ExecStart of corral's system units.",
    cause="The writer's directory below /opt/corral was removed, or the system's Python.",
    fix=INSTALL,
    note=STAGED,
)
def stale_system_unit(system: SystemUnits) -> Found | None:
    """See the table."""
    gone = [f"{name} starts {path}" for name, unit in system.units.items() for path in unit.missing]
    return Found(f"{'; '.join(gone)}, which does not exist") if gone else None


@check(
    "COR-054",
    "sandboxes end when you log out",
    ADVICE,
    Linger,
    Who,
    probe="/var/lib/systemd/linger.",
    cause="Your service manager, and with it the enforcer, ends with your last login. What a running sandbox "
    "may reach decays within an hour.",
    fix="sudo loginctl enable-linger USER",
    note=STAGED,
)
def no_linger(linger: Linger, who: Who) -> Found | None:
    """See the table."""
    user = who.membership.user
    return None if linger.on else Found(f"{user} does not linger", f"sudo loginctl enable-linger {user}")


@check(
    "COR-055",
    "an agent that is always on does not come up",
    BROKEN,
    SandboxUnits,
    EnforcerUnit,
    probe="The units corral-sandbox-*.service of your service manager, and the paths in their ExecStart.",
    cause="Its policy is invalid or not approved any more (then it is not tried again), its directory or "
    "corral was moved, or its agent ends at once.",
    fix="journalctl --user -u UNIT; then, in its directory: corral up, or corral disable",
    note=STAGED,
)
def daemon_down(sandboxes: SandboxUnits, enforcer: EnforcerUnit) -> Found | None:
    """See the table."""
    if enforcer.unit.active != "active":
        return None
    lines = []
    for name, unit in sandboxes.units.items():
        if unit.missing:
            lines.append(f"{name} starts {', '.join(unit.missing)}, which does not exist")
        elif unit.active == "failed" or unit.sub == "auto-restart":
            lines.append(f"{name} is {unit.active} ({unit.sub})")
    if not lines:
        return None
    journal = f"journalctl --user -u {lines[0].partition(' ')[0]}"
    return Found("; ".join(lines), f"{journal}; in its directory: corral up, or corral disable")
