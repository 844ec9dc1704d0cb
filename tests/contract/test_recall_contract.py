"""Which programs a request costs on the real kernel, and that whatever changed is read again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from enforcer.netfilter.detect import LEGACY, NFT, OWN
from enforcer.netfilter.ipsets import Sets
from enforcer.netfilter.kernel import KernelError, RealKernel
from enforcer.netfilter.look import Detector
from enforcer.netfilter.nftsets import TableSets
from enforcer.netfilter.plan import SET_TYPES
from enforcer.netfilter.process import run
from enforcer.netfilter.skeleton import PINS, Skeleton
from enforcer.netfilter.tables import LegacyTables, NftTables
from enforcer.netfilter.writer import Writer

from .conftest import DRIVERS, program, sh

pytestmark = pytest.mark.netns

BRIDGE = "corral-0a0b0c0d"
SANDBOX = {"bridge": BRIDGE, "subnet": "192.0.2.0/26", "gateway": "192.0.2.1"}


def pins(*numbers: int) -> list[list[Any]]:
    return [["192.0.2.2", "tcp", 443, f"203.0.113.{number}", "box main api.example"] for number in numbers]


class Counted:
    """A writer whose programs are noted: ``ran``. ``meanwhile`` is called at each."""

    def __init__(self, driver: str, filters: Path, detector: bool = False) -> None:
        self.ran: list[str] = []
        self.meanwhile: Callable[[str], None] = lambda _program: None
        self.filters = filters
        for name in ("bridge-nf-call-iptables", "bridge-nf-call-ip6tables"):
            (filters / name).write_text("1\n")
        tables = {NFT: NftTables(self.run), LEGACY: LegacyTables(self.run)}
        found = Detector(tables[NFT], tables[LEGACY]) if detector else None
        self.kernel = RealKernel(
            self.run, bridge_filter=filters, driver=driver, detector=found, tables=tables
        )
        self.writer = Writer(self.kernel, Skeleton(), "test", sleep=lambda _s: None)

    def run(self, argv: Sequence[str], stdin: str | None = None) -> str:
        self.ran.append(" ".join(argv))
        self.meanwhile(argv[0])
        return run(argv, stdin)

    def apply(self, *numbers: int) -> dict[str, Any]:
        body = {"v": 2, "op": "apply", "sandboxes": [SANDBOX], "pins": pins(*numbers), "host": []}
        answer = self.writer.handle(1000, body)
        assert answer["ok"], answer
        return answer

    def ask(self, *numbers: int) -> list[str]:
        """Apply and return the programs that it took."""
        self.ran.clear()
        answer = self.apply(*numbers)
        assert {row[3] for row in answer["pins"]} == {f"203.0.113.{number}" for number in numbers}, answer
        return list(self.ran)


def bridge() -> None:
    sh(
        f"ip link add {BRIDGE} type bridge && ip addr add 192.0.2.1/26 dev {BRIDGE} && ip link set {BRIDGE} up"
    )


@pytest.fixture(params=DRIVERS)
def counted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Counted]:
    if request.param == LEGACY:
        request.getfixturevalue("python_iptables")
    request.getfixturevalue("netns")
    bridge()
    tool = program(request.param)
    if request.param != OWN:
        sh(f"{tool} -N DOCKER-USER && {tool} -A FORWARD -j DOCKER-USER")
    made = Counted(request.param, tmp_path)
    try:
        made.writer.heal("the test's start")
        made.apply(1)
        made.apply(1)
        yield made
    finally:
        made.kernel.close()


def test_requests_that_change_elements_run_no_program(counted: Counted) -> None:
    for numbers in ((1, 2, 3), (2, 3), (2, 3, 4), ()):
        assert counted.ask(*numbers) == []
    counted.ran.clear()
    assert counted.writer.handle(1000, {"v": 2, "op": "read"})["ok"]
    assert counted.ran == []


def test_what_is_known_is_read_again_when_the_writer_wants_it(counted: Counted) -> None:
    counted.kernel.distrust()
    assert counted.ask(1)
    assert counted.ask(1) == []


CHANGES = {
    "a rule of somebody else": "{iptables} -A INPUT -p tcp --dport 4711 -j ACCEPT",
    "our jump": "{iptables} -F INPUT; {iptables} -F DOCKER-USER || true",
    "a table": "nft add table ip foreign",
    "an address": "ip addr add 198.51.100.1/24 dev lo",
    "a network": "ip link add corral-0a0b0c0e type bridge; ip addr add 192.0.2.65/26 dev corral-0a0b0c0e",
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_by_others_is_read_by_the_next_request(counted: Counted, what: str) -> None:
    command = CHANGES[what].format(iptables=program(counted.kernel.driver))
    sh(command)
    ran = counted.ask(1)
    assert any(words.endswith("list table inet corral") for words in ran)
    assert counted.writer.audit().steps == ()


def test_bridge_filtering_that_was_switched_off_is_found_by_the_next_request(counted: Counted) -> None:
    (counted.filters / "bridge-nf-call-iptables").write_text("0\n")
    assert counted.ask(1)
    assert (counted.filters / "bridge-nf-call-iptables").read_text() == "1\n"


def test_what_changes_while_it_is_read_is_read_again(counted: Counted) -> None:
    """The last program of a look has read what is flushed now: the next request must not believe it."""
    counted.kernel.distrust()
    flushed: list[str] = []

    def flush(_program: str) -> None:
        counted.meanwhile = lambda _program: None
        flushed.append("")
        sh("nft add table ip foreign")

    counted.meanwhile = flush
    assert counted.ask(1)
    assert flushed
    assert counted.ask(1)
    assert counted.ask(1) == []


def test_elements_that_somebody_else_deleted_are_put_back_by_the_next_request(counted: Counted) -> None:
    if counted.kernel.driver == OWN:
        sh("nft flush set inet corral pins")
    else:
        kernel = Sets()
        kernel.drop(PINS, kernel.entries(PINS))
        kernel.close()
    counted.ask(1)


def test_a_deleted_table_is_missed_at_once(counted: Counted) -> None:
    assert counted.writer.audit().steps == ()
    sh("nft delete table inet corral")
    assert counted.writer.audit().steps
    counted.writer.heal("the test")
    counted.ask(1)


def test_the_number_of_changes_moves_with_those_of_others_and_not_with_our_elements(counted: Counted) -> None:
    sets = counted.kernel._nftsets
    before = sets.generation()
    counted.ask(1, 2)
    counted.ask(2)
    assert sets.generation() == before
    sh("nft add table ip foreign")
    assert sets.generation() == before + 1
    sh("nft add set ip foreign some '{ type ipv4_addr; }'; nft add element ip foreign some '{ 192.0.2.9 }'")
    assert sets.generation() == before + 3
    counted.ask(1, 2)
    assert sets.generation() == before + 3


def test_a_kernel_that_does_not_tell_has_everything_read(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_self: TableSets) -> int:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(TableSets, "generation", refuse)
    assert counted.ask(1)
    assert counted.ask(1)


def test_where_the_driver_is_found_out_requests_run_no_program_and_an_engine_that_moves_is_followed(
    netns: None, tmp_path: Path
) -> None:
    bridge()
    sh("iptables-nft -N DOCKER && iptables-nft -N DOCKER-USER && iptables-nft -A FORWARD -j DOCKER-USER")
    found = Counted(NFT, tmp_path, detector=True)
    try:
        found.writer.heal("the test's start")
        found.apply(1)
        found.apply(1)
        assert found.ask(1, 2) == []
        assert found.kernel.driver == NFT
        # Docker's native backend: the decision belongs in our own table.
        sh("""iptables-nft -F FORWARD; iptables-nft -X DOCKER
              nft add table ip docker-bridges; nft add chain ip docker-bridges filter-forward""")
        assert found.ask(1, 2)
        assert found.kernel.driver == OWN
        found.ask(1, 2)
        assert found.ask(1, 2, 3) == []
    finally:
        found.kernel.close()


def test_a_set_that_an_earlier_driver_left_is_seen_at_once(counted: Counted) -> None:
    if counted.kernel.driver != OWN:
        pytest.skip("a set that a rule names can be neither destroyed nor renamed")
    assert counted.writer.audit().steps == ()
    counted.kernel._ipsets.create(PINS, SET_TYPES[PINS])
    assert [step.kind for step in counted.writer.audit().steps] == ["destroy"]


def test_a_dormant_table_is_not_read_with_a_program_that_prints_freed_memory_for_it(counted: Counted) -> None:
    sh("nft 'add table inet corral { flags dormant; }'")
    counted.ran.clear()
    assert counted.kernel.observe().dormant == {"inet corral"}
    assert not [words for words in counted.ran if words.endswith("list table inet corral")]
    assert counted.ask(1)
    assert counted.kernel.observe().dormant == set()
    assert any(words.endswith("list table inet corral") for words in counted.ran)


def test_what_nft_prints_and_nobody_understands_is_an_error_of_the_kernel(counted: Counted) -> None:
    def truncated(argv: Sequence[str], stdin: str | None = None) -> str:
        text = run(argv, stdin)
        return text[: len(text) // 2] if tuple(argv[:2]) == ("nft", "-j") else text

    counted.kernel._run = truncated
    counted.kernel.distrust()
    with pytest.raises(KernelError, match=r"nft -j .*list table inet corral: its answer is not understood"):
        counted.kernel.observe()
