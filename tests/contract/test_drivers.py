"""The host's engine changes where its rules are, under traffic: the writer follows, and nothing opens."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from enforcer.netfilter import process, xtlegacy
from enforcer.netfilter.detect import LEGACY, NFT, OWN
from enforcer.netfilter.kernel import RealKernel
from enforcer.netfilter.look import Detector
from enforcer.netfilter.skeleton import PINS
from enforcer.netfilter.tables import LOCK, LegacyTables, NftTables, Tables
from enforcer.netfilter.writer import Writer

from .conftest import program, sh
from .test_packets import ALLOWED, BRIDGE, FORBIDDEN, INSIDE, PIN, SKELETON, Hosts, grant

pytestmark = pytest.mark.netns

FLOOD = f"""
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
print("ready", flush=True)
sent = 0
while sent < 400000:
    try: s.sendto(b"x", ("{FORBIDDEN}", 9))
    except OSError: pass
    sent += 1
    if sent % 500 == 0: print(sent, flush=True)
"""


class Engine:
    """What an engine does to the host, in one of the places where it can keep its rules."""

    def __init__(self) -> None:
        self.alternative = ""

    def start(self, driver: str) -> None:
        if driver == OWN:
            sh("nft add table ip docker-bridges")
            for name in ("filter-FORWARD", f"filter-forward-in__{BRIDGE}", "filter-forward-in__docker0"):
                sh(f"nft add chain ip docker-bridges {name}")
            return
        self.alternative = driver
        tool = program(driver)
        sh(f"""
        {tool} -N DOCKER-USER || true; {tool} -N DOCKER; {tool} -A FORWARD -j DOCKER-USER; {tool} -P FORWARD DROP
        {tool} -A FORWARD -i {BRIDGE} -j ACCEPT
        {tool} -A FORWARD -o {BRIDGE} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
        """)

    def leave(self, driver: str) -> None:
        """All of its rules go, with whatever is in its chains."""
        if driver == OWN:
            sh("nft delete table ip docker-bridges")
            return
        tool = program(driver)
        sh(
            f"{tool} -P FORWARD ACCEPT; {tool} -F FORWARD; {tool} -F DOCKER-USER; {tool} -X DOCKER-USER; {tool} -X DOCKER"
        )


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def hosts(python_iptables: None, netns: None) -> Iterator[Hosts]:
    made = Hosts(OWN)
    try:
        made.up()
        yield made
    finally:
        made.down()


def detector(engine: Engine, remember: Path | None = None) -> Detector:
    return Detector(
        NftTables(process.run),
        LegacyTables(),
        remember,
        bridges=lambda: frozenset({BRIDGE}),
        alternative=lambda: engine.alternative,
    )


@contextlib.contextmanager
def writing(engine: Engine, remember: Path | None = None, hold: bool = False) -> Iterator[Writer]:
    found = detector(engine, remember)
    tables: dict[str, Tables] = {NFT: found.nft, LEGACY: found.legacy}
    kernel = RealKernel(detector=found, tables=tables, hold=hold)
    of = Writer(kernel, SKELETON, "test")
    of.heal("the test's start")
    try:
        yield of
    finally:
        kernel.close()


def driver(of: Writer) -> str:
    assert isinstance(of.kernel, RealKernel)
    return of.kernel.driver


def remains() -> dict[str, bool]:
    """Where corral has chains now."""
    legacy = xtlegacy.read(4, "filter").chains
    return {
        NFT: "CORRAL-" in sh("iptables-nft -S"),
        LEGACY: any(name.startswith("CORRAL-") for name in legacy),
        OWN: "sandbox_out" in sh("nft list table inet corral"),
    }


MOVES = [(old, new) for old in (NFT, LEGACY, OWN) for new in (NFT, LEGACY, OWN) if old != new]


@pytest.mark.parametrize(("old", "new"), MOVES)
@pytest.mark.fault("engine changes its rules' place")
def test_the_rules_move_with_the_engine_and_nothing_passes_meanwhile(
    hosts: Hosts, engine: Engine, old: str, new: str
) -> None:
    hosts.serve("far", 443)
    engine.start(old)
    with writing(engine) as of:
        assert driver(of) == old
        grant(of, PIN)
        assert hosts.connect(ALLOWED, 443) == "open"
        flow = hosts.talk(
            "in",
            f"""
