"""Which engines corral can fence, decided from facts. Pure; ``corral.hostfacts`` collects the facts.

The rules live in the network namespace in which the netfilter writer works. An engine whose bridges are not
in there (a virtual machine, another host, a namespace of its own) would run sandboxes that no rule ever sees.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from policy.errors import EngineError
from policy.records import dataclass

DEFAULT_SOCKET = "unix:///var/run/docker.sock"
DEFAULT_CONTEXT = "default"
OWN_ENGINE = "rootless"
OLDEST_ENGINE = (20, 10)
SNAP_ROOT = "/var/snap/docker/"
INSTALL_ENGINE = (
    "install Docker Engine itself (Debian and Ubuntu: sudo apt install docker.io), then: corral install"
)
USE_DEFAULT = "docker context use default"
IN_A_MACHINE = ": its engine runs in a virtual machine, where corral's rules are not"
# Where programs that keep the engine elsewhere put their sockets.
_DESKTOP = re.compile(r"/\.docker/desktop/|/docker-desktop/")
_MACHINE = re.compile(r"/\.(colima|lima|rd|orbstack)/")
_ROOTLESS = re.compile(r"/run/user/\d+/docker\.sock")
_VERSION = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True)
class Refusal:
    """One reason why an engine cannot be used. ``key`` names the reason, for programs."""

    key: str
    message: str
    hint: str

    def error(self) -> EngineError:
        """Return it as an error."""
        return EngineError(self.message, self.hint)


@dataclass(frozen=True)
class Choice:
    """The engine that the ``docker`` command would talk to, and the socket that corral uses.

    ``by`` is ``DOCKER_HOST``, ``DOCKER_CONTEXT``, ``context`` (the current one) or ``default``; ``address``
    is None when the context does not exist. ``path`` and ``own`` are the two sockets with symbolic links
    followed; ``path`` is empty when the address is no unix socket. ``rootless`` says that it is the socket of
    the engine that this user runs; ``by`` is ``rootless`` when that was taken because the system's is closed.
    """

    address: str | None
    by: str = DEFAULT_CONTEXT
    context: str = DEFAULT_CONTEXT
    path: str = ""
    own: str = ""
    rootless: bool = False

    @property
    def named(self) -> str:
        """How the user named it."""
        if self.by == "DOCKER_HOST":
            return "DOCKER_HOST"
        if self.by == DEFAULT_CONTEXT:
            return DEFAULT_SOCKET.removeprefix("unix://")
        if self.by == OWN_ENGINE:
            return f"your own engine's socket {self.path}"
        return f"the docker context {self.context}"

    @property
    def undo(self) -> str:
        """What makes the default engine of this machine the chosen one."""
        if self.by == "context":
            return USE_DEFAULT
        return f"unset {self.by}" if self.by not in (DEFAULT_CONTEXT, OWN_ENGINE) else ""


@dataclass(frozen=True)
class Facts:
    """What was found out about an engine. None means that it could not be found out.

    ``trouble`` is why it does not answer (then the rest is unknown). ``owner`` is the uid that listens on
    the socket. ``bridges`` are names of the bridges that the engine says it made, ``missing`` those of them
    that do not exist where the writer works; ``proven`` is whether one exists there that cannot be there by
    chance. ``listening`` tells whether somebody listens on the socket in that namespace. ``no_iptables``
    names the file or command line that switches Docker's rules off. ``controllers_missing`` are the cgroup
    controllers without which Docker discards limits. ``unguarded`` is why a container of the user's own
    engine may have run before corral's rules; empty when none can.
    """

    choice: Choice
    docker: bool = True
    podman: bool = False
    trouble: EngineError | None = None
    version: str = ""
    system: str = ""
    root: str = ""
    security: tuple[str, ...] = ()
    firewall: str = ""
    components: tuple[str, ...] = ()
    owner: int | None = None
    bridges: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    proven: bool = False
    listening: bool | None = None
    no_iptables: str = ""
    controllers_missing: tuple[str, ...] = ()
    unguarded: str = ""


def choose(environ: Mapping[str, str], current: str, endpoints: Mapping[str, str]) -> tuple[str, str, str]:
    """Return (how, context, address) as the docker command decides it; no address: no such context.

    Args:
        environ: the user's environment.
        current: the context that config.json names, empty when it names none.
        endpoints: address by context, of the contexts that exist.
    """
    host = environ.get("DOCKER_HOST", "").strip()
    if host:
        return "DOCKER_HOST", DEFAULT_CONTEXT, host
    by = "DOCKER_CONTEXT" if environ.get("DOCKER_CONTEXT") else "context"
    name = environ.get("DOCKER_CONTEXT") or current or DEFAULT_CONTEXT
    if name == DEFAULT_CONTEXT:
        return DEFAULT_CONTEXT, name, DEFAULT_SOCKET
    return by, name, endpoints.get(name, "")


def judge_choice(choice: Choice) -> list[Refusal]:
    """Return why the chosen engine cannot be used, as far as its name tells. Cheap."""
    if choice.address is None:
        return [
            Refusal("context", f"{choice.named} does not exist, so docker itself has no engine", choice.undo)
        ]
    if not choice.address.startswith("unix:///"):
        key = "remote" if choice.by == "DOCKER_HOST" else "context"
        what = f"{choice.named} names an engine elsewhere ({_shown(choice.address)})"
        return [Refusal(key, f"{what}; corral can enforce its rules on this machine only", choice.undo)]
    known = _known_path(choice)
    if known is not None:
        return [known]
    if choice.path != choice.own and not choice.rootless:
        what = f"{choice.named} names the engine at {choice.address}, but corral and its service use"
        return [Refusal("context", f"{what} the one at {DEFAULT_SOCKET}", choice.undo)]
    return []


def _shown(address: str) -> str:
    """A user name or password in an address is nobody's business."""
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if rest else address


