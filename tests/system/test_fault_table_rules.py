"""Fault table: other programs change the host's rules while a sandbox floods."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from .flooding import after_each, flooding, standing
from .host import Host, until

# A firewall's reload: everything away, policies open, then its own rules.
RELOAD = """\
iptables-save > /run/firewall.rules
iptables -P INPUT ACCEPT; iptables -P FORWARD ACCEPT; iptables -F; iptables -X || true; iptables -t nat -F
iptables -A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
iptables -A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
iptables -A FORWARD -i corral-+ -j ACCEPT
"""


HELD = pytest.mark.engine(
    "trixie", "sid", "rootless", reason="nft of Debian 12 cannot say that a table is held (docs/limits.md)"
)


@pytest.fixture
def docker_again(host: Host) -> Iterator[Host]:
    """Docker's own rules are put back afterwards: it does not mend them itself."""
    try:
        yield host
    finally:
        for table in ("filter", "nat", "mangle"):
            host.netadmin("iptables", "-t", table, "-P", "OUTPUT", "ACCEPT", check=False)
        host.netadmin_shell("while iptables -D FORWARD -j ACCEPT; do :; done 2>/dev/null || true")
        host.netadmin_shell("while iptables -D INPUT -j ACCEPT; do :; done 2>/dev/null || true")
        host.restart_docker()


@pytest.mark.case(12)
@pytest.mark.fault("iptables -F DOCKER-USER")
@pytest.mark.fault("iptables -F")
@pytest.mark.fault("iptables -F -X")
@pytest.mark.fault("jump deleted")
@pytest.mark.fault("-I FORWARD 1 -j ACCEPT")
@pytest.mark.fault("-I INPUT 1 -j ACCEPT")
@pytest.mark.fault("firewalld-style reload")
def test_nothing_leaves_while_others_flush_and_insert(docker_again: Host) -> None:
    host = docker_again
    since = time.time()
    with flooding(host, "rules") as flood:
        found = after_each(
            host,
            flood,
            [
                "iptables -F DOCKER-USER",
                "iptables -D DOCKER-USER 1",
                "iptables -I FORWARD 1 -j ACCEPT",
                "iptables -I INPUT 1 -j ACCEPT",
                "iptables -P FORWARD ACCEPT; iptables -F",
                "iptables -F; iptables -X || true",
                RELOAD,
            ],
        )
        assert {leaked for _, leaked in found.values()} == {(0, 0)}
        # Not left alone with the backstop: what was mended is told.
        told = host.writer_journal(since)
        assert "DOCKER-USER (IPv4 filter) lacks our rules at its top" in told
        assert "INPUT (IPv4 filter) lacks our rules at its top" in told


@HELD
@pytest.mark.representative
@pytest.mark.case(12)
@pytest.mark.fault("nft flush ruleset")
def test_nothing_leaves_while_everything_is_flushed(docker_again: Host) -> None:
    host = docker_again
    with flooding(host, "nft-flush") as flood:
        found = after_each(host, flood, ["nft flush ruleset"] * 3)
        assert {leaked for _, leaked in found.values()} == {(0, 0)}


@pytest.mark.case(12)
@pytest.mark.fault("nft flush ruleset, the table not held")
@pytest.mark.engine("bookworm", reason="nft of the others holds the table")
def test_a_table_that_cannot_be_held_is_mended_and_nothing_leaves_from_then_on(docker_again: Host) -> None:
    host = docker_again
    with flooding(host, "nft-flush") as flood:
        for command in ("nft flush ruleset", "nft delete table inet corral", "nft flush ruleset"):
            after_each(host, flood, [command])
            host.internet.reset_counters()
            flood.sink.reset()
            # The flood goes on, and its end counts from here. What is allowed waits for Docker's own rules.
            before = flood.handed_over
            until(lambda before=before: flood.handed_over > before + 3000, 30, "the flood goes on")  # type: ignore[misc]
            assert flood.leaked == (0, 0)


@HELD
@pytest.mark.fault("nft flush ruleset")
def test_nobody_else_changes_the_table_that_holds(host: Host) -> None:
    for command in ("delete table inet corral", "flush chain inet corral forward_backstop"):
        done = host.netadmin("nft", *command.split(), check=False)
        assert "Operation not permitted" in done.stderr
    assert standing(host)()


@HELD
@pytest.mark.fault("nft flush ruleset while the writer is away")
def test_a_writer_that_comes_back_takes_the_table_again(docker_again: Host) -> None:
    host = docker_again
    host.engine.systemctl("restart", "corral-netfilter")
    until(
        lambda: (
            host.netadmin("nft", "add", "chain", "inet", "corral", "foreign", check=False).returncode != 0
        ),
        20,
        "the table is held again",
    )
    # Flushed while nobody held it: the next writer makes it anew and holds it.
    host.engine.systemctl("stop", *host.engine.writer_units)
    host.netadmin("nft", "flush", "ruleset")
    host.engine.systemctl("start", *host.engine.writer_units)
    until(standing(host), 20, "the rules stand")
    assert host.netadmin("nft", "delete", "table", "inet", "corral", check=False).returncode != 0
