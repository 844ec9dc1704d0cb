"""Hosts whose engine keeps its rules elsewhere: the legacy tables, and a stand-in for engines without DOCKER-USER.

The stand-in is an engine with ``iptables: false`` and network address translation of the host's own. It is not
an engine with the nftables backend.
"""

from __future__ import annotations

import json
import time

import pytest

from .host import FLOOD, PYTHON, Host, starts, until

FORBIDDEN = "203.0.113.66"
ALLOWED = "https://allowed1.corral.example/"
LEGACY = pytest.mark.engine("bookworm-legacy", reason="the box whose engine is on the legacy tables")
OWN = pytest.mark.engine("trixie-own", reason="the box whose engine writes no rules")
BOTH = pytest.mark.engine(
    "bookworm-legacy",
    "trixie-own",
    reason="the boxes with another driver; every other test is about Docker's chain in nft's iptables",
)


def skeleton(host: Host) -> dict[str, object]:
    """What the writer says of its rules, through the enforcer."""
    script = (
        "import json, os; from enforcer.client import Client, socket_path; "
        "print(json.dumps(Client(socket_path(dict(os.environ)), timeout=10).live('')['skeleton']))"
    )
    return dict(json.loads(host.box.run([PYTHON, "-c", script]).stdout))


def chains(host: Host, program: str) -> str:
    return host.root(program, "-S").stdout


@BOTH
@pytest.mark.case(25)
def test_the_main_job_is_done_behind_the_driver_this_host_needs(host: Host) -> None:
    project = host.project("drivers")
    project.corral("build", timeout=400)
    assert "203.0.113.10" in project.inside("curl", "-sS", ALLOWED).stdout
    assert project.inside("curl", "-sS", "-m", "5", f"https://{FORBIDDEN}/", check=False).returncode == 7
    assert host.internet.packets(FORBIDDEN) == 0
    project.corral("verify", timeout=300)
    found = skeleton(host)
    assert found["problems"] in ([], ["table inet corral is not held"]), found
    wanted = {"legacy": "legacy", "none": "own"}[host.box.engine.rules]
    assert found["driver"] == wanted
    assert ("CORRAL-OUT" in chains(host, "iptables-legacy")) is (wanted == "legacy")
    assert "CORRAL-OUT" not in chains(host, "iptables-nft")
    table = host.root("nft", "list", "table", "inet", "corral").stdout
    assert ("chain sandbox_out" in table) is (wanted == "own")
    assert "chain forward_backstop" in table
    host.control(FORBIDDEN)


@BOTH
@pytest.mark.fault("packets before policy")
def test_nothing_gets_out_before_the_rules_in_several_starts(host: Host) -> None:
    project = host.project("early")
    for _ in range(starts(5)):
        sent = project.inside("python3", "-c", FLOOD, FORBIDDEN, "0.2").stdout
        assert int(sent.split()[-1]) > 100
    assert host.internet.packets(FORBIDDEN) == 0
    host.control(FORBIDDEN)


@BOTH
@pytest.mark.fault("iptables -F")
def test_rules_that_are_flushed_are_mended_and_nothing_gets_out_meanwhile(host: Host) -> None:
    project = host.project("flushed")
    marker = f"touch begun; exec python3 -c '{FLOOD}' {FORBIDDEN} 8"
    flood = project.start("sh", "-c", marker, marker="begun")
    legacy = host.box.engine.rules == "legacy"
    since = time.time()
    if legacy:
        host.root("iptables", "-F")
        until(lambda: "-j CORRAL-OUT" in chains(host, "iptables"), 15, "the rules stand again")
    else:
        host.root("nft", "flush", "chain", "inet", "corral", "sandbox_out", check=False)
        host.root("nft", "flush", "ruleset")
        until(
            lambda: "goto refuse" in host.root("nft", "list", "table", "inet", "corral", check=False).stdout,
            15,
            "the rules stand again",
        )
    if legacy:
        # It is told when the next look finds nothing more to mend.
        until(lambda: "healed" in host.journal("-u", "corral-netfilter", since=since), 15, "told")
        # Docker's own jump is Docker's to mend.
        assert "FORWARD does not lead through DOCKER-USER first" in str(skeleton(host)["problems"])
    assert flood.wait(timeout=60) == 0
    assert host.internet.packets(FORBIDDEN) == 0
    host.restart_docker()
    if not legacy:
        host.root("systemctl", "restart", "nftables")
    host.wait_enforcer()
    until(lambda: "hook" not in str(skeleton(host)["problems"]), 30, "Docker's jump")
    assert "203.0.113.10" in project.inside("curl", "-sS", ALLOWED).stdout
    host.control(FORBIDDEN)


@LEGACY
def test_without_its_library_the_installation_is_refused_with_the_fix(host: Host) -> None:
    host.box.run(["pipx", "runpip", "corral", "uninstall", "-y", "python-iptables"], timeout=120)
    try:
        done = host.box.run(["corral", "install"], check=False, timeout=180)
        assert done.returncode == 1
        assert "python-iptables is not installed" in done.stderr
        assert "pipx inject corral python-iptables" in done.stderr
    finally:
        host.box.run(["pipx", "inject", "corral", "python-iptables"], timeout=300)
        host.box.run(["corral", "install"], timeout=180)


@LEGACY
def test_the_rules_are_loaded_at_boot_also_where_the_program_of_the_legacy_tables_is_gone(host: Host) -> None:
    program = "/usr/sbin/iptables-legacy"
    host.root("mv", program, f"{program}.away")
    # As at a boot: nobody has made the lock file yet.
    host.root("rm", "/run/xtables.lock")
    try:
        host.root("systemctl", "restart", "corral-skeleton.service", "corral-netfilter.service")
        assert host.root("systemctl", "is-active", "corral-skeleton.service").stdout == "active\n"
        assert host.root("systemctl", "is-active", "corral-netfilter.service").stdout == "active\n"
    finally:
        host.root("mv", f"{program}.away", program)
        host.root("systemctl", "restart", "corral-skeleton.service", "corral-netfilter.service")
        host.wait_enforcer()


@BOTH
def test_uninstalling_leaves_nothing_in_any_table(host: Host) -> None:
    host.end_projects()
    host.box.run(["corral", "uninstall", "--yes"], timeout=180)
    try:
        for program in ("iptables-legacy", "ip6tables-legacy", "iptables-nft", "ip6tables-nft"):
            assert "corral" not in chains(host, program).lower(), program
        assert "corral" not in host.root("nft", "list", "ruleset").stdout
    finally:
        host.box.run(["corral", "install"], timeout=180)
        host.wait_enforcer()