def _known_path(choice: Choice) -> Refusal | None:
    fix = f"{INSTALL_ENGINE}; {choice.undo}" if choice.undo else INSTALL_ENGINE
    if _DESKTOP.search(choice.path):
        return _desktop(choice, fix)
    machine = _MACHINE.search(choice.path)
    if machine:
        name = {"rd": "Rancher Desktop", "orbstack": "OrbStack"}.get(machine[1], machine[1].capitalize())
        return Refusal(
            "machine",
            f"{choice.named} leads to {name}{IN_A_MACHINE}",
            fix,
        )
    if "podman" in choice.path:
        return _podman(choice)
    if _ROOTLESS.fullmatch(choice.path) and not choice.rootless:
        return _rootless(choice)
    return None


def _desktop(choice: Choice, fix: str) -> Refusal:
    return Refusal(
        "desktop",
        f"{choice.named} leads to Docker Desktop{IN_A_MACHINE}",
        fix,
    )


def _podman(choice: Choice) -> Refusal:
    return Refusal("podman", f"{choice.named} leads to podman, which is not supported yet", INSTALL_ENGINE)


def _rootless(choice: Choice) -> Refusal:
    """A rootless engine that is not this user's own at its usual place cannot be entered."""
    return Refusal(
        "rootless",
        f"{choice.named} leads to a rootless engine that is not your own at $XDG_RUNTIME_DIR/docker.sock; "
        "its bridges are in a network namespace that corral does not know",
        "use your own one (dockerd-rootless-setuptool.sh install) or the system's; "
        f"{choice.undo or USE_DEFAULT}",
    )


def _not_rootless(choice: Choice) -> Refusal:
    return Refusal(
        "rootless",
        f"{choice.named} should lead to your own rootless engine, and the engine says that it is none",
        f"look at: systemctl --user status docker; {choice.undo or USE_DEFAULT}",
    )


def judge(facts: Facts) -> list[Refusal]:
    """Return every reason why this engine cannot be used, the most telling first; nothing: it can."""
    by_name = judge_choice(facts.choice)
    if by_name:
        return by_name
    if facts.trouble is not None:
        return [_no_answer(facts, facts.trouble)]
    elsewhere = _elsewhere(facts)
    if elsewhere:
        return elsewhere
    return _settings(facts)


def _no_answer(facts: Facts, trouble: EngineError) -> Refusal:
    absent = not facts.docker
    if absent and facts.podman:
        return Refusal(
            "podman", "podman is installed and Docker is not; podman is not supported yet", INSTALL_ENGINE
        )
    if absent:
        return Refusal("absent", "Docker Engine is not installed", INSTALL_ENGINE)
    key = "denied" if "permission denied" in trouble.message.lower() else "silent"
    return Refusal(key, trouble.message, trouble.hint or "systemctl status docker")


