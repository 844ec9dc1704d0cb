"""COR-001 to COR-019: who runs corral, and the engine it would use. Pure."""

from __future__ import annotations

import os.path

from corral import hostcheck
from corral.doctor.model import Check, Found, Severity
from corral.doctor.records import Manager, Who
from corral.doctor.table import TABLE, check
from corral.hostcheck import DEFAULT_SOCKET, Facts

BROKEN, ADVICE = Severity.BROKEN, Severity.ADVICE
STAGED = "Staged with a real engine in a system test."
BY_FACTS = "Tested on recorded facts only."


@check(
    "COR-001",
    "corral is run by root",
    BROKEN,
    Who,
    probe="The user of this process.",
    cause="Agents run as the user who calls corral, and never as root. What belongs to a user (the enforcer, "
    "its service manager) cannot be looked at as root either.",
    fix="run corral as an ordinary user who is a member of group docker",
)
def root(who: Who) -> Found | None:
    """See the table."""
    return Found("this is root") if who.membership.uid == 0 else None


# id, key of hostcheck.Refusal, title, probe, cause, fix, note
_REFUSALS = (
    (
        "COR-002",
        "absent",
        "Docker Engine is not installed",
        "Programs on PATH, and the engine's socket.",
        "corral runs sandboxes in Docker Engine.",
        hostcheck.INSTALL_ENGINE,
        "",
    ),
    (
        "COR-003",
        "silent",
        "Docker does not answer",
        "`info`, `version` and the list of networks, asked at the engine's socket.",
        "The engine does not run, or something else answers at its socket.",
        "sudo systemctl start docker; journalctl -u docker says why it ended",
        STAGED,
    ),
    (
        "COR-004",
        "denied",
        "you may not use Docker",
        "Opening the engine's socket.",
        "Only root and members of group docker may open it; a login from before joining does not know of it.",
        "sudo usermod -aG docker USER, then log out everywhere and in again",
        STAGED,
    ),
    (
        "COR-005",
        "remote",
        "DOCKER_HOST names an engine elsewhere",
        "The variable DOCKER_HOST.",
        "The rules of a sandbox are made true in this machine's kernel. Over tcp:// or ssh:// containers "
        "would run where they are not.",
        "unset DOCKER_HOST",
        STAGED,
    ),
    (
        "COR-006",
        "context",
        "the docker context names another engine",
        "DOCKER_CONTEXT, and the current context of ~/.docker/config.json with its files.",
        "`docker` would show other containers than the ones corral makes.",
        "docker context use default",
        STAGED,
    ),
    (
        "COR-007",
        "desktop",
        "the engine is Docker Desktop's",
        "The socket's path, and what the engine calls its operating system.",
        "Its engine runs in a virtual machine; corral's rules are in the kernel of this one.",
        hostcheck.INSTALL_ENGINE,
        BY_FACTS,
    ),
    (
        "COR-008",
        "machine",
        "the engine is in a virtual machine",
        "The socket's path (Colima, Lima, Rancher Desktop, OrbStack); see COR-016 for the effect.",
        "corral's rules are in the kernel of this machine, not of that one.",
        hostcheck.INSTALL_ENGINE,
        BY_FACTS,
    ),
    (
        "COR-009",
        "podman",
        "the engine is podman",
        "Programs on PATH, the socket's path, and how the engine names its components.",
        "podman is not supported yet.",
        hostcheck.INSTALL_ENGINE,
        "Staged with a program of that name in a system test; podman itself: tested on recorded facts only.",
    ),
    (
        "COR-010",
        "snap",
        "Docker is the snap",
        "The engine's data directory.",
        "The snap's confinement hides directories that a policy may mount.",
        f"sudo snap remove docker, then {hostcheck.INSTALL_ENGINE}",
        BY_FACTS,
    ),
    (
        "COR-011",
        "rootless",
        "the rootless engine is not your own",
        "The socket's path, and the engine's security options.",
        "A rootless engine has its bridges in a network namespace of its own. corral knows the one whose "
        "socket is $XDG_RUNTIME_DIR/docker.sock.",
        "dockerd-rootless-setuptool.sh install; docker context use rootless",
        BY_FACTS,
    ),
    (
        "COR-012",
        "userns",
        "Docker maps users",
        "The engine's security options.",
        "With userns-remap the agent runs as a user who does not own the project. Not supported.",
        "remove userns-remap from /etc/docker/daemon.json; sudo systemctl restart docker",
        STAGED,
    ),
    (
        "COR-013",
        "old",
        "the engine is too old",
        "The engine's version.",
        "Engines before "
        + ".".join(map(str, hostcheck.OLDEST_ENGINE))
        + " lack what sandboxes are made of; none was tried.",
        "upgrade Docker Engine",
        BY_FACTS,
    ),
    (
        "COR-016",
        "elsewhere",
        "the engine's bridges are not on this machine",
        "Every bridge the engine has made must be an interface of the network namespace in which the "
        "netfilter "
        "writer works; when it made none of its own, its socket must be listened on in there, by root. "
        "(`corral install` has it make one.)",
        "The engine runs in a virtual machine, on another host, or in a network namespace of its own.",
        "use the engine of this machine: sudo systemctl enable --now docker",
        STAGED,
    ),
)


