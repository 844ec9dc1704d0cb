"""An engine of the user's own: which one it is, whose rules came first, and what its containers may look like."""

from __future__ import annotations

import json
import os
import select
import socket
from dataclasses import replace
from ipaddress import IPv4Interface, IPv4Network
from pathlib import Path
from typing import Any

import pytest

from enforcer import rootless as enforcing
from enforcer.main import engine_roots
from enforcer.netfilter import namespace, rootless
from enforcer.netfilter.claims import Link
from enforcer.netfilter.kernel import RealKernel
from enforcer.netfilter.namespace import Daemon, NotGuarded
from enforcer.netfilter.server import Server
from enforcer.sessions import MASKED, READ_ONLY, Owner, Session, parse_network, parse_session
from policy.container import SessionSpec, create_body, network_body
from policy.declaration import Declaration
from policy.errors import EnforcerError
from policy.identity import Sandbox, StatePaths

UID, PID = 1000, 4711
SANDBOX = Sandbox("demo-0a0b0c0d")
GATEWAY, SUBNET, ADDRESS = "172.16.0.1", "172.16.0.0/26", "172.16.0.2"


class Machine:
    """A /proc and a runtime directory."""

    def __init__(self, top: Path) -> None:
        self.proc, self.runtime = top / "proc", top / "runtime"
        self.runtime.mkdir()

    def run(self, pid: int, start: int, net: str) -> None:
        """Have a process, in the network namespace of that name."""
        directory = self.proc / str(pid)
        (directory / "ns").mkdir(parents=True, exist_ok=True)
        fields = ["S", *["0"] * 18, str(start), "0"]
        (directory / "stat").write_text(f"{pid} (a ) program) {' '.join(fields)}\n")
        inode = self.proc.parent / net
        inode.touch()
        link = directory / "ns" / "net"
        link.unlink(missing_ok=True)
        link.symlink_to(inode)

    def engine(self, pid: int = PID, start: int = 100, net: str = "net-a", *, guarded: bool = True) -> None:
        """Have a dockerd."""
        self.run(pid, start, net)
        (self.runtime / "docker.pid").write_text(str(pid))
        if guarded:
            namespace.record(self.runtime, namespace.describe(pid, self.proc))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def find(machine: Machine) -> Daemon:
    return namespace.find(machine.runtime, machine.proc)


def test_the_engine_that_the_guard_became_is_found(machine: Machine) -> None:
    machine.engine()
    found = find(machine)
    assert (found.pid, found.start) == (PID, 100)
    assert namespace.enter(found)[-4:] == (str(PID), "100", str(found.netns), "--")


def test_no_engine_and_one_that_the_guard_did_not_start_are_refused(machine: Machine) -> None:
    with pytest.raises(NotGuarded, match="does not run"):
        find(machine)
    machine.engine(guarded=False)
    with pytest.raises(NotGuarded, match="without corral's rules"):
        find(machine)
    (machine.runtime / "corral").mkdir()
    (machine.runtime / namespace.RECORD).write_text("nonsense")
    with pytest.raises(NotGuarded, match="without corral's rules"):
        find(machine)


@pytest.mark.parametrize("change", [{"start": 200}, {"net": "net-b"}, {"pid": 4712}])
def test_another_life_of_the_engine_is_never_taken_for_the_guarded_one(
    machine: Machine, change: dict[str, Any]
) -> None:
    machine.engine()
    machine.engine(**change, guarded=False)
    with pytest.raises(NotGuarded, match="without corral's rules"):
        find(machine)


def test_a_writer_elsewhere_is_not_believed_whatever_it_says(machine: Machine) -> None:
    machine.engine()
    machine.run(50, 1, "net-a")
    machine.run(51, 1, "net-old")
    vet = enforcing.Neighbour({"XDG_RUNTIME_DIR": str(machine.runtime)}, machine.proc)
    vet.check(50)
    with pytest.raises(EnforcerError, match="an engine that has ended"):
        vet.check(51)
    with pytest.raises(EnforcerError, match="cannot be told"):
        vet.check(52)
    machine.engine(start=300, net="net-new", guarded=False)
    with pytest.raises(EnforcerError, match="without corral's rules"):
        vet.check(50)


def test_a_connection_is_judged_by_the_process_that_the_kernel_names(machine: Machine) -> None:
    machine.engine()
    machine.run(os.getpid(), 1, "net-a")
    vet = enforcing.Neighbour({"XDG_RUNTIME_DIR": str(machine.runtime)}, machine.proc)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        vet(ours)
        machine.run(os.getpid(), 1, "net-b")
        with pytest.raises(EnforcerError):
            vet(ours)