import socket, sys
s = socket.create_connection(("{ALLOWED}", 443), timeout=5)
while sys.stdin.readline():
    try:
        s.sendall(b"2"); print(s.recv(1), flush=True)
    except OSError as error: print("cut", error, flush=True)
""",
        )
        flow.say()
        assert flow.hear() == "b'2'"
        flood = hosts.talk("in", FLOOD)
        assert flood.hear() == "ready"
        engine.leave(old)
        engine.start(new)
        before = flood.hear()
        of.heal("a change by others")
        assert driver(of) == new
        assert flood.hear() != before
        # The flood went on through all of it: it is ended here, not by itself.
        assert flood.process.poll() is None
        flood.process.kill()
        assert remains() == {name: name == new for name in (NFT, LEGACY, OWN)}
        assert set(of.kernel.entries(PINS)) == {PIN}
        flow.say()
        assert flow.hear() == "b'2'"
        assert hosts.connect(ALLOWED, 443) == "open"
        assert hosts.connect(FORBIDDEN, 443).startswith("refused")
        assert hosts.arrived(FORBIDDEN) == 0
        assert of.audit().steps == ()
    # The positive control of the zero.
    clean = RealKernel(driver=new)
    clean.remove(SKELETON)
    clean.close()
    sh(f"iptables-nft -t nat -A POSTROUTING -s {INSIDE} -j MASQUERADE")
    hosts.send(FORBIDDEN, count=20)
    assert hosts.arrived(FORBIDDEN) == 20


def test_an_engine_that_writes_no_rules_gets_the_own_table(hosts: Hosts, engine: Engine) -> None:
    with writing(engine) as of:
        assert driver(of) == OWN
        assert remains() == {NFT: False, LEGACY: False, OWN: True}
        assert of.audit().problems == () or {p.part for p in of.audit().problems} == {"hold"}


def test_flushed_rules_are_no_other_engine_also_after_a_restart(
    hosts: Hosts, engine: Engine, tmp_path: Path
) -> None:
    engine.start(NFT)
    with writing(engine, tmp_path / "driver") as of:
        assert driver(of) == NFT
    engine.leave(NFT)
    with writing(engine, tmp_path / "driver") as of:
        assert driver(of) == NFT
        assert [p.part for p in of.audit().problems] == ["hook"]


@pytest.mark.parametrize("remembered", [True, False])
def test_a_table_made_anew_at_the_start_keeps_what_running_sessions_may_reach(
    hosts: Hosts, engine: Engine, tmp_path: Path, remembered: bool
) -> None:
    hosts.serve("far", 443)
    with writing(engine, tmp_path / "driver") as of:
        assert driver(of) == OWN
        grant(of, PIN)
        assert hosts.connect(ALLOWED, 443) == "open"
    if not remembered:
        (tmp_path / "driver").unlink()
    # As an upgrade finds it whose rules have another text.
    sh("nft flush chain inet corral sandbox_in")
    assert hosts.connect(ALLOWED, 443) != "open"
    with writing(engine, tmp_path / "driver") as of:
        assert set(of.kernel.entries(PINS)) == {PIN}
        assert hosts.connect(ALLOWED, 443) == "open"
        assert of.audit().steps == ()


@pytest.mark.parametrize(("old", "new"), MOVES)
def test_an_engine_that_moved_while_the_writer_was_away_keeps_its_sessions(
    hosts: Hosts, engine: Engine, tmp_path: Path, old: str, new: str
) -> None:
    hosts.serve("far", 443)
    engine.start(old)
    with writing(engine, tmp_path / "driver") as of:
        assert driver(of) == old
        grant(of, PIN)
    engine.leave(old)
    engine.start(new)
    with writing(engine, tmp_path / "driver") as of:
        assert driver(of) == new
        assert set(of.kernel.entries(PINS)) == {PIN}
        assert hosts.connect(ALLOWED, 443) == "open"
        assert hosts.connect(FORBIDDEN, 443).startswith("refused")
        assert of.audit().steps == ()


def test_an_engine_that_moves_away_from_a_table_somebody_deleted_is_followed(
    hosts: Hosts, engine: Engine
) -> None:
    engine.start(OWN)
    with writing(engine) as of:
        grant(of, PIN)
        sh("nft delete table inet corral")
        engine.leave(OWN)
        engine.start(NFT)
        of.heal("a change by others")
        assert driver(of) == NFT
        assert of.kernel.entries(PINS) == {}
        grant(of, PIN)
        assert set(of.kernel.entries(PINS)) == {PIN}


def test_stale_rules_in_the_other_iptables_are_named_and_nothing_is_granted(
    hosts: Hosts, engine: Engine
) -> None:
    engine.start(NFT)
    sh(f"iptables-nft -D FORWARD -i {BRIDGE} -j ACCEPT")
    sh(f"iptables-nft -D FORWARD -o {BRIDGE} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT")
    engine.start(LEGACY)
    with writing(engine) as of:
        answer = of.handle(
            1000,
            {
                "v": 2,
                "op": "apply",
                "sandboxes": [{"bridge": BRIDGE, "subnet": "192.0.2.0/26", "gateway": "192.0.2.1"}],
                "pins": [[*PIN.row(), ""]],
                "host": [],
            },
        )
        assert driver(of) == LEGACY
        assert answer["pins"] == []
        assert any("older ones of it in nft's tables" in text for text in answer["refused"])
        sh("iptables-nft -P FORWARD ACCEPT; iptables-nft -F FORWARD")
        grant(of, PIN)
        assert set(of.kernel.entries(PINS)) == {PIN}


def test_without_the_library_legacy_is_refused_by_name_and_closed(
    hosts: Hosts, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.start(LEGACY)
    with writing(engine) as of:
        grant(of, PIN)
        assert isinstance(of.kernel, RealKernel)
        assert of.kernel._detector is not None
        of.kernel._detector.usable = lambda: frozenset({NFT, OWN})
        of.heal("a change by others")
        told = [p.text for p in of.audit().problems if p.part == "driver"]
        assert len(told) == 1
        assert "corral[legacy]" in told[0]
        answer = of.handle(1000, {"v": 2, "op": "read"})
        assert any(part == "driver" for part, _ in answer["problems"])
        answer = of.handle(
            1000,
            {
                "v": 2,
                "op": "apply",
                "sandboxes": [{"bridge": BRIDGE, "subnet": "192.0.2.0/26", "gateway": "192.0.2.1"}],
                "pins": [[*PIN.row(), ""]],
                "host": [],
            },
        )
        assert answer["pins"] == []
        hosts.send(ALLOWED, 443)
        assert hosts.arrived(ALLOWED) == 0


def test_a_legacy_table_is_read_as_its_own_program_prints_it(hosts: Hosts, engine: Engine) -> None:
    engine.start(LEGACY)
    with writing(engine):
        sh(
            "iptables-legacy -A DOCKER ! -i docker0 -o docker0 -j ACCEPT; iptables-legacy -A DOCKER -s 198.51.100.9"
        )
        read = xtlegacy.read(4, "filter").lines
        listed = subprocess.run(["iptables-legacy", "-S"], capture_output=True, text=True, check=True).stdout
        names = [line.split()[1] for line in listed.splitlines() if line[:2] in ("-N", "-P")]
        assert set(read) == set(names)
        rules = [line.split() for line in listed.splitlines() if line.startswith("-A")]
        assert sum(map(len, read.values())) == len(rules)
        for chain, lines in read.items():
            printed = [words[2:] for words in rules if words[1] == chain]
            for line, words in zip(lines, printed, strict=True):
                assert set(line.split()) <= {word.strip('"') for word in words}
    assert read["DOCKER"] == ["! -i docker0 -o docker0 -j ACCEPT", ""]


def test_the_programs_of_the_legacy_tables_find_each_rule_as_they_print_it(
    hosts: Hosts, engine: Engine
) -> None:
    """Else they could not delete it, which is how an uninstallation goes."""
    engine.start(LEGACY)
    found = 0
    with writing(engine):
        for command in ("iptables-legacy", "iptables-legacy -t nat", "ip6tables-legacy"):
            for line in sh(f"{command} -S").splitlines():
                if "corral:" in line:
                    sh(f"{command} -C {line.removeprefix('-A ')}")
                    found += 1
    assert found > 20


CONFINED = """
import ctypes, json, sys
assert ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) == 0  # PR_SET_MDWE
sys.path.insert(0, sys.argv[1])
from enforcer.netfilter.kernel import RealKernel
from enforcer.netfilter.model import Element
from enforcer.netfilter.skeleton import PINS, Skeleton
from enforcer.netfilter.writer import Writer
kernel = RealKernel(driver=sys.argv[2], hold=True)
writer = Writer(kernel, Skeleton(), "test")
problems = [p.part for p in writer.heal("the start")]
kernel.change(PINS, {Element("192.0.2.2", "tcp", 443, "203.0.113.10"): "x"}, ())
print(json.dumps([problems, len(kernel.entries(PINS)), kernel.denied(), len(writer.audit().steps)]))
"""


@pytest.mark.parametrize("driver", [NFT, LEGACY, OWN])
def test_each_driver_does_with_the_rights_of_the_writers_unit(
    python_iptables: None, netns: None, driver: str
) -> None:
    """No root, two capabilities, no memory that is both written and run, the lock file as standard input."""
    sh("iptables-legacy -w -S >/dev/null")  # makes the lock file
    with tempfile.TemporaryDirectory() as top:
        directory = Path(top)
        directory.chmod(0o755)
        shutil.copytree(Path(process.__file__).parent, directory / "enforcer" / "netfilter")
        (directory / "enforcer" / "__init__.py").touch()
        for name in ("pyroute2", "iptc"):
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            shutil.copytree(Path(spec.origin).parent, directory / name)
        for library in Path(spec.origin).parents[1].glob("libxtwrapper*.so"):
            shutil.copy(library, directory / "libxtwrapper.so")
        kept = "-all,+net_admin,+net_raw"
        drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]
        drop += [f"--{kind}={kept}" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
        with LOCK.open() as lock:
            done = subprocess.run(
                [*drop, "/usr/bin/python3", "-I", "-S", "-c", CONFINED, top, driver],
                stdin=lock, capture_output=True, text=True, check=False, timeout=60,
            )  # fmt: skip
    assert done.returncode == 0, done.stderr
    problems, entries, denied, steps = json.loads(done.stdout)
    assert set(problems) <= {"hook", "hold"}
    assert (entries, denied, steps) == (1, {}, 0)


@pytest.mark.parametrize(
    "tamper", ["-F CORRAL-OUT", "-I FORWARD 1 -j ACCEPT", "-F DOCKER-USER", "-t nat -F POSTROUTING"]
)
def test_a_change_of_the_legacy_tables_is_seen_without_a_notification(
    hosts: Hosts, engine: Engine, tamper: str
) -> None:
    engine.start(LEGACY)
    with writing(engine) as of:
        of.audit()
        assert not of.kernel.unannounced()
        sh(f"iptables-legacy {tamper}")
        assert of.kernel.unannounced()
        of.heal("a change by others")
        of.audit()
        assert not of.kernel.unannounced()


def test_an_engine_that_begins_is_seen_without_a_notification(hosts: Hosts, engine: Engine) -> None:
    with writing(engine) as of:
        assert isinstance(of.kernel, RealKernel)
        assert of.kernel._detector is not None
        assert not of.kernel.unannounced()
        of.kernel._detector.bridges = lambda: frozenset({BRIDGE, "docker0"})
        assert of.kernel.unannounced()