def _elsewhere(facts: Facts) -> list[Refusal]:
    """What the engine calls itself comes first; where its bridges are decides for those without a name."""
    choice = facts.choice
    if any(name.lower().startswith("podman") for name in facts.components):
        return [_podman(choice)]
    if facts.system == "Docker Desktop":
        return [_desktop(choice, INSTALL_ENGINE)]
    if ("rootless" in facts.security) != choice.rootless:
        return [_not_rootless(choice) if choice.rootless else _rootless(choice)]
    evidence = _evidence(facts)
    return [_foreign(choice, evidence)] if evidence else []


def _evidence(facts: Facts) -> str:
    if facts.missing:
        shown = ", ".join(facts.missing[:3])
        return f"it made the bridge {shown}, and there is no such interface on this machine"
    if facts.proven:
        return ""
    if facts.owner:
        return f"its socket is served by a program of uid {facts.owner}, not by the system"
    return "nobody in this machine's network namespace listens on it" if facts.listening is False else ""


def _foreign(choice: Choice, evidence: str) -> Refusal:
    fix = "use the engine of this machine (sudo systemctl enable --now docker)"
    return Refusal(
        "elsewhere",
        f"{choice.named} leads to an engine in a virtual machine or another network namespace (as with "
        f"Docker Desktop, Colima and Lima), where corral's rules are not: {evidence}",
        f"{fix}; {choice.undo}" if choice.undo else f"{fix} or {INSTALL_ENGINE}",
    )


def _settings(facts: Facts) -> list[Refusal]:
    found = []
    if facts.root.startswith(SNAP_ROOT):
        found.append(
            Refusal(
                "snap",
                "Docker is the snap, and its confinement hides directories that a policy may mount "
                f"(its data are at {facts.root})",
                f"sudo snap remove docker, then {INSTALL_ENGINE}",
            )
        )
    if "userns" in facts.security:
        found.append(
            Refusal(
                "userns",
                "Docker maps users (userns-remap), which is not supported: the agent would run as a user who "
                "does not own the project",
                "remove userns-remap from /etc/docker/daemon.json (or dockerd's command line); "
                "sudo systemctl restart docker",
            )
        )
    version = parse_version(facts.version)
    if version is not None and version < OLDEST_ENGINE:
        oldest = ".".join(map(str, OLDEST_ENGINE))
        found.append(
            Refusal(
                "old",
                f"Docker Engine is {facts.version}, and {oldest} is the oldest that corral supports",
                "upgrade Docker Engine",
            )
        )
    if facts.choice.rootless:
        found += _own_engine_without_rules(facts)
    return found


def _own_engine_without_rules(facts: Facts) -> list[Refusal]:
    """The writer that joins a rootless engine decides where that one's iptables rules are."""
    found = []
    if facts.firewall.startswith("nftables"):
        found.append(
            Refusal(
                "nftables",
                "a rootless Docker with its nftables backend has no chain DOCKER-USER; not supported",
                f'remove "firewall-backend" from its daemon.json; {restart(facts.choice)}',
            )
        )
    if facts.no_iptables:
        found.append(
            Refusal(
                "iptables-off",
                f"a rootless Docker that writes no rules (iptables is false in {facts.no_iptables}) is not "
                "supported",
                f"remove it from {facts.no_iptables}; {restart(facts.choice)}",
            )
        )
    return found


def restart(choice: Choice) -> str:
    """Return how the engine is started anew."""
    return f"{'systemctl --user' if choice.rootless else 'sudo systemctl'} restart docker"


def parse_version(text: str) -> tuple[int, int] | None:
    """Return the first two numbers of an engine's version; None for a build that has none."""
    match = _VERSION.match(text)
    return (int(match[1]), int(match[2])) if match else None


def require(refusals: Sequence[Refusal]) -> None:
    """Raise what was refused as one error.

    Raises:
        EngineError: when there is any; all reasons, and the first fix (the others follow from running again).
    """
    if not refusals:
        return
    if len(refusals) == 1:
        raise refusals[0].error()
    raise EngineError(
        "this engine cannot be used:\n" + "\n".join(f"  {refusal.message}" for refusal in refusals),
        "; ".join(refusal.hint for refusal in refusals),
    )
