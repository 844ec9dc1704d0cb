"""Fault table: tools missing or failing at the k-th call, no space for state, two of everything at once."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from .flooding import ALLOWED_URL, flooding, standing
from .host import Host, until

TOOLS = ("nft", "iptables-nft", "iptables-nft-restore", "ip6tables-nft", "ip6tables-nft-restore")
BIN = "/usr/sbin"

# In place of a tool: fails at the writer's K-th call since it was put there, and is the tool otherwise. The engine
# calls it as well, and a rootless one as the same user.
WRAPPER = """\
#!/bin/bash
if tr '\\0' ' ' 2>/dev/null </proc/$PPID/cmdline | grep -q corral-netfilter; then
  exec 9<{calls}; flock 9
  n=$(cat {calls}); n=$((n + 1)); echo $n > {calls}
  exec 9<&-
  [ $n -eq {k} ] && {{ echo "injected failure" >&2; exit 1; }}
fi
exec -a {bin}/{tool} {bin}/{tool}.real "$@"
"""


def calls(host: Host) -> str:
    """Where the wrapper counts: the writer can write nowhere else."""
    return f"{host.engine.state}/calls"


def set_aside(host: Host, tool: str) -> None:
    host.shell(f"mv {BIN}/{tool} {BIN}/{tool}.real", user="root")


def put_back(host: Host) -> None:
    for tool in TOOLS:
        host.shell(
            f"if [ -e {BIN}/{tool}.real ] || [ -L {BIN}/{tool}.real ]; then mv -f {BIN}/{tool}.real {BIN}/{tool}; fi",
            user="root",
        )
    host.root("rm", "-f", calls(host))


@pytest.fixture
def tools(host: Host) -> Iterator[Host]:
    """Tools that a test set aside are back afterwards, and the rules stand."""
    try:
        yield host
    finally:
        put_back(host)
        host.engine.systemctl("restart", "corral-netfilter")
        until(standing(host), 30, "the rules stand")


@pytest.mark.case(21)
@pytest.mark.fault("tool missing")
@pytest.mark.parametrize("tool", ["nft", "iptables-nft", "ip6tables-nft"])
def test_a_missing_tool_refuses_a_start_and_opens_nothing(tools: Host, tool: str) -> None:
    host = tools
    fresh = host.project("tool-missing")
    fresh.inside("true")
    with flooding(host, "tool") as flood:
        set_aside(host, tool)
        done = fresh.inside("touch", "ran", check=False)
        assert done.returncode == 1
        assert tool in done.stderr
        assert not fresh.exists("ran")
        assert fresh.containers() == []
        assert flood.leaked == (0, 0)
        put_back(host)
        host.engine.systemctl("reset-failed", "corral-netfilter.service", check=False)
        host.engine.systemctl("restart", "corral-netfilter")
        host.wait_enforcer()
        fresh.inside("touch", "ran")
        assert fresh.exists("ran")


@pytest.mark.case(21)
@pytest.mark.fault("tool failing at the k-th call")
def test_a_tool_that_fails_once_is_survived_wherever_it_happens(tools: Host) -> None:
    host = tools
    with flooding(host, "kth") as flood:
        for tool in ("nft", "iptables-nft", "iptables-nft-restore", "ip6tables-nft-restore"):
            set_aside(host, tool)
            for k in (1, 2, 3, 5):
                text = WRAPPER.format(k=k, bin=BIN, tool=tool, calls=calls(host))
                host.shell(f"echo 0 > {calls(host)}; chmod 666 {calls(host)}", user="root")
                host.box.write(f"{BIN}/{tool}", text, owner="root", mode=0o755)
                # Something to mend, as often as it takes to get to the k-th call, and something to grant.
                for _ in range(4 * k):
                    since = time.time()
                    host.netadmin_shell("iptables -F DOCKER-USER; ip6tables -F INPUT", check=False)
                    until(standing(host), 30, f"the rules stand while call {k} of {tool} fails")
                    # Flushed again before the writer has seen its work hold, it would be somebody who fights with it.
                    until(
                        lambda since=since: "healed after" in host.writer_journal(since),
                        60,
                        f"the writer has looked at it while call {k} of {tool} fails",
                    )
                    # Two of them may be mended in one go.
                    if int(host.root("cat", calls(host)).stdout) >= k:
                        break
                marker = f"ran-{tool}-{k}"
                done = flood.project.inside("touch", marker, check=False)
                assert (done.returncode == 0) == flood.project.exists(marker), (tool, k, done.stderr)
                assert done.returncode in (0, 1)
                until(standing(host), 30, f"the rules stand after call {k} of {tool} failed")
                assert int(host.root("cat", calls(host)).stdout) >= k, "the failure was injected"
            put_back(host)
        assert flood.leaked == (0, 0)
        host.wait_enforcer()
        flood.works()


@pytest.mark.fault("disk full for state")
def test_a_full_disk_refuses_a_start_and_opens_nothing(host: Host) -> None:
    with flooding(host, "disk") as flood:
        fresh = host.project("full-state")
        fresh.inside("true")
        state = f"{host.box.home}/.local/share/corral"
        where = host.box.run(["sh", "-c", f"ls -d {state}/full-state-*"]).stdout.strip()
        for directory in (where, f"{state}/enforcer"):
            host.shell(
                # Approved it still is: what is tested is what cannot be written.
                f"keep=$(mktemp -d); cp -p {directory}/approved.json $keep 2>/dev/null || true; "
                f"mount -t tmpfs -o size=64k,uid=1000,gid=1000 full {directory}; "
                f"cp -p $keep/approved.json {directory}/ 2>/dev/null || true; rm -r $keep; "
                f"cat /dev/zero > {directory}/filler 2>/dev/null || true; chown 1000:1000 {directory}/filler",
                user="root",
            )
            try:
                done = fresh.inside("touch", "ran", check=False)
                if directory == where:
                    assert done.returncode == 1
                    assert "No space left" in done.stderr
                    assert not fresh.exists("ran")
                assert (done.returncode == 0) == fresh.exists("ran")
                assert flood.leaked == (0, 0)
                flood.works()
            finally:
                host.root("umount", directory)
        assert fresh.containers() == []
        fresh.inside("touch", "ran")
        assert fresh.exists("ran")


@pytest.mark.fault("two processes applying at once")
def test_two_of_everything_at_once_end_in_one_state(host: Host) -> None:
    with flooding(host, "two") as flood:
        second = host.box.run(["corral-enforcer"], check=False, timeout=30)
        assert second.returncode != 0
        assert "another" in second.stderr.lower() or "already" in second.stderr.lower()
        # The boot-time run and the writer mend the same damage, several times over.
        twice = "true"
        if not host.box.engine.rootless:  # there it is a part of the engine's start, before there is a writer
            unit = host.root("systemctl", "cat", "corral-skeleton").stdout
            starts = next(line for line in unit.splitlines() if line.startswith("ExecStart="))
            twice = f"{starts.partition('=')[2]} & {starts.partition('=')[2]} & wait"
        for _ in range(3):
            host.netadmin_shell(f"iptables -F DOCKER-USER; iptables -F INPUT; {twice}")
        until(standing(host), 20, "the rules stand")
        for chain, word in (("DOCKER-USER", "CORRAL-OUT"), ("INPUT", "CORRAL-HOST")):
            assert host.netadmin("iptables", "-S", chain).stdout.count(word) == 1
        # Two starts at once of one sandbox, which apply at once.
        done = host.shell(
            f"cd {flood.project.path}; seq 3 | xargs -P 3 -I N corral run -- sh -c "
            f"'curl -sS -m 10 {ALLOWED_URL} > got-N'"
        )
        assert done.returncode == 0
        assert all("203.0.113.10" in flood.project.read(f"got-{n}") for n in (1, 2, 3))
