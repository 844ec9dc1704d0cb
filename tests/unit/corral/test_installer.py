"""The programs for root, on a root directory of their own: nothing of this machine is touched."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from corral import install
from corral.installer import common, legacy, netfilter, removal, root
from corral.installer.common import Places, StopError

TAG = "-m comment --comment corral:0123456789ab"
CHAINS = {"nftables": [{"chain": {"family": "ip", "table": "filter", "name": "FORWARD"}}]}


class Machine:
    """What programs answer; ``cut`` raises where the test wants the end."""

    def __init__(self, top: Path) -> None:
        self.places = Places(str(top))
        for directory in (self.places.units, self.places.lock.parent):
            directory.mkdir(parents=True)
        self.ran: list[list[str]] = []
        self.cut: Callable[[list[str]], bool] = lambda _: False
        self.links: list[dict[str, str]] = [{"ifname": "lo"}]
        self.answers: dict[str, str] = {"chains": json.dumps(CHAINS), "tables": '{"nftables": []}'}

    def run(self, argv: Sequence[str], stdin: str | None = None) -> str:
        words = list(argv)
        if self.cut(words):
            raise KeyboardInterrupt
        if words == list(removal.LINKS):
            return json.dumps(self.links)
        self.ran.append(words)
        if words[:3] == ["systemctl", "show", "-P"]:
            return "inactive\n"
        return next((text for word, text in self.answers.items() if word in words), "")

    def payload(self, version: str, **schemas: int) -> dict[str, Any]:
        name = f"{version}-0a0b0c0d"
        manifest = {"version": version, "schemas": {"protocol": 2, "skeleton": 1, **schemas}}
        files = {"enforcer/__init__.py": b"", common.MANIFEST: json.dumps(manifest).encode()}
        return {
            "directory": str(self.places.code / name),
            "python": "/usr/bin/python3",
            "archive": install.base64.b64encode(install.archive(files)).decode(),
            "units": dict.fromkeys(common.UNITS, f"ExecStart=/usr/bin/python3 /opt/corral/{name}/corral-netfilter serve\n"),
            "modules": "br_netfilter\n",
            "manifest": manifest,
            "uid": os.getuid(),
        }  # fmt: skip

    def install(self, version: str, **schemas: int) -> dict[str, Any]:
        return root.install(self.payload(version, **schemas), self.places, self.run)

    def remove(
        self, uid: int | None = None, others: Sequence[int] = (), purge: bool = False
    ) -> dict[str, Any]:
        payload = {"uid": os.getuid() if uid is None else uid, "others": list(others), "purge": purge}
        return removal.uninstall(payload, self.places, self.run, lambda _: None)

    def code(self) -> list[str]:
        return sorted(path.name for path in self.places.code.iterdir())


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(root, "check_host", lambda directory, *_: _directories(directory, made.places))
    monkeypatch.setattr(root.os, "sync", lambda: None)
    monkeypatch.setattr(netfilter, "_destroy_sets", list)
    made = Machine(tmp_path / "top")
    return made


def _directories(directory: Path, places: Places) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    places.users.mkdir(parents=True, exist_ok=True)


def test_an_installation_replaces_the_one_before_and_notes_who_did_it(machine: Machine) -> None:
    machine.install("1.0.0")
    assert machine.code() == ["1.0.0-0a0b0c0d"]
    machine.ran.clear()
    machine.install("1.1.0")
    assert machine.code() == ["1.1.0-0a0b0c0d"]
    found = common.installed(machine.places)
    assert found is not None
    assert (found.release, found.schemas) == ("1.1.0", {"protocol": 2, "skeleton": 1})
    assert list(common.users(machine.places)) == [os.getuid()]
    # The rules are replaced while no writer of the old version could mend them back.
    verbs = [
        words[1:] for words in machine.ran if words[0] == "systemctl" and words[1] in ("stop", "restart")
    ]
    assert verbs == [
        ["stop", "corral-netfilter.service"],
        ["restart", "corral-skeleton.service"],
        ["restart", "corral-netfilter.socket"],
        ["restart", "corral-netfilter.service"],
    ]
    assert not machine.places.lock.exists()


def test_the_writer_is_started_although_the_rules_could_not_be_replaced(machine: Machine) -> None:
    def run(argv: Sequence[str], stdin: str | None = None) -> str:
        if list(argv)[1:] == ["restart", "corral-skeleton.service"]:
            raise StopError("{}")
        return machine.run(argv, stdin)

    with pytest.raises(StopError):
        root.install(machine.payload("1.0.0"), machine.places, run)
    assert machine.ran[-1] == ["systemctl", "restart", "corral-netfilter.service"]


@pytest.mark.parametrize(
    "cut",
    [
        lambda words: "compileall" in words,
        lambda words: words == ["systemctl", "daemon-reload"],
        lambda words: words[1:2] == ["enable"],
        lambda words: words[1:] == ["stop", "corral-netfilter.service"],
        lambda words: words[1:] == ["restart", "corral-netfilter.service"],
    ],
)
def test_an_upgrade_that_is_cut_off_is_ended_by_the_next(
    machine: Machine, cut: Callable[[list[str]], bool]
) -> None:
    machine.install("1.0.0")
    machine.cut = cut
    with pytest.raises(KeyboardInterrupt):
        machine.install("1.1.0")
    # Whatever the units name is there.
    for unit in common.UNITS:
        name = (machine.places.units / unit).read_text().split("/opt/corral/")[1].partition("/")[0]
        assert name in machine.code()
    machine.cut = lambda _: False
    machine.install("1.1.0")
    assert machine.code() == ["1.1.0-0a0b0c0d"]
    assert not list(machine.places.units.glob(f"*{common.PARTIAL}"))


def test_what_a_cut_off_upgrade_brought_is_no_version_to_go_back_from(machine: Machine) -> None:
    machine.install("1.0.0")
    machine.cut = lambda words: words == ["systemctl", "daemon-reload"]
    monitored = machine.payload("1.1.0")
    monitored["units"] = {}
    with pytest.raises(KeyboardInterrupt):
        root.install(monitored, machine.places, machine.run)
    machine.cut = lambda _: False
    machine.install("1.0.0")
    assert machine.code() == ["1.0.0-0a0b0c0d"]


@pytest.mark.parametrize(("version", "schemas"), [("1.1.0", {}), ("1.0.0", {"skeleton": 2})])
def test_going_back_is_refused_before_anything_is_touched(
    machine: Machine, version: str, schemas: dict[str, int]
) -> None:
    machine.install(version, **schemas)
    before = {path: path.read_bytes() for path in machine.places.top.rglob("*") if path.is_file()}
    machine.ran.clear()
    with pytest.raises(StopError) as caught:
        machine.install("1.0.0")
    told = json.loads(str(caught.value))
    assert "1.0.0" in told["message"]
    assert version in told["message"]
    assert "corral uninstall" in told["hint"]
    assert machine.ran == []
    assert {path: path.read_bytes() for path in machine.places.top.rglob("*") if path.is_file()} == before


def test_an_installation_from_before_there_were_manifests_is_known_by_its_directory(machine: Machine) -> None:
    machine.install("1.0.0")
    (machine.places.code / "1.0.0-0a0b0c0d" / common.MANIFEST).unlink()
    found = common.installed(machine.places)
    assert found is not None
    assert (found.release, found.schemas) == ("1.0.0", {})
    machine.install("1.0.0")


def test_everything_goes_in_an_order_in_which_nothing_mends_or_opens(machine: Machine) -> None:
    machine.install("1.0.0")
    machine.answers["tables"] = json.dumps({"nftables": [{"table": {"family": "inet", "name": "corral"}}]})
    machine.answers["inet"] = json.dumps({"nftables": [{"rule": {"comment": "corral:0123456789ab"}}]})
    wants = machine.places.units / "multi-user.target.wants"
    wants.mkdir()
    (wants / "corral-netfilter.service").symlink_to("/nowhere")
    (machine.places.units / "corral-netfilter.service.d").mkdir()
    (machine.places.units / "foreign.service").write_text("")
    machine.ran.clear()
    machine.remove()
    assert common.traces(machine.places) == []
    left = {path.name for path in machine.places.units.iterdir()}
    assert left == {"multi-user.target.wants", "foreign.service"}
    words = [" ".join(argv) for argv in machine.ran]
    order = [
        words.index("systemctl stop corral-netfilter.socket"),
        words.index("systemctl stop corral-netfilter.service"),
        words.index("nft delete table inet corral"),
        words.index("systemctl daemon-reload"),
    ]
    assert order == sorted(order)
    assert not machine.places.lock.exists()
    # Once more: nothing is there, and nothing is wrong.
    machine.answers["tables"] = '{"nftables": []}'
    assert machine.remove()["removed"] == []


def test_a_container_on_a_bridge_keeps_the_rules(machine: Machine) -> None:
    machine.install("1.0.0")
    machine.links += [{"ifname": "corral-0a0b0c0d"}, {"ifname": "veth1", "master": "corral-0a0b0c0d"}]
    machine.ran.clear()
    with pytest.raises(StopError, match="corral-0a0b0c0d"):
        machine.remove()
    assert machine.ran == []
    assert common.installed(machine.places) is not None
    # The bridge of nobody is deleted first.
    machine.links[-1]["master"] = "br-of-another"
    machine.remove()
    assert machine.ran[0] == ["ip", "link", "delete", "corral-0a0b0c0d"]


def test_other_users_keep_everything_but_the_note(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.install("1.0.0")
    (machine.places.users / "4242").write_text("eve\n")
    names = {4242: "eve", 4343: "adam", os.getuid(): "me"}

    def account(uid: int) -> Any:
        return type("Account", (), {"pw_name": names[uid]})

    monkeypatch.setattr(common.pwd, "getpwuid", account)
    machine.ran.clear()
    answer = machine.remove(others=[4343, 4444])
    assert answer == {"removed": [], "others": {"4242": "eve", "4343": "adam"}}
    assert machine.ran == []
    assert common.installed(machine.places) is not None
    assert list(common.users(machine.places)) == [4242]
    # Accounts that are gone keep nothing; the claims of the writer are asked too.
    names.clear()
    names[4545] = "carol"
    machine.places.private_claims.mkdir(parents=True)
    row = {"uid": 4545, "bridge": "corral-0a0b0c0d"}
    (machine.places.private_claims / "claims.json").write_text(json.dumps([row]))
    machine.links.append({"ifname": "corral-0a0b0c0d"})
    assert machine.remove()["others"] == {"4545": "carol"}
    del machine.links[-1]
    assert machine.remove()["others"] == {}
    assert common.traces(machine.places) == []


def test_root_s_configuration_goes_on_purpose_only(machine: Machine) -> None:
    machine.install("1.0.0")
    machine.places.settings.mkdir(parents=True)
    (machine.places.settings / "netfilter.json").write_text("{}")
    machine.remove()
    assert machine.places.settings.exists()
    machine.remove(purge=True)
    assert not machine.places.settings.exists()


LISTING = f"""\
-P INPUT ACCEPT
-P FORWARD DROP
-N CORRAL-OLDER
-N CORRAL-OUT
-N DOCKER-USER
-A INPUT -s 198.51.100.7/32 -m comment --comment "not corral" -j DROP
-A INPUT -i corral-+ {TAG} -j CORRAL-HOST
-A INPUT -i corral-abc -j ACCEPT
-A DOCKER-USER -i corral-+ {TAG} -j CORRAL-OUT
-A CORRAL-OUT {TAG} -j DROP
"""


def test_only_what_carries_the_mark_or_the_name_is_taken_out() -> None:
    assert netfilter.script("filter", netfilter.parse(LISTING)) == (
        "*filter\n"
        f"-D INPUT -i corral-+ {TAG} -j CORRAL-HOST\n"
        f"-D DOCKER-USER -i corral-+ {TAG} -j CORRAL-OUT\n"
        "-F CORRAL-OLDER\n-F CORRAL-OUT\n-X CORRAL-OLDER\n-X CORRAL-OUT\nCOMMIT\n"
    )
    assert netfilter.script("filter", netfilter.parse("-P INPUT ACCEPT\n-A INPUT -j DROP\n")) is None


def filter_table(machine: Machine, listing: str, restore: Callable[[str], None]) -> common.Run:
    machine.answers["tables"] = json.dumps({"nftables": [{"table": {"family": "ip", "name": "filter"}}]})

    def run(argv: Sequence[str], stdin: str | None = None) -> str:
        if argv[0] == "iptables-nft-restore":
            restore(stdin or "")
            return ""
        return listing if argv[0] == "iptables-nft" else machine.run(argv, stdin)

    return run


def test_a_foreign_rule_that_leads_into_our_chains_is_named(machine: Machine) -> None:
    listing = LISTING + "-A FORWARD -p tcp -j CORRAL-OUT\n"
    run = filter_table(machine, listing, lambda _: pytest.fail("written"))
    with pytest.raises(StopError, match="FORWARD -p tcp -j CORRAL-OUT"):
        netfilter.remove(run)


def test_rules_that_change_under_our_hands_are_looked_at_again(machine: Machine) -> None:
    tries: list[str] = []

    def restore(text: str) -> None:
        tries.append(text)
        raise StopError("{}")

    with pytest.raises(StopError):
        netfilter.remove(filter_table(machine, LISTING, restore), sleep=lambda _: None)
    assert len(tries) == netfilter.TRIES


def test_a_foreign_table_that_is_named_as_ours_stays(machine: Machine) -> None:
    tables = [{"table": {"family": family, "name": "corral"}} for family in ("inet", "netdev")]
    machine.answers["tables"] = json.dumps({"nftables": tables})
    rows = {"nftables": [{"rule": {"comment": "corral:0123456789ab"}}, {"rule": {"comment": "mine"}}]}
    machine.answers["netdev"] = json.dumps(rows)
    machine.answers["inet"] = json.dumps({"nftables": rows["nftables"][:1]})
    assert netfilter.remove(machine.run) == ["table inet corral"]


def test_set_names_are_read_out_of_the_kernel_s_answer() -> None:
    message = b"\x02\x00\x00\x00" + netfilter._attribute(netfilter.ATTR_PROTOCOL, b"\x06")
    message += netfilter._attribute(netfilter.ATTR_NAME, b"corral-pins\0")
    assert netfilter.set_names([message, b"\x02\x00\x00\x00"]) == ["corral-pins"]


LIBRARY = {"iptc/__init__.py": b"", "libxtwrapper.so": b"compiled"}


@pytest.mark.parametrize("hooked", [True, False])
@pytest.mark.parametrize("alternative", [True, False])
def test_the_library_is_brought_only_where_the_legacy_tables_are_used(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, hooked: bool, alternative: bool
) -> None:
    monkeypatch.setattr(legacy, "hooked", lambda _run: hooked)
    monkeypatch.setattr(legacy, "alternative", lambda: alternative)
    monkeypatch.setattr(legacy, "program", lambda *_: "/usr/sbin/iptables-legacy")
    payload = machine.payload("0.1.0")
    payload["library"] = install.base64.b64encode(install.archive(LIBRARY)).decode()
    answer = root.install(payload, machine.places, machine.run)
    brought = hooked or alternative
    assert answer["library"] == ("legacy" if brought else "")
    (directory,) = machine.places.code.iterdir()
    assert (directory / "libxtwrapper.so").exists() == (directory / "iptc").exists() == brought
    lock = machine.places.units / "corral-netfilter.service.d" / legacy.DROP_IN
    assert lock.exists() == brought
    if brought:
        assert lock.read_text() == "[Service]\nStandardInput=file:/run/xtables.lock\n"
        skeleton = machine.places.units / "corral-skeleton.service.d" / legacy.DROP_IN
        commands = [line.partition("=")[2] for line in skeleton.read_text().splitlines() if "=" in line]
        # What fails before the rules must not keep them from being loaded.
        assert all(command.startswith("-+") for command in commands)
        assert commands[0].split()[0] == "-+/usr/sbin/iptables-legacy"
        assert commands[-1].split()[-1] == "/run/xtables.lock"
    # On nft again: what was brought for the other goes.
    monkeypatch.setattr(legacy, "hooked", lambda _run: False)
    monkeypatch.setattr(legacy, "alternative", lambda: False)
    root.install(payload, machine.places, machine.run)
    assert not lock.exists()
    assert not (directory / "iptc").exists()


def test_where_the_program_is_gone_the_units_do_not_name_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(legacy, "hooked", lambda _run: False)
    monkeypatch.setattr(legacy, "alternative", lambda: True)
    payload = machine.payload("0.1.0")
    payload["library"] = install.base64.b64encode(install.archive(LIBRARY)).decode()
    dropped_in = machine.places.units / "corral-skeleton.service.d" / legacy.DROP_IN
    for tool, there in (("/usr/sbin/iptables-legacy", True), ("", False)):
        monkeypatch.setattr(legacy, "program", lambda *_, tool=tool: tool)
        root.install(payload, machine.places, machine.run)
        assert dropped_in.exists() is there


def test_without_the_library_a_legacy_host_is_refused_before_anything_is_replaced(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(legacy, "hooked", lambda _run: True)
    with pytest.raises(StopError, match="pipx inject corral python-iptables"):
        machine.install("0.1.0")
    assert not machine.places.code.exists() or machine.code() == []
    assert not any(path.is_file() for path in machine.places.units.rglob("*"))


def test_docker_is_looked_for_in_legacy_tables_that_exist_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Sequence[str]] = []

    def run(argv: Sequence[str], stdin: str | None = None) -> str:
        ran.append(argv)
        return "-P FORWARD DROP\n-A FORWARD -j DOCKER-USER\n"

    monkeypatch.setattr(legacy, "program", lambda: "/usr/sbin/iptables-legacy")
    monkeypatch.setattr(legacy, "tables", lambda family: [])
    assert not legacy.hooked(run)
    assert ran == []
    monkeypatch.setattr(legacy, "tables", lambda family: ["filter"])
    assert legacy.hooked(run)
    assert legacy.tables("ip6") == ["filter"]