def programs(tmp_path: Path) -> tuple[Path, Path]:
    found = []
    for name in ("ours", "real"):
        path = tmp_path / name / "dockerd"
        path.parent.mkdir()
        path.touch(mode=0o755)
        found.append(path)
    return found[0], found[1]


class Healing:
    """A writer that loads the rules, or cannot."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.problem = problem
        self.healed: list[str] = []

    def heal(self, why: str) -> tuple[()]:
        if self.problem is not None:
            raise self.problem
        self.healed.append(why)
        return ()


def guard(tmp_path: Path, writer: Healing, **environ: str) -> list[list[str]]:
    ours, real = programs(tmp_path)
    ran: list[list[str]] = []
    told = {
        "PATH": f"{ours.parent}:/nowhere:{real.parent}",
        "XDG_RUNTIME_DIR": str(tmp_path),
        rootless.CHILD: "1",
        **environ,
    }
    make: Any = lambda *_: writer  # noqa: E731 - a factory
    rootless.guard([str(ours), "--debug"], told, make, lambda path, argv: ran.append([path, *argv]))
    assert all(row[0] == str(real) for row in ran)
    return ran


def test_the_guard_loads_the_rules_says_so_and_becomes_the_real_dockerd(tmp_path: Path) -> None:
    writer = Healing()
    (ran,) = guard(tmp_path, writer)
    assert ran[2:] == ["--debug"]
    assert len(writer.healed) == 1
    told = json.loads((tmp_path / namespace.RECORD).read_text())
    assert told == {
        "pid": os.getpid(),
        "start": namespace.start_time(os.getpid()),
        "netns": namespace.netns("self"),
    }


def test_without_rules_there_is_no_dockerd(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no nft"):
        guard(tmp_path, Healing(OSError("no nft")))
    assert not (tmp_path / namespace.RECORD).exists()


def test_outside_of_rootlesskit_the_guard_is_dockerd_and_nothing_else(tmp_path: Path) -> None:
    writer = Healing()
    assert len(guard(tmp_path, writer, **{rootless.CHILD: ""})) == 1
    assert writer.healed == []
    with pytest.raises(NotGuarded, match="no dockerd on PATH"):
        rootless.real_program(str(tmp_path / "ours"), tmp_path / "ours" / "dockerd")


def test_the_writer_enters_the_namespaces_of_the_guarded_engine_only(machine: Machine) -> None:
    ran: list[list[str]] = []
    environ = {"XDG_RUNTIME_DIR": str(machine.runtime)}
    with pytest.raises(NotGuarded):
        rootless.join(environ, ("program",), lambda _path, argv: ran.append(argv))
    assert ran == []
    with pytest.raises(NotGuarded, match="XDG_RUNTIME_DIR"):
        rootless.join({}, ("program",))


def test_what_is_beside_the_uplink_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    links = [
        Link("lo", 1, (IPv4Interface("127.0.0.1/8"),)),
        Link("tap0", 2, (IPv4Interface("10.0.2.100/24"),)),
        Link("docker0", 3, (IPv4Interface("172.17.0.1/16"),)),
        Link("corral-0a0b0c0d", 4, (IPv4Interface("172.16.0.1/26"),)),
    ]
    monkeypatch.setattr(RealKernel, "_links", lambda _self: links)
    found = rootless.JoinedKernel().host_addresses()
    assert {"10.0.2.2", "10.0.2.3", "10.0.2.100", "172.16.0.1", "172.17.0.1"} <= found
    assert "172.16.0.2" not in found
    assert len(rootless.neighbours(IPv4Network("10.0.0.0/8"))) == 4096


class Deaf:
    """A writer that nothing is asked of."""

    journal = None


def test_nobody_but_the_namespaces_owner_is_served() -> None:
    """The kernel tells the uid as the reader's namespace has it; another user of it is a container's."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("")
    listener.listen()
    spare = [socket.socketpair()[0] for _ in range(2)]
    writer: Any = Deaf()
    for only, served in ((os.getuid(), True), (os.getuid() + 1, False)):
        server = Server(writer, listener, *spare, only=only)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.connect(listener.getsockname())
            server._accept()
            closed = bool(select.select([caller], [], [], 0)[0])
            assert closed is not served


OWNER = Owner(UID, UID, Path("/home/dev/.local/share/corral"), ipv6=True, rootless=True)


