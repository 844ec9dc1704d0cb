"""``corral uninstall`` on a real host: what goes, what stays, and that nothing opens on the way."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import pytest

from tests.lab import Box

from .host import (
    BASE_POLICY,
    CONFIG,
    ENFORCER,
    FLOOD,
    LIVE_RESTORE,
    OWN_NAMESPACES,
    PIPX,
    PYTHON,
    Done,
    Host,
    Project,
    until,
)

EVE = 1001
STATE = ".local/share/corral"

# Everything that corral could leave behind. Counters move by themselves.
LOOK_NETWORK = r"""
for tool in iptables ip6tables; do for table in filter nat mangle raw; do
  $tool -t $table -S 2>/dev/null | sed "s/^/$tool $table /"
done; done
ipset list -n
nft list ruleset | sed -E 's/ packets [0-9]+ bytes [0-9]+//'
ip -br link | awk '{print $1}' | grep corral
true
"""
LOOK = r"""
systemctl list-unit-files --no-legend --plain --no-pager | awk '{print $1, $2}' | sort
systemctl list-units --all --no-legend --plain --no-pager 'corral*' | awk '{print $1}'
ss -xlH | awk '{print $5}' | grep -c corral || true
ls -d /opt/* /run/*corral* /run/private/* /var/lib/*corral* /usr/local/lib/*corral* 2>/dev/null
find /etc -name '*corral*' | sort
find /etc/systemd /etc/modules-load.d -newer /etc/debian_version -print | sort
ip -br link | awk '{print $1}' | grep corral
true
"""
LOOK_ENGINE = r"""
docker network ls --format '{{.Name}} {{.Driver}}' | sort
docker ps -a --format '{{.Names}}' | sort
docker images --format '{{.Repository}}:{{.Tag}}' | grep -v ^kept-by-the-lab | sort
"""
LOOK_USER = r"""
systemctl --user list-unit-files --no-legend --plain --no-pager | awk '{print $1, $2}' | sort
systemctl --user list-units --all --no-legend --plain --no-pager 'corral*' | awk '{print $1}'
find ~/.config/systemd -name '*corral*' 2>/dev/null
ls -d ~/.local/share/corral/netfilter /run/user/$(id -u)/corral* 2>/dev/null
true
"""
# iptables leaves the table when its last chain goes.
EMPTY = ("table ip6 filter {\n}\n", "# Warning: table ip6 filter is managed by iptables-nft, do not touch!\n")

# Of an installation for a rootless engine.
OWN_CODE = "~/.local/share/corral/netfilter"
OWN_UNITS = (
    "~/.config/systemd/user/corral-netfilter.service ~/.config/systemd/user/docker.service.d/corral.conf"
)
NO_RULES = "iptables -D DOCKER-USER 1; iptables -F CORRAL-OUT; nft delete table inet corral"
SYSTEM_PART = "iptables -S | grep -E 'CORRAL-|corral:' | sort; systemctl cat 'corral-*'; ls /opt/corral"

FOREIGN = r"""
iptables -I DOCKER-USER 1 -s 198.51.100.77 -j DROP -m comment --comment before
iptables -A DOCKER-USER -s 198.51.100.78 -j DROP -m comment --comment after
iptables -I INPUT 1 -s 198.51.100.77 -j DROP -m comment --comment before
iptables -A INPUT -s 198.51.100.78 -j DROP -m comment --comment after
iptables -t nat -A POSTROUTING -s 198.51.100.79 -j RETURN
ip6tables -A FORWARD -s 2001:db8::7 -j DROP
nft add table inet corral_alike
nft add chain inet corral_alike forward '{ type filter hook forward priority 5; }'
nft add rule inet corral_alike forward ip saddr 198.51.100.77 counter drop
ipset create mine hash:ip
ipset add mine 198.51.100.77
"""
FOREIGN_GONE = r"""
iptables -D DOCKER-USER -s 198.51.100.77 -j DROP -m comment --comment before
iptables -D DOCKER-USER -s 198.51.100.78 -j DROP -m comment --comment after
iptables -D INPUT -s 198.51.100.77 -j DROP -m comment --comment before
iptables -D INPUT -s 198.51.100.78 -j DROP -m comment --comment after
iptables -t nat -D POSTROUTING -s 198.51.100.79 -j RETURN
ip6tables -D FORWARD -s 2001:db8::7 -j DROP
nft delete table inet corral_alike
ipset destroy mine
"""


def look(host: Host) -> str:
    there = host.netadmin("sh", "-c", LOOK_NETWORK).stdout if host.engine.network() else ""
    text = (
        there + host.root("sh", "-c", LOOK).stdout + host.shell(LOOK_ENGINE + LOOK_USER, check=False).stdout
    )
    for part in EMPTY:
        text = text.replace(part, "")
    return text


def uninstall(host: Host, *words: str, check: bool = True) -> Done:
    return host.box.run(["corral", "uninstall", *words], check=check, timeout=180)


@pytest.fixture
def leaving(host: Host) -> Iterator[Host]:
    """A host that gets corral back, and its configuration, however the test ends."""
    # What was built stays known to Docker under another name, so that not every test builds it anew.
    host.shell("for id in $(docker images -q 'corral/*'); do docker tag $id kept-by-the-lab/$id; done")
    try:
        yield host
    finally:
        host.end_projects()
        host.engine.systemctl("start", *host.engine.engine_units, check=False)
        host.engine.await_up()
        host.box.write(f"{host.box.home}/.config/corral/enforcer.toml", CONFIG)
        uninstall(host, "--yes", "--force")
        host.box.run(["corral", "install"], timeout=180)
        host.wait_enforcer()


def nothing_of_ours(host: Host) -> None:
    """Look with the eyes of somebody who knows no version of corral."""
    found = [line for line in look(host).splitlines() if "corral" in line.lower()]
    # The lab has files of its own in the box.
    assert [line for line in found if "corral-lab" not in line] == []


def running(host: Host, name: str) -> Project:
    project = host.project(name)
    project.corral("build", timeout=600)
    project.start("sh", "-c", "touch up; sleep 600", marker="up")
    return project


@pytest.mark.case(22)
@pytest.mark.representative
def test_uninstalling_leaves_the_host_as_it_was_and_foreign_rules_in_place(leaving: Host) -> None:
    host = leaving
    uninstall(host, "--yes", "--force")
    nothing_of_ours(host)
    host.netadmin("bash", "-ec", FOREIGN)
    try:
        before, network = look(host), host.engine.network()
        host.box.run(["corral", "install"], timeout=180)
        host.wait_enforcer()
        if host.engine.network() != network:
            # A rootless engine was started again, and what others had in its network went with that.
            host.netadmin("bash", "-ec", FOREIGN)
        assert "corral-pins" in look(host)
        project = running(host, "leaving")

        there = look(host)
        done = uninstall(host, "--yes", check=False)
        assert done.returncode == 1
        assert project.containers()[0] in done.stderr
        assert "--force" in done.stderr
        assert look(host) == there
        assert project.started[0].poll() is None

        listed = json.loads(uninstall(host, "--dry-run", "--json").stdout)
        assert look(host) == there
        assert listed["done"] is False
        assert listed["running"] == project.containers()
        kinds = {row["kind"] for row in listed["remove"]}
        assert kinds >= {"container", "network", "image", "user", "rules"}
        assert ("system" in kinds) is not host.box.engine.rootless
        done = uninstall(host, "--force", check=False)
        assert done.returncode == 1
        assert "corral uninstall --yes" in done.stderr
        assert look(host) == there

        uninstall(host, "--yes", "--force")
        project.started[0].wait(timeout=30)
        assert look(host) == before
    finally:
        host.netadmin("bash", "-c", FOREIGN_GONE)
    nothing_of_ours(host)
    again = uninstall(host)
    assert again.stdout.startswith("nothing of corral is installed")
    assert host.box.run(["test", "-d", f"{host.box.home}/{STATE}"], check=False).returncode == 0
    assert host.box.read(f"{host.box.home}/.config/corral/enforcer.toml") == CONFIG


@pytest.mark.fault("docker stopped")
def test_it_works_while_docker_is_down_and_says_what_is_left_in_it(leaving: Host) -> None:
    host = leaving
    project = host.project("dockerdown")
    project.inside("true", timeout=600)
    host.engine.systemctl("stop", *host.engine.engine_units)
    done = uninstall(host, "--yes")
    assert "when Docker runs again: corral uninstall" in done.stdout
    # The bridge is gone; what is left of Docker's own rules for it is Docker's.
    script = "iptables -S; iptables -t nat -S; nft list tables; ipset list -n; ip -br link"
    # Those of a rootless engine are in its namespace, which is gone.
    rules = host.netadmin_shell(script).stdout.splitlines() if host.engine.network() else []
    ours = [line for line in rules if re.search("CORRAL|corral:|^corral|inet corral", line)]
    assert ours == []
    assert host.root("sh", "-c", "ls -d /opt/corral /run/corral* /var/lib/corral", check=False).stdout == ""
    host.engine.systemctl("start", *host.engine.engine_units)
    host.engine.await_up()
    networks = host.box.run(["docker", "network", "ls", "--format", "{{.Name}}"])
    assert "corral" in networks.stdout
    done = uninstall(host, "--yes")
    assert "network" in done.stdout
    nothing_of_ours(host)


@LIVE_RESTORE
@pytest.mark.fault("docker killed")
def test_containers_that_outlive_docker_keep_their_rules(leaving: Host) -> None:
    host = leaving
    forbidden = host.internet.addresses["forbidden"]
    project = host.project("outliving")
    project.corral("build", timeout=600)
    project.write("flood.py", FLOOD)
    project.start("sh", "-c", f"touch up; python3 flood.py {forbidden} 20 > flooded; touch done", marker="up")
    host.engine.systemctl("mask", "--runtime", "docker.service", "docker.socket")
    try:
        host.engine.systemctl("stop", "docker.socket")
        host.engine.systemctl("kill", "-s", "KILL", "docker.service")
        host.box.wait_for(lambda: host.root("docker", "ps", check=False).returncode != 0)
        done = uninstall(host, "--yes", "--force", check=False)
        assert done.returncode == 1
        assert "containers are still on corral-" in done.stderr
        host.box.wait_for(lambda: project.exists("done"), timeout=60)
        assert int(project.read("flooded")) > 10_000
        assert host.internet.packets(forbidden) == 0
        assert "CORRAL-OUT" in host.netadmin("iptables", "-S", "DOCKER-USER").stdout
        assert host.enforcer_pid() != 0
    finally:
        host.engine.systemctl("unmask", "--runtime", "docker.service", "docker.socket")
        host.engine.systemctl("start", "docker.socket", "docker.service")
    uninstall(host, "--yes", "--force")
    nothing_of_ours(host)


@pytest.mark.fault("half removed")
@pytest.mark.parametrize(
    ("damage", "own"),
    [
        (
            "rm -rf /opt/corral; systemctl kill -s KILL corral-netfilter.service; iptables -F DOCKER-USER",
            f"rm -rf {OWN_CODE}; systemctl --user kill -s KILL corral-netfilter.service; {OWN_NAMESPACES} iptables -F DOCKER-USER",
        ),
        (
            "rm -f /etc/systemd/system/corral-netfilter.service /etc/systemd/system/corral-skeleton.service; systemctl daemon-reload",
            f"rm -f {OWN_UNITS}; systemctl --user daemon-reload",
        ),
        (
            f"systemctl stop corral-netfilter.socket corral-netfilter.service; {NO_RULES}",
            f"systemctl --user stop corral-netfilter.service; {OWN_NAMESPACES} sh -c '{NO_RULES}'",
        ),
        (
            "rm -rf /run/corral /run/corral-netfilter /run/private/corral-netfilter /var/lib/corral",
            "rm -rf $XDG_RUNTIME_DIR/corral",
        ),
    ],
    ids=["no code", "no units", "no rules", "no records"],
)  # fmt: skip
def test_half_removed_states_go_as_well(leaving: Host, damage: str, own: str) -> None:
    host = leaving
    # The enforcer is dead, and no policy is valid.
    project = host.project("half", "profile: none\n")
    host.user_systemctl("kill", "-s", "KILL", ENFORCER)
    host.user_systemctl("stop", ENFORCER)
    if host.box.engine.rootless:
        host.shell(own)
    else:
        host.root("bash", "-c", damage)
    done = host.box.run(["corral", "uninstall", "--yes"], cwd=project.path, timeout=180)
    assert done.stdout.splitlines()[-1].startswith("done")
    nothing_of_ours(host)
    assert uninstall(host).stdout.startswith("nothing of corral is installed")


@pytest.mark.fault("files removed by hand")
def test_rules_whose_files_were_removed_by_hand_are_found_with_force(leaving: Host) -> None:
    host = leaving
    uninstall(host, "--dry-run")
    host.user_systemctl("disable", "--now", ENFORCER)
    own = f"""
        systemctl --user disable --now corral-netfilter.service
        rm -rf {OWN_CODE} {OWN_UNITS} $XDG_RUNTIME_DIR/corral ~/.config/systemd/user/*corral*
        systemctl --user daemon-reload
    """
    script = """
        systemctl stop corral-netfilter.socket corral-netfilter.service corral-skeleton.service
        rm -rf /opt/corral /var/lib/corral /run/corral /run/corral-netfilter /run/private/corral-netfilter
        find /etc -name '*corral*' -delete; systemctl daemon-reload
        rm -rf /run/user/1000/corral /home/dev/.config/systemd/user/*corral*
    """
    if host.box.engine.rootless:
        host.shell(own)
    else:
        host.root("bash", "-c", script)
    assert uninstall(host).stdout.startswith("nothing of corral is installed")
    assert "CORRAL-OUT" in host.netadmin("iptables", "-S").stdout
    uninstall(host, "--yes", "--force")
    nothing_of_ours(host)


def test_state_and_configuration_go_on_purpose_only_whatever_the_agent_did_to_them(leaving: Host) -> None:
    host = leaving
    home = host.box.home
    awkward = f"{home}/{STATE}/awkward-0a0b0c0d/home"
    host.shell(
        f"mkdir -p {awkward}/closed/deep; touch {awkward}/closed/deep/file; ln -s {home} {awkward}/out; chmod 0 {awkward}/closed"
    )
    host.shell("touch ~/keep")
    uninstall(host, "--yes")
    assert host.root("test", "-d", f"{awkward}/closed", check=False).returncode == 0
    done = uninstall(host, "--yes", "--purge")
    assert f"{home}/{STATE}" in done.stdout
    assert host.shell("ls -d ~/.local/share/corral ~/.config/corral", check=False).stdout == ""
    assert host.shell("ls ~/keep").stdout
    assert uninstall(host, "--purge").stdout.strip() == "nothing of corral is installed for you"


def test_bridge_filtering_goes_back_to_what_the_system_is_configured_for(leaving: Host) -> None:
    host = leaving
    setting = "/etc/sysctl.d/99-bridges.conf"
    current = ["cat", "/proc/sys/net/bridge/bridge-nf-call-iptables"]
    assert host.root(*current).stdout.strip() == "1"
    uninstall(host, "--yes")
    # Nobody configured anything: Docker may need it as it is.
    assert host.root(*current).stdout.strip() == "1"
    host.box.run(["corral", "install"], timeout=180)
    host.box.write(setting, "net.bridge.bridge-nf-call-iptables = 0\n", owner="root")
    try:
        uninstall(host, "--yes")
        assert host.root(*current).stdout.strip() == "0"
    finally:
        host.root("rm", "-f", setting)
        host.root("sh", "-c", "echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables")


@pytest.mark.fault("environment removed before the services")
def test_an_enforcer_whose_program_is_gone_fails_once_and_says_so(leaving: Host) -> None:
    host = leaving
    environment = PYTHON.removesuffix("/bin/python")
    started = time.time()
    host.shell(f"mv {environment} {environment}.away")
    try:
        host.user_systemctl("restart", ENFORCER, check=False)
        shown = host.user_systemctl("show", "-P", "ActiveState", ENFORCER).stdout.strip()
        assert shown in ("inactive", "failed")
        assert host.user_systemctl("show", "-P", "NRestarts", ENFORCER).stdout.strip() == "0"
        # A time that is rounded up would leave out what was said at once.
        words = ["journalctl", "--user", "--no-pager", "-o", "cat", f"--since=@{int(started)}"]
        until(lambda: "Assertion failed" in host.box.run(words).stdout, 10, "the word of a missing program")
        # Only the interpreter is gone: the program is there and cannot be executed.
        host.shell(
            f"mkdir -p {environment}/bin; cp {environment}.away/bin/corral-enforcer {environment}/bin/"
        )
        host.user_systemctl("start", ENFORCER, check=False)
        host.box.wait_for(
            lambda: host.user_systemctl("is-failed", ENFORCER, check=False).stdout.strip() == "failed"
        )
        assert host.user_systemctl("show", "-P", "NRestarts", ENFORCER).stdout.strip() == "0"
    finally:
        host.shell(f"rm -rf {environment}; mv {environment}.away {environment}")
        host.user_systemctl("reset-failed", ENFORCER, check=False)


class Eve:
    """A second user of the host, with the first one's program and everything else of her own."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.home = "/home/eve"
        self.path = f"{self.home}/work"

    def arrive(self) -> None:
        script = f"""
            id eve >/dev/null 2>&1 || useradd --create-home --uid {EVE} --shell /bin/bash --groups docker eve
            echo 'eve ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/eve
            chmod o+x /home/dev /home/dev/.local {PurePosixPath(PIPX).parent} {PIPX} {PIPX}/venvs
            loginctl enable-linger eve
        """
        self.box.run(["bash", "-ec", script], user="root")
        self.box.wait_for(
            lambda: (
                self.run("systemctl", "--user", "is-active", "-q", "default.target", check=False).returncode
                == 0
            )
        )
        self.write(f"{self.home}/.config/corral/enforcer.toml", CONFIG)
        policy = BASE_POLICY
        self.write(f"{self.path}/corral.yaml", policy)
        sha = self.run("corral", "policy", "hash", cwd=self.path).stdout.strip()
        self.run("corral", "policy", "accept", sha, cwd=self.path)
        self.write(f"{self.path}/flood.py", FLOOD)

    def write(self, path: str, text: str) -> None:
        self.run("bash", "-c", 'mkdir -p "$(dirname "$1")"; cat > "$1"', "write", path, input=text)

    def _argv(self, words: tuple[str, ...]) -> list[str]:
        program = PYTHON.replace("/python", "/corral") if words[0] == "corral" else words[0]
        drop = ["setpriv", f"--reuid={EVE}", f"--regid={EVE}", "--init-groups", "env"]
        drop += [f"HOME={self.home}", "USER=eve", "LOGNAME=eve", f"XDG_RUNTIME_DIR=/run/user/{EVE}"]
        drop += [f"DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/{EVE}/bus"]
        return [*drop, program, *words[1:]]

    def run(self, *words: str, check: bool = True, timeout: float = 180, **options: Any) -> Done:
        options.setdefault("cwd", self.home)
        return self.box.run(self._argv(words), user="root", check=check, timeout=timeout, **options)

    def start(self, *words: str) -> subprocess.Popen[Any]:
        return self.box.popen(
            self._argv(words),
            user="root",
            cwd=self.path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def leave(self) -> None:
        self.run("corral", "uninstall", "--yes", "--force", "--purge", check=False)
        script = (
            "loginctl disable-linger eve; systemctl stop user@1001; userdel -r eve; rm -f /etc/sudoers.d/eve"
        )
        self.box.run(["bash", "-c", script], user="root", check=False)


@pytest.fixture
def eve(leaving: Host) -> Iterator[Eve]:
    made = Eve(leaving.box)
    made.arrive()
    try:
        yield made
    finally:
        made.leave()


def test_another_user_keeps_the_system_part_and_a_sandbox_that_goes_on(leaving: Host, eve: Eve) -> None:
    host = leaving
    forbidden = host.internet.addresses["forbidden"]
    project = running(host, "mine")
    eve.run("corral", "install")
    eve.run("corral", "build", cwd=eve.path, timeout=600)
    script = (
        f"touch up; python3 flood.py {forbidden} 25 > flooded;"
        " curl -sS https://allowed1.corral.example/ > answer; touch done"
    )
    process = eve.start("corral", "run", "--", "sh", "-c", script)
    try:
        host.box.wait_for(["test", "-e", f"{eve.path}/up"], user="root", timeout=60)
        theirs = [
            name
            for name in host.root("docker", "ps", "--format", "{{.Names}}").stdout.split()
            if "-work-" in name
        ]
        rules = host.root("sh", "-c", SYSTEM_PART).stdout
        listed = json.loads(uninstall(host, "--dry-run", "--json").stdout)
        assert any("eve" in row["why"] for row in listed["keep"])
        assert not any(name in json.dumps(listed["remove"]) for name in theirs)

        done = uninstall(host, "--yes", "--force")
        assert "eve" in done.stdout
        project.started[0].wait(timeout=30)
        assert host.root("ls", "/var/lib/corral/users").stdout.split() == [str(EVE)]
        assert host.root("sh", "-c", SYSTEM_PART).stdout == rules
        names = host.root("docker", "network", "ls", "--format", "{{.Name}}").stdout
        assert "-work-" in names
        assert "-mine-" not in names
        assert host.shell(LOOK_USER, check=False).stdout.count("corral") == 0
        assert uninstall(host).stdout.startswith("nothing of corral is installed for you")

        host.box.wait_for(["test", "-e", f"{eve.path}/done"], user="root", timeout=60)
        assert process.wait(timeout=30) == 0
        assert int(eve.run("cat", f"{eve.path}/flooded").stdout) > 10_000
        assert "203.0.113.10" in eve.run("cat", f"{eve.path}/answer").stdout
        assert host.internet.packets(forbidden) == 0
    finally:
        Box.kill(process)
    # Her network is there still: she was the last one, and takes everything along.
    eve.run("corral", "uninstall", "--yes")
    nothing_of_ours(host)


def test_what_belongs_to_an_account_that_is_gone_keeps_nobody(leaving: Host, eve: Eve) -> None:
    host = leaving
    eve.run("corral", "install")
    eve.run("corral", "build", cwd=eve.path, timeout=600)
    eve.run("corral", "run", "--", "true", cwd=eve.path)
    host.root("bash", "-c", "loginctl disable-linger eve; systemctl stop user@1001; userdel -r eve")
    done = uninstall(host, "--yes")
    assert "-work-" in done.stdout
    nothing_of_ours(host)
