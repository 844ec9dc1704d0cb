"""Every check of corral doctor finds what it is for, and nothing else; the machinery around them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

from corral import __version__
from corral.doctor import page
from corral.doctor.diagnosis import (
    Result,
    State,
    body,
    diagnose,
    exit_code,
    render,
    select,
)
from corral.doctor.effects import AS_ROOT, PROBES, SYSTEM_UNITS, Host
from corral.doctor.model import PROBE_FAILED, CannotTell, Severity, Table
from corral.doctor.records import (
    Disk,
    Disks,
    Enforcer,
    EnforcerUnit,
    Firewalls,
    Linger,
    Manager,
    Modules,
    Programs,
    Resolvers,
    Routing,
    SandboxUnits,
    Security,
    Settings,
    Skeleton,
    Sysctls,
    SystemUnits,
    Tables,
    Unit,
    Who,
    WriterSocket,
)
from corral.doctor.rules_fence import kind
from corral.hostcheck import Choice, Facts
from corral.membership import Membership
from enforcer.netfilter.plan import SET_TYPES, Observed, plan
from enforcer.netfilter.skeleton import DOCKER_USER
from enforcer.netfilter.skeleton import Skeleton as Rules
from policy import versions
from policy.errors import CorralError, EnforcerError, EngineError, PolicyError
from tests.unit.corral.test_hostcheck import GOOD, by_path

MEMBER = Membership(1000, "agnes", 999, member=True)
UNITS = {name: Unit() for name in SYSTEM_UNITS}
SUBNET = IPv4Network("172.16.0.0/26")
DEFAULT_ROUTE = {"dst": "default", "dev": "eth0"}
MAIN_RULES = (
    {"priority": 0, "src": "all", "table": "local"},
    {"priority": 32766, "src": "all", "table": "main"},
)
BRIDGED = Routing(
    {"corral-0a1b2c3d": SUBNET},
    {"corral-0a1b2c3d": {"dev": "corral-0a1b2c3d"}},
    MAIN_RULES,
    (DEFAULT_ROUTE, {"dst": "172.16.0.0/26", "dev": "corral-0a1b2c3d"}),
)
RANGES = (IPv4Network("172.16.0.0/16"),)
HOOK = "FORWARD does not lead through DOCKER-USER first"
UNFIT = (
    "Docker's chain is hooked in the legacy tables, and what corral needs for those is not here: install it"
)


def answered(release: str = __version__, **writer: Any) -> Enforcer:
    told = {"reachable": True, **versions.describe(release, versions.WRITER_SCHEMAS), **writer}
    return Enforcer({**versions.describe(release), "writer": told})


HEALTHY: dict[type, Any] = {
    Who: Who(MEMBER),
    Facts: GOOD,
    Manager: Manager(),
    EnforcerUnit: EnforcerUnit(Unit()),
    SandboxUnits: SandboxUnits({"corral-sandbox-0a1b2c3d.service": Unit()}),
    SystemUnits: SystemUnits(UNITS),
    Enforcer: answered(),
    Skeleton: Skeleton(),
    WriterSocket: WriterSocket("/run/corral/netfilter.sock"),
    Sysctls: Sysctls(),
    Tables: Tables(),
    Programs: Programs(),
    Linger: Linger(),
    Firewalls: Firewalls(),
    Routing: BRIDGED,
    Settings: Settings(ranges=RANGES),
    Resolvers: Resolvers({"203.0.113.53": ""}),
    Modules: Modules({"ip_set": "loaded", "xt_set": "built-in", "br_netfilter": "loadable", "x": "unknown"}),
    Disks: Disks((Disk("/home/agnes/.local/share/corral", 50 << 30, 1 << 20),)),
    Security: Security(),
}


def system(name: str, **changes: Any) -> SystemUnits:
    return SystemUnits({**UNITS, name: replace(Unit(), **changes)})


def routed(row: dict[str, Any]) -> Routing:
    return replace(BRIDGED, routes=(*BRIDGED.routes, row))


SOCKET_UNIT, WRITER_UNIT = "corral-netfilter.socket", "corral-netfilter.service"
GONE = Unit(load="not-found", active="inactive", sub="dead", enabled="")
FAILED = Unit(active="failed", sub="failed")
DEAD = Enforcer(error=EnforcerError("the enforcer is not running", "start it"))
UNREACHABLE = {"reachable": False, "version": None}
DENIED = EngineError("you may not use Docker: permission denied on /run/docker.sock", "newgrp docker")
LEGACY = Tables("legacy")

# id -> records that differ from a healthy host's, and a part of what has to be said
STAGED: dict[str, tuple[list[Any], str]] = {
    "COR-001": ([Who(Membership(0, "root", 999, member=False))], "this is root"),
    "COR-002": ([Facts(GOOD.choice, docker=False, trouble=EngineError("there is no /run/docker.sock"))], "not installed"),
    "COR-003": ([Facts(GOOD.choice, trouble=EngineError("nobody answers", "start it"))], "nobody answers"),
    "COR-004": ([Facts(GOOD.choice, trouble=DENIED)], "permission denied"),
    "COR-005": ([Facts(Choice("tcp://203.0.113.9:2375", "DOCKER_HOST"))], "DOCKER_HOST"),
    "COR-006": ([Facts(Choice("ssh://build.example", "context", "far"))], "context far"),
    "COR-007": ([replace(GOOD, system="Docker Desktop")], "Docker Desktop"),
    "COR-008": ([Facts(by_path("/home/a/.colima/default/docker.sock"))], "Colima"),
    "COR-009": ([replace(GOOD, components=("Podman Engine",))], "podman"),
    "COR-010": ([replace(GOOD, root="/var/snap/docker/common/var-lib-docker")], "snap"),
    "COR-011": ([replace(GOOD, security=("rootless",))], "rootless"),
    "COR-012": ([replace(GOOD, security=("userns",))], "userns-remap"),
    "COR-013": ([replace(GOOD, version="18.09.1")], "18.09.1"),
    "COR-014": ([replace(GOOD, no_iptables="/etc/docker/daemon.json")], "daemon.json"),
    "COR-015": ([replace(GOOD, firewall="nftables")], "nftables"),
    "COR-016": ([replace(GOOD, missing=("br-0123456789ab",))], "br-0123456789ab"),
    "COR-017": ([replace(GOOD, choice=by_path("/srv/d.sock", "DOCKER_HOST", "/srv/d.sock"))], "/srv/d.sock"),
    "COR-019": ([replace(GOOD, unguarded="started without corral's rules")], "without corral's rules"),
    "COR-018": ([replace(GOOD, controllers_missing=("pids", "memory"))], "pids, memory"),
    "COR-020": ([Skeleton((HOOK,))], "DOCKER-USER"),
    "COR-021": ([Skeleton(("DOCKER-USER (IPv4 filter) lacks our rules at its top",))], "lacks our rules"),
    "COR-022": ([Skeleton(("table inet corral is missing",))], "is missing"),
    "COR-023": ([Sysctls(bridge4=0, bridge6=None)], "iptables is 0; net.bridge.bridge-nf-call-ip6tables does not exist"),
    "COR-024": ([Skeleton((UNFIT,), "own")], "legacy tables"),
    "COR-025": ([Skeleton((), "nft"), LEGACY], "legacy"),
    "COR-026": ([Skeleton(("FORWARD (IPv6 filter) lacks our rules at its top",))], "IPv6"),
    "COR-027": ([Skeleton(("set corral-pins is hash:ip, not hash:ip,port,ip: not ours",))], "corral-pins"),
    "COR-028": ([Programs({"ip6tables-nft": "iptables"})], "ip6tables-nft"),
    "COR-040": ([Manager(error="Failed to connect to bus")], "Failed to connect"),
    "COR-041": ([EnforcerUnit(GONE), DEAD], "no unit"),
    "COR-042": ([EnforcerUnit(Unit(missing=("/gone/corral-enforcer",)))], "/gone/corral-enforcer"),
    "COR-043": ([EnforcerUnit(Unit(active="inactive", sub="dead")), DEAD], "inactive (dead)"),
    "COR-044": ([EnforcerUnit(Unit(active="activating", sub="auto-restart")), DEAD], "started again"),
    "COR-045": ([DEAD], "the enforcer is not running"),
    "COR-046": ([EnforcerUnit(FAILED), DEAD, Settings(error=PolicyError("enforcer.toml: bad"))], "enforcer.toml: bad"),
    "COR-047": ([answered("0.0.9")], "0.0.9"),
    "COR-048": ([Settings(newer=CorralError("the files are of version 9"), ranges=RANGES)], "version 9"),
    "COR-049": ([WriterSocket("/x", exists=False), system(SOCKET_UNIT, active="inactive")], "is inactive"),
    "COR-050": ([answered(**UNREACHABLE, error="no permission for /x")], "no permission"),
    "COR-051": ([answered(**UNREACHABLE, error="broke off its answer")], "broke off"),
    "COR-052": ([system("corral-skeleton.service", enabled="disabled")], "corral-skeleton.service is disabled"),
    "COR-053": ([system(WRITER_UNIT, missing=("/opt/corral/x/corral-netfilter",))], "/opt/corral/x"),
    "COR-054": ([Linger(on=False)], "agnes does not linger"),
    "COR-055": ([SandboxUnits({"corral-sandbox-0a1b2c3d.service": FAILED})], "0a1b2c3d.service is failed"),
    "COR-060": ([Sysctls(ip_forward=0)], "ip_forward"),
    "COR-061": ([routed({"dst": "172.16.0.0/27", "dev": "tun0"})], "172.16.0.0/27 by tun0"),
    "COR-062": ([routed({"dst": "172.16.0.0/12", "dev": "tun0"}), Settings(ranges=(IPv4Network("10.66.0.0/16"),))], "172.16.0.0/12 by tun0"),
    "COR-063": ([replace(BRIDGED, lookups={"corral-0a1b2c3d": {"dev": "tailscale0", "table": "52"}})], "at tailscale0 in table 52"),
    "COR-064": ([routed({"dst": "172.16.0.0/16", "dev": "br-x", "table": "7"})], "no free subnet"),
    "COR-065": ([replace(BRIDGED, outside=False)], "no route"),
    "COR-066": ([Resolvers({"203.0.113.53": "no answer"})], "203.0.113.53: no answer"),
    "COR-067": ([Resolvers({"203.0.113.53": "no answer", "203.0.113.54": ""})], "203.0.113.53: no answer"),
    "COR-070": ([Modules({"ip_set": "absent"}, "6.1")], "ip_set"),
    "COR-071": ([Modules({"ip_set": "unknown"}, "6.1", gone=True)], "6.1"),
    "COR-072": ([Programs({"nft": "nftables"})], "nft"),
    "COR-073": ([Disks((Disk("/var/lib/docker", 1 << 20, 1 << 20),))], "/var/lib/docker: 1 MiB"),
    "COR-074": ([Disks((Disk("/var/lib/docker", 99 << 20, 1 << 20),))], "/var/lib/docker: 99 MiB"),
    "COR-080": ([Firewalls(("firewalld",))], "firewalld"),
    "COR-081": ([Firewalls(("ufw",))], "ufw"),
    "COR-082": ([Security(selinux="enforcing")], "SELinux"),
    "COR-083": ([Security(apparmor=True)], "AppArmor"),
    "COR-084": ([Sysctls(user_namespaces=0)], "max_user_namespaces"),
}  # fmt: skip


def looked(*changes: Any, failing: dict[type, Exception] | None = None) -> list[Result]:
    """Diagnose a host that differs from a healthy one by some records."""
    records = {**HEALTHY, **{type(record): record for record in changes}}

    def probe(kind: type) -> Callable[[Host], Any]:
        def look(_: Host) -> Any:
            if failing and kind in failing:
                raise failing[kind]
            return records[kind]

        look.__name__ = PROBES[kind].__name__
        return look

    return diagnose(HOST, select(()), {kind: probe(kind) for kind in PROBES})


HOST = Host({}, Path("/home/agnes"), 1000)


def found(results: list[Result]) -> dict[str, str]:
    return {result.check.id: result.text for result in results if result.state is State.FOUND}


def test_a_host_in_order_has_nothing_wrong_and_every_check_was_made() -> None:
    results = looked()
    assert {result.check.id for result in results if result.state is not State.OK} == set()
    assert exit_code(results) == 0


def test_every_check_is_staged() -> None:
    assert set(STAGED) == {check.id for check in select(())} - {PROBE_FAILED}
    assert {need for check in select(()) for need in check.needs} == set(PROBES) == set(HEALTHY)


@pytest.mark.parametrize("ident", STAGED)
def test_what_is_broken_is_found_by_its_check_and_by_no_other(ident: str) -> None:
    changes, text = STAGED[ident]
    results = looked(*changes)
    assert list(found(results)) == [ident]
    assert text in found(results)[ident]
    (result,) = (result for result in results if result.state is State.FOUND)
    assert result.fix
    assert exit_code(results) == int(result.check.severity is Severity.BROKEN)


def test_the_fix_names_the_user_of_this_host() -> None:
    for ident in ("COR-040", "COR-054"):
        (result,) = (row for row in looked(*STAGED[ident][0]) if row.state is State.FOUND)
        assert result.fix == "sudo loginctl enable-linger agnes"


@pytest.mark.parametrize(
    ("damage", "subject"),
    [
        ({"backstop": None}, "backstop"),
        ({"bridge_filter": (0, 1)}, "filter"),
        ({"sets": {**SET_TYPES, "corral-pins": "hash:ip"}}, "set"),
        ({"sets": {name: kind for name, kind in SET_TYPES.items() if name != "corral-pins"}}, "rules"),
        ("FORWARD", "hook"), (DOCKER_USER, "rules"), ("INPUT", "rules"), ("CORRAL-OUT", "rules"), ("v6", "ipv6"),
    ],
)  # fmt: skip
def test_what_the_writer_says_is_recognised(damage: Any, subject: str) -> None:
    """The texts are the writer's own: this fails when they change."""
    seen = standing()
    assert plan(Rules(), seen, None).problems == ()
    if isinstance(damage, dict):
        seen = replace(seen, **damage)
    else:
        family = 6 if damage == "v6" else 4
        tables: dict[Any, Any] = {key: dict(chains) for key, chains in seen.tables.items()}
        tables[family, "filter"]["CORRAL-DENY6" if damage == "v6" else damage] = []
        seen = replace(seen, tables=tables)
    assert {kind(problem.text) for problem in plan(Rules(), seen, None).problems} == {subject}