def _refused(ident: str, key: str, title: str, probe: str, cause: str, fix: str, note: str) -> None:
    def rule(facts: Facts) -> Found | None:
        for refusal in hostcheck.judge(facts):
            if refusal.key == key:
                return Found(refusal.message, refusal.hint)
        return None

    TABLE.add(Check(ident, title, BROKEN, (Facts,), rule, probe, cause, fix, note))


for _row in _REFUSALS:
    _refused(*_row)


@check(
    "COR-014",
    "Docker writes no rules",
    ADVICE,
    Facts,
    probe="dockerd's command line and its configuration file.",
    cause="With iptables: false there is no chain DOCKER-USER: corral decides in a table of its own, for its "
    "sandboxes. Nothing is done for other containers, the build of an image included: whether they reach the "
    "network, and what reaches them, is up to this host's own rules.",
    fix='remove "iptables": false from /etc/docker/daemon.json; sudo systemctl restart docker',
    note=STAGED,
)
def no_rules(facts: Facts) -> Found | None:
    """See the table."""
    if not facts.no_iptables:
        return None
    return Found(f"iptables is false in {facts.no_iptables}; corral's own table decides")


@check(
    "COR-015",
    "Docker uses its nftables backend",
    ADVICE,
    Facts,
    probe="The engine's firewall backend, as `docker info` shows it.",
    cause="That backend has no chain DOCKER-USER: corral decides in a table of its own. It was tried on a "
    "stand-in (an engine with iptables: false), not on an engine that has the backend.",
    fix='nothing, or remove "firewall-backend" from /etc/docker/daemon.json; sudo systemctl restart docker',
    note=BY_FACTS,
)
def native_backend(facts: Facts) -> Found | None:
    """See the table."""
    if not facts.firewall.startswith("nftables"):
        return None
    return Found("Docker uses its nftables backend; corral's own table decides")


@check(
    "COR-017",
    "the enforcer watches another engine",
    BROKEN,
    Facts,
    Manager,
    probe="DOCKER_HOST of this process and of your service manager (systemctl --user show-environment).",
    cause="The enforcer grants nothing to containers of an engine that it does not watch.",
    fix="unset DOCKER_HOST; systemctl --user unset-environment DOCKER_HOST; "
    "systemctl --user restart corral-enforcer",
    note=BY_FACTS,
)
def another_engine(facts: Facts, manager: Manager) -> Found | None:
    """See the table."""
    # For the user's own engine its address is in the enforcer's unit.
    if manager.error or facts.choice.rootless or hostcheck.judge_choice(facts.choice):
        return None
    watched = manager.docker_host or DEFAULT_SOCKET
    if not manager.docker_host and facts.choice.by != "DOCKER_HOST":
        return None
    path = os.path.normpath(watched.removeprefix("unix://"))
    if path.replace("/var/run/", "/run/") == facts.choice.own.replace("/var/run/", "/run/"):
        return None
    return Found(f"corral would use {facts.choice.own}, and the enforcer watches {watched}")


@check(
    "COR-018",
    "Docker cannot keep limits",
    BROKEN,
    Facts,
    probe="What `docker info` says about limits of processes, memory and processor time.",
    cause="The kernel, or the cgroup layout this host booted with, lacks a controller, and Docker discards "
    "the "
    "limit. A sandbox whose policy does not accept that is not started; the fence does not depend on it.",
    fix="boot with cgroup 2 (systemd.unified_cgroup_hierarchy=1) and, for memory, cgroup_enable=memory; or "
    "accept "
    "it: limits.best_effort: true in corral.yaml",
    note="Seen in the lab, whose machine has its controllers in cgroup 1.",
)
def limits(facts: Facts) -> Found | None:
    """See the table."""
    if not facts.controllers_missing:
        return None
    return Found(f"controllers that are missing: {', '.join(facts.controllers_missing)}")


@check(
    "COR-019",
    "your own engine was started without corral's rules",
    BROKEN,
    Facts,
    probe="What the dockerd that runs is, compared with what corral's own dockerd wrote down before it "
    "became it: process id, start time, network namespace.",
    cause="A rootless engine makes a new network namespace at each start, without any rule, and starts "
    "containers that have a restart policy at once. So a drop-in of your docker.service puts corral's "
    "dockerd first on PATH. It is missing, or the engine was not started by that unit.",
    fix="corral install",
    note=STAGED,
)
def unguarded(facts: Facts) -> Found | None:
    """See the table."""
    return Found(facts.unguarded) if facts.unguarded else None
