"""What breaks on a host is found by exactly the check it belongs to, and is gone once repaired as the check says."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.lab import LabError

from .engine_side import WRITER
from .host import CONFIG, ENFORCER, EVERY_ENGINE, Host

# The machine below the lab may have its cgroup controllers in cgroup 1.
LIMITS = "COR-018"
TOML = "/home/dev/.config/corral/enforcer.toml"
UNIT = "/home/dev/.config/systemd/user/corral-enforcer.service"
AS_USER = (
    "setpriv --reuid=1000 --regid=1000 --init-groups env HOME=/home/dev XDG_RUNTIME_DIR=/run/user/1000 "
    "systemctl --user"
)
WITHOUT_GROUP = [
    "setpriv", "--reuid=1000", "--regid=1000", "--clear-groups",
    "env", "HOME=/home/dev", "XDG_RUNTIME_DIR=/run/user/1000",
]  # fmt: skip
CORRAL = "/home/dev/.local/bin/corral"


def doctor(host: Host, *words: str, **environ: str) -> dict[str, str]:
    """Return what is found, by id; checks that cannot be made are not in it."""
    return told(host.box.run(["corral", "doctor", "--json", *words], env=environ, check=False).stdout)


def told(output: str) -> dict[str, str]:
    found = {row["id"]: row["found"] for row in json.loads(output)["checks"] if row["state"] == "found"}
    found.pop(LIMITS, None)
    return found


@contextlib.contextmanager
def broken(host: Host, damage: str, repair: str) -> Iterator[None]:
    """Do something to the host as root, and undo it; what is done to rules, where the engine has them."""
    try:
        host.netadmin_shell(damage)
        yield
    finally:
        host.netadmin_shell(repair)


def settled(host: Host) -> None:
    """Wait until nothing is wrong any more."""
    host.box.wait_for(lambda: doctor(host) == {}, timeout=30)


@dataclass(frozen=True)
class Case:
    """``ids`` is everything that has to be found between ``damage`` and ``repair``; both are run by root."""

    ids: tuple[str, ...]
    damage: str
    repair: str
    says: str = ""


def toml(text: str) -> str:
    return f"printf '%s\\n' '{text}' > {TOML}"


KEPT = CONFIG.strip()
REPLACED = (
    f"cp {UNIT} /root/enforcer.unit; sed -i 's|^ExecStart=.*|ExecStart=%s|' {UNIT}; {AS_USER} daemon-reload"
)
PUT_BACK = (
    f"cp /root/enforcer.unit {UNIT}; chown dev: {UNIT}; {AS_USER} daemon-reload; {AS_USER} restart {ENFORCER}"
)
HIDE = "d=$(ls -d /opt/corral/*/); mv $d /opt/away"
WRITER_FAILS = """
mkdir -p /run/systemd/system/corral-netfilter.service.d
printf '[Service]\\nExecStart=\\nExecStart=/bin/false\\n' > /run/systemd/system/corral-netfilter.service.d/x.conf
systemctl daemon-reload
systemctl --no-block restart corral-netfilter.service
until systemctl show -P SubState corral-netfilter.service | grep -q auto-restart; do sleep 0.05; done
"""
WRITER_WORKS = """
rm -r /run/systemd/system/corral-netfilter.service.d
systemctl daemon-reload
systemctl restart corral-netfilter.socket corral-netfilter.service
"""

CASES = {
    "a host that does not forward": Case(("COR-060",), "sysctl -qw net.ipv4.ip_forward=0", "sysctl -qw net.ipv4.ip_forward=1"),
    "Docker's jump gone": Case(("COR-020",), "iptables -D FORWARD -j DOCKER-USER", "iptables -I FORWARD 1 -j DOCKER-USER", "DOCKER-USER"),
    "enforcer stopped": Case(("COR-043",), f"{AS_USER} stop {ENFORCER}", f"{AS_USER} start {ENFORCER}", "inactive"),
    "enforcer silent": Case(("COR-045",), f"{AS_USER} kill -s STOP {ENFORCER}", f"{AS_USER} kill -s CONT {ENFORCER}"),
    "enforcer moved away": Case(("COR-042",), REPLACED % "/gone/corral-enforcer", PUT_BACK, "/gone/corral-enforcer"),
    "enforcer ends at once": Case(("COR-044",), f"{REPLACED % '/bin/false'}; {AS_USER} --no-block restart {ENFORCER}; until {AS_USER} show -P SubState {ENFORCER} | grep -q auto-restart; do sleep 0.05; done", PUT_BACK),
    "enforcer.toml with a typing error": Case(("COR-046",), toml("permit_range = []"), toml(KEPT), "permit_range"),
    "the writer's socket stopped": Case(("COR-049",), "systemctl stop corral-netfilter.socket corral-netfilter.service", "systemctl start corral-netfilter.socket corral-netfilter.service", "inactive"),
    "the writer's socket closed to the user": Case(("COR-050",), "chmod 600 /run/corral/netfilter.sock", "chmod 660 /run/corral/netfilter.sock", "permission"),
    "the writer ends at once": Case(("COR-051",), WRITER_FAILS, WRITER_WORKS),
    "rules not loaded at boot": Case(("COR-052",), "systemctl -q disable corral-skeleton.service", "systemctl -q enable corral-skeleton.service", "corral-skeleton.service is disabled"),
    "the writer's directory gone": Case(("COR-053",), HIDE, "mv /opt/away $(systemctl show -P ExecStart corral-netfilter.service | grep -o '/opt/corral/[^/ ]*' | head -1)", "/opt/corral/"),
    "no lingering": Case(("COR-054",), "mv /var/lib/systemd/linger/dev /root/linger", "mv /root/linger /var/lib/systemd/linger/dev"),
    "no default route": Case(("COR-065", "COR-066"), "ip route del default", "ip route add default via 198.51.100.1"),
    "a dead name server": Case(("COR-066",), toml(KEPT + '\n[dns]\nservers = ["198.51.100.99"]'), toml(KEPT), "198.51.100.99"),
    "one of two name servers dead": Case(("COR-067",), toml(KEPT + '\n[dns]\nservers = ["198.51.100.99", "203.0.113.53"]'), toml(KEPT), "198.51.100.99"),
    "a full disk": Case(("COR-073",), "mkdir -p /home/dev/.local/share/corral; mount -t tmpfs -o size=1m tmpfs /home/dev/.local/share/corral", "umount /home/dev/.local/share/corral", "MiB"),
    "ufw": Case(("COR-081",), "mkdir -p /etc/ufw; echo ENABLED=yes > /etc/ufw/ufw.conf", "rm -r /etc/ufw"),
    "iptables switched to legacy": Case(("COR-025",), "update-alternatives --quiet --set iptables /usr/sbin/iptables-legacy", "update-alternatives --quiet --set iptables /usr/sbin/iptables-nft"),
    "iptables switched to legacy and the jump gone": Case(("COR-020", "COR-025"), "update-alternatives --quiet --set iptables /usr/sbin/iptables-legacy; iptables-nft -D FORWARD -j DOCKER-USER", "update-alternatives --quiet --set iptables /usr/sbin/iptables-nft; iptables-nft -I FORWARD 1 -j DOCKER-USER"),
    "filtering of bridges switched off": Case(("COR-023", "COR-049"), "systemctl stop corral-netfilter.socket corral-netfilter.service; sysctl -qw net.bridge.bridge-nf-call-iptables=0", "systemctl start corral-netfilter.socket corral-netfilter.service"),
    "Docker stopped": Case(("COR-003",), "systemctl stop docker.socket docker.service", "systemctl start docker.socket docker.service"),
}  # fmt: skip
REPRESENTATIVE = ("Docker's jump gone", "enforcer stopped", "the writer's socket stopped")
# What is broken, and how that shows, with an engine of the user's own as well.
ANYWHERE = ("Docker's jump gone", "enforcer stopped", "enforcer silent", "enforcer.toml with a typing error", "no lingering")  # fmt: skip
# Its socket stays where it was, and nobody answers there.
OWN_WRITER = Case(("COR-051",), f"{AS_USER} stop {WRITER}", f"{AS_USER} start {WRITER}")


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.representative] * (name in REPRESENTATIVE) + [EVERY_ENGINE] * (name in ANYWHERE)


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name, marks=marks(name)) for name, case in CASES.items()),
        pytest.param(
            OWN_WRITER,
            id="the user's own writer stopped",
            marks=pytest.mark.engine(
                "rootless", reason="elsewhere the writer is root's, and has a socket unit"
            ),
        ),
    ],
)
def test_what_is_broken_is_found_by_its_check_alone(host: Host, case: Case) -> None:
    seen: list[dict[str, str]] = []

    def as_expected() -> bool:
        seen.append(doctor(host))
        return set(seen[-1]) == set(case.ids)

    with broken(host, case.damage, case.repair), contextlib.suppress(LabError):
        # What was broken may take a moment to show.
        host.box.wait_for(as_expected, timeout=20)
    assert set(seen[-1]) == set(case.ids)
    assert case.says in " ".join(seen[-1].values())
    settled(host)


NFT_FAILS = """\
#!/bin/sh
case "$*" in *-f*) exit 1;; esac
exec /usr/sbin/nft.real "$@"
"""


def test_a_writer_that_cannot_put_the_backstop_back_is_found(host: Host) -> None:
    host.box.write("/usr/sbin/nft.fails", NFT_FAILS, owner="root", mode=0o755)
    damage = """
    cp /usr/sbin/nft /usr/sbin/nft.real
    mount --bind /usr/sbin/nft.fails /usr/sbin/nft
    systemctl stop corral-netfilter.service
    /usr/sbin/nft.real delete table inet corral
    systemctl --no-block start corral-netfilter.service
    until systemctl show -P ActiveState corral-netfilter.service | grep -q activating; do sleep 0.05; done
    """
    repair = """
    umount /usr/sbin/nft
    rm /usr/sbin/nft.real /usr/sbin/nft.fails
    systemctl restart corral-netfilter.socket corral-netfilter.service
    """
    with broken(host, damage, repair):
        assert set(doctor(host)) == {"COR-051"}
    settled(host)


def test_routes_that_take_a_sandbox_s_addresses_away_are_found(host: Host) -> None:
    project = host.project("routes")
    fetch = ("curl", "-sS", "-m", "5", "https://allowed1.corral.example/")
    project.inside(*fetch)
    subnet = project.sandbox["subnet"]
    half = subnet.replace("/26", "/27")
    wide = subnet.rpartition(".")[0] + ".0/24"
    with broken(host, f"ip route add {half} dev eth0", f"ip route del {half} dev eth0"):
        found = doctor(host)
        assert set(found) == {"COR-061"} and half in found["COR-061"]
        assert project.inside(*fetch, check=False).returncode != 0
    with broken(host, f"ip route add {wide} dev eth0", f"ip route del {wide} dev eth0"):
        assert set(doctor(host)) == {"COR-062"}
        project.inside(*fetch)
    assert doctor(host) == {}


def test_a_rule_before_the_main_table_drops_everything_and_the_fix_mends_it(host: Host) -> None:
    project = host.project("rule")
    fetch = ("curl", "-sS", "-m", "5", "https://allowed1.corral.example/")
    project.inside(*fetch)
    damage = "ip route add default via 198.51.100.1 dev eth0 table 52; ip rule add priority 5270 lookup 52"
    repair = (
        "ip rule del priority 5270; ip route flush table 52; ip rule del priority 100 2>/dev/null || true"
    )
    with broken(host, damage, repair):
        body = json.loads(host.box.run(["corral", "doctor", "--json"], check=False).stdout)
        (row,) = (row for row in body["checks"] if row["found"] and row["id"] != LIMITS)
        assert (row["id"], "table 52" in row["found"]) == ("COR-063", True)
        assert project.inside(*fetch, check=False).returncode != 0
        host.shell(row["fix"].partition(";")[0], user="dev")
        assert doctor(host) == {}
        project.inside(*fetch)
    project.end()
    # Without any sandbox the tables themselves are read.
    with broken(host, damage, repair):
        assert set(doctor(host)) == {"COR-063"}
    assert doctor(host) == {}


def test_a_user_without_group_docker_a_missing_manager_and_root_are_told_so(host: Host) -> None:
    done = host.root(*WITHOUT_GROUP, CORRAL, "doctor", "--json", check=False)
    assert (done.returncode, set(told(done.stdout))) == (1, {"COR-004"})
    assert set(doctor(host, XDG_RUNTIME_DIR="/nonexistent")) == {"COR-040"}
    done = host.root(CORRAL, "doctor", check=False)
    assert done.returncode == 1
    assert "COR-001 broken: corral is run by root" in done.stdout
    assert "run corral doctor as the user who runs agents" in done.stdout


def test_doctor_changes_nothing_and_its_exit_code_tells_broken_from_advice(host: Host) -> None:
    def state() -> str:
        listed = "docker network ls -q; iptables-save -c | grep -v '^#' | sed 's/\\[.*\\]//'; nft list tables; ip -4 route; sysctl net.ipv4.ip_forward; find /home/dev/.config /home/dev/.local/share/corral | sort"
        return host.shell(listed, user="root").stdout

    before = state()
    assert host.box.run(["corral", "doctor", "COR-054", "COR-020"]).stdout.count("fine") == 3
    doctor(host)
    assert state() == before
    host.shell("mv /var/lib/systemd/linger/dev /root/linger", user="root")
    try:
        done = host.box.run(["corral", "doctor", "COR-054"])
        assert "sudo loginctl enable-linger dev" in done.stdout
    finally:
        host.shell("mv /root/linger /var/lib/systemd/linger/dev", user="root")
    assert host.box.run(["corral", "doctor", "COR-999"], check=False).returncode == 2