def standing() -> Observed:
    """What the kernel holds when nothing is wrong."""
    rules = Rules()
    tables: dict[tuple[int, str], dict[str, list[str]]] = {
        (4, "filter"): {},
        (4, "nat"): {},
        (6, "filter"): {},
    }
    for family, chains in ((4, rules.chains4), (6, rules.chains6)):
        for name, own in chains.items():
            tables[family, "filter"][name] = [rule.iptables() for rule in own]
    for hook in rules.hooks:
        tables[hook.family, hook.table].setdefault(hook.rule.chain, []).append(hook.rule.iptables())
    tables[4, "filter"]["FORWARD"] = [f"-j {DOCKER_USER}"]
    backstop = {c.name: c.shape for c in rules.backstop}
    return Observed(tables, backstop, sets=SET_TYPES)


def test_without_docker_and_without_corral_only_the_causes_are_found() -> None:
    results = looked(
        Facts(GOOD.choice, docker=False, trouble=EngineError("there is no socket")),
        EnforcerUnit(GONE),
        DEAD,
        WriterSocket("/x", exists=False, permitted=False),
        SystemUnits(dict.fromkeys(UNITS, GONE)),
        Sysctls(ip_forward=0),
        failing={Skeleton: CannotTell("the enforcer is not running")},
    )
    assert list(found(results)) == ["COR-002", "COR-041", "COR-049"]
    assert exit_code(results) == 1