def judged_body(owner: Owner) -> dict[str, Any]:
    spec = SessionSpec(
        sandbox=SANDBOX, service="main", session="0a1b2c3d", purpose="run", uid=UID, gid=UID, image="x",
        address=ADDRESS, hosts_file=str(StatePaths(owner.data_home / SANDBOX.id).hosts("0a1b2c3d")),
        project="/p", workdir="/p", argv=("x",), declaration=Declaration(), rootless=owner.rootless,
    )  # fmt: skip
    return {**create_body(spec), "Name": f"/{spec.container}"}


def judged(owner: Owner, user: str, **host_config: Any) -> Session:
    body = judged_body(owner)
    paths = {"MaskedPaths": sorted(MASKED), "ReadonlyPaths": sorted(READ_ONLY)}
    inspect = {
        "Id": "0f" * 32,
        "Name": body["Name"],
        "State": {"Status": "created", "Running": False},
        "Config": {**body, "User": user},
        "HostConfig": {**body["HostConfig"], **paths, **host_config},
        "NetworkSettings": {"Networks": {SANDBOX.network: {"IPAMConfig": {"IPv4Address": ADDRESS}}}},
    }
    network = parse_network(network_body(SANDBOX, UID, SUBNET, GATEWAY, "172.16.0.48/28"), UID)
    return parse_session(inspect, network, owner)


def test_exactly_the_body_of_the_engine_is_accepted() -> None:
    system = replace(OWNER, rootless=False)
    assert judged(OWNER, "0:0").problems == ()
    assert judged(system, f"{UID}:{UID}").problems == ()
    for owner, user in ((OWNER, f"{UID}:{UID}"), (OWNER, "0"), (OWNER, ""), (system, "0:0"), (system, "0")):
        (problem,) = judged(owner, user).problems
        assert "runs as user" in problem


@pytest.mark.parametrize(
    ("field", "value"),
    [("OomScoreAdj", -1), ("OomScoreAdj", 1001), ("Privileged", True), ("PidMode", "host")],
)
def test_a_rootless_engine_may_fill_in_its_own_score_and_nothing_else(field: str, value: object) -> None:
    assert judged(OWNER, "0:0", OomScoreAdj=200).problems == ()
    assert judged(OWNER, "0:0", **{field: value}).problems != ()
    assert judged(replace(OWNER, rootless=False), f"{UID}:{UID}", OomScoreAdj=200).problems != ()


def mounted(owner: Owner, source: str) -> tuple[str, ...]:
    row = {"Type": "bind", "Source": source, "Target": "/data", "BindOptions": {"Propagation": "rprivate"}}
    user = "0:0" if owner.rootless else f"{UID}:{UID}"
    return judged(owner, user, Mounts=[*judged_body(owner)["HostConfig"]["Mounts"], row]).problems


@pytest.mark.parametrize(
    "source",
    [
        "/run/user",
        "/var/run/user",
        "/run/user/1000",
        "/run/user/1000/docker/containerd",
        "/var/run/../run/user/",
        "/run/containerd",
        "/var/lib",
        "/var/lib/docker/volumes",
        "/home/dev/.local/share/docker",
        "/home/dev/.local/share/docker/overlay2",
        "/home/dev/.local/share",
        "/home/dev",
        "/moved",
        "//moved/here/x",
    ],
)
def test_a_mount_with_the_engines_sockets_or_files_gets_nothing(source: str) -> None:
    roots = ("/home/dev/.local/share/docker", "/moved/here")
    for owner in (replace(OWNER, engine=roots), replace(OWNER, rootless=False, engine=roots)):
        (problem,) = mounted(owner, source)
        assert f"mount {source} holds the engine's" in problem


@pytest.mark.parametrize(
    "source", ["/home/dev/project", "/moved/elsewhere", "/run-user", "/home/dev/.local/sharing"]
)
def test_a_mount_beside_the_engines_files_is_accepted(source: str) -> None:
    assert mounted(replace(OWNER, engine=("/home/dev/.local/share/docker", "/moved/here")), source) == ()


def test_where_an_engine_keeps_its_files_is_read_from_its_configuration(tmp_path: Path) -> None:
    home, environ = tmp_path, {"XDG_DATA_HOME": str(tmp_path / "data")}
    assert engine_roots(home, environ, rootless=True) == (f"{tmp_path}/data/docker",)
    (tmp_path / ".config" / "docker").mkdir(parents=True)
    file = tmp_path / ".config" / "docker" / "daemon.json"
    file.write_text('{"data-root": "/moved/here"}')
    assert engine_roots(home, environ, rootless=True) == (f"{tmp_path}/data/docker", "/moved/here")
    file.write_text("[" * 100_000)
    assert engine_roots(home, {}, rootless=True) == (f"{tmp_path}/.local/share/docker",)