def test_root_is_told_to_run_it_as_the_user() -> None:
    own = (Manager, EnforcerUnit, Enforcer, Skeleton, Linger)
    results = looked(
        Who(Membership(0, "root", 999, member=False)), failing=dict.fromkeys(own, CannotTell(AS_ROOT))
    )
    assert list(found(results)) == ["COR-001"]
    assert "as the user who runs agents" in render(results, every=False, colour=False)


def test_an_unset_docker_host_and_the_same_socket_by_another_name_are_no_other_engine() -> None:
    for said in ("", "unix:///run/docker.sock", "unix:///var/run/docker.sock"):
        assert found(looked(Manager(docker_host=said))) == {}
    assert list(found(looked(Manager(docker_host="unix:///srv/d.sock")))) == ["COR-017"]


def test_a_writer_that_ends_again_and_again_is_the_cause_of_a_silent_enforcer() -> None:
    results = looked(DEAD, system(WRITER_UNIT, active="activating", sub="auto-restart"))
    assert list(found(results)) == ["COR-051"]


def test_a_probe_that_raises_is_a_finding_and_its_checks_are_not_made() -> None:
    results = looked(failing={Sysctls: ValueError("no number"), Disks: CorralError("df is missing")})
    texts = [result.text for result in results if result.state is State.FOUND]
    assert texts == ["disks: df is missing", "sysctls: ValueError: no number"]
    unknown = {result.check.id for result in results if result.state is State.UNKNOWN}
    assert unknown == {check.id for check in select(()) if {Sysctls, Disks} & set(check.needs)}
    assert exit_code(results) == 1


def test_a_rule_that_raises_is_a_finding() -> None:
    results = looked(SystemUnits({}))
    assert any("KeyError" in text for text in found(results).values())
    assert set(found(results)) == {PROBE_FAILED}


def test_a_probe_that_does_not_end_is_a_finding_and_holds_nothing_up() -> None:
    forever = threading.Event()
    try:
        results = diagnose(
            HOST,
            select(["COR-060", PROBE_FAILED]),
            {**fixed(), Sysctls: lambda _: forever.wait()},
            patience=0.2,
        )
    finally:
        forever.set()
    assert [result.check.id for result in results if result.state is State.FOUND] == [PROBE_FAILED]
    assert "did not end within 0.2 s" in render(results, every=False, colour=False)


def fixed() -> dict[type, Callable[[Host], Any]]:
    return {kind: (lambda _, record=record: record) for kind, record in HEALTHY.items()}


def test_named_checks_alone_are_made_and_shown_when_all_is_well() -> None:
    asked: list[type] = []

    def sysctls(_: Host) -> Any:
        asked.append(Sysctls)
        return Sysctls()

    def never(_: Host) -> Any:
        pytest.fail("nobody needs this")

    checks = select(["cor-023"])
    results = diagnose(HOST, checks, {**dict.fromkeys(PROBES, never), Sysctls: sysctls})
    assert asked == [Sysctls]
    text = render(results, every=True, colour=False)
    assert "COR-023 fine" in text and checks[0].probe in text
    assert text.endswith("1 checks: 1 fine, 0 broken, 0 advice, 0 not checked")


def test_an_id_that_does_not_exist_is_no_check() -> None:
    with pytest.raises(LookupError, match="COR-1;"):
        select(["COR-1"])


def test_an_id_is_given_once() -> None:
    table = Table()
    check = select(["COR-001"])[0]
    table.add(check)
    with pytest.raises(ValueError, match="twice"):
        table.add(check)


def test_what_is_broken_comes_before_advice_with_cause_and_fix() -> None:
    text = render(looked(Linger(on=False), Sysctls(ip_forward=0)), every=False, colour=False)
    assert text.index("COR-060 broken: this host does not forward") < text.index("COR-054 advice:")
    assert "  found: net.ipv4.ip_forward is 0\n  cause: " in text
    assert "  fix: sudo sysctl -w net.ipv4.ip_forward=1" in text
    assert "\033[" not in text
    assert "\033[31m" in render(looked(Sysctls(ip_forward=0)), every=False, colour=True)


def test_json_has_every_check_with_state_cause_and_fix() -> None:
    told = body(looked(Sysctls(ip_forward=0), failing={Linger: CannotTell("no")}))
    assert (told["broken"], told["advice"], told["unknown"]) == (1, 0, 1)
    assert len(told["checks"]) == told["ok"] + 2
    row = next(row for row in told["checks"] if row["id"] == "COR-060")
    assert (row["state"], row["found"], row["severity"]) == ("found", "net.ipv4.ip_forward is 0", "broken")
    assert all(row[field] for field in ("title", "probe", "cause", "fix"))
    assert next(row for row in told["checks"] if row["id"] == "COR-054")["unknown"] == "no"


def test_the_page_is_the_table() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run: python -m corral.doctor.page"
