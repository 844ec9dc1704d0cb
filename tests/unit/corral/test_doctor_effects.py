"""What the probes make of files and of what programs print."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import pytest

from corral.doctor import effects
from corral.doctor.effects import Host, ask_server, command_paths, corral_bridges, name_servers
from corral.doctor.model import CannotTell
from corral.doctor.records import Firewalls, Security, Sysctls


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host({"PATH": "/usr/bin:/bin"}, Path("/home/agnes"), 1000, tmp_path)


def write(host: Host, path: str, text: str = "") -> None:
    file = host.at(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_settings_of_the_kernel_are_numbers_or_not_there(host: Host) -> None:
    assert effects.sysctls(host) == Sysctls(None, None, None, None, None)
    write(host, "/proc/sys/net/ipv4/ip_forward", "1\n")
    write(host, "/proc/sys/net/bridge/bridge-nf-call-iptables", "0\n")
    assert effects.sysctls(host) == Sysctls(1, 0, None, None, None)
    write(host, "/proc/sys/net/ipv4/ip_forward", "x\n")
    with pytest.raises(ValueError, match="invalid literal"):
        effects.sysctls(host)


def test_a_command_line_gives_its_paths() -> None:
    shown = (
        "{ path=/usr/bin/python3 ; argv[]=/usr/bin/python3 -I -S /opt/corral/0.1.0-ab/corral-netfilter serve "
        "; ignore_errors=no ; start_time=[n/a] ; stop_time=[n/a] ; pid=0 ; code=(null) ; status=0/0 }"
    )
    assert command_paths(shown) == ["/usr/bin/python3", "/opt/corral/0.1.0-ab/corral-netfilter"]
    assert command_paths("") == []


def test_bridges_of_sandboxes_are_told_by_their_name() -> None:
    rows = [
        {"ifname": "eth0", "addr_info": [{"local": "198.51.100.2", "prefixlen": 24}]},
        {"ifname": "corral-0a1b2c3d", "addr_info": [{"local": "172.16.0.1", "prefixlen": 26}]},
        {"ifname": "corral-00000000", "addr_info": []},
        {},
    ]
    assert corral_bridges(rows) == {"corral-0a1b2c3d": IPv4Network("172.16.0.0/26")}


def test_name_servers_are_read_as_the_c_library_reads_them() -> None:
    assert name_servers("# x\nsearch a\nnameserver 127.0.0.53\nnameserver 127.0.0.53\noptions edns0\n") == [
        "127.0.0.53"
    ]
    assert name_servers("") == ["127.0.0.1"]


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock


def serve(sock: socket.socket, rcode: dns.rcode.Rcode, count: int) -> threading.Thread:
    def run() -> None:
        for _ in range(count):
            wire, peer = sock.recvfrom(512)
            response = dns.message.make_response(dns.message.from_wire(wire))
            response.set_rcode(rcode)
            sock.sendto(response.to_wire(), peer)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def name(sock: socket.socket) -> str:
    return f"127.0.0.1:{sock.getsockname()[1]}"


@pytest.mark.parametrize("rcode", [dns.rcode.NOERROR, dns.rcode.NXDOMAIN, dns.rcode.REFUSED])
def test_a_server_that_says_anything_of_its_own_is_there(
    server: socket.socket, rcode: dns.rcode.Rcode
) -> None:
    serve(server, rcode, 1)
    assert ask_server(name(server)) == ""


def test_a_forwarder_that_cannot_ask_on_is_of_no_use(server: socket.socket) -> None:
    serve(server, dns.rcode.SERVFAIL, 2)
    assert "SERVFAIL" in ask_server(name(server))


def test_a_server_that_says_nothing_is_told_from_one_that_is_not_there(server: socket.socket) -> None:
    assert ask_server(name(server), timeout=0.1) == "no answer"
    gone = name(server)
    server.close()
    assert ask_server(gone, timeout=0.1)


def test_modules_are_looked_for_in_memory_and_on_the_disk(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = effects.modules(host).release
    assert set(effects.modules(host).states.values()) == {"unknown"}
    write(host, "/proc/modules", "xt_set 16384 3 - Live 0x0\n")
    write(host, "/sys/module/br_netfilter/refcnt", "1")
    write(host, "/lib/modules/other/modules.dep", "x.ko:\n")
    assert effects.modules(host).gone
    write(host, f"/lib/modules/{release}/modules.dep", "kernel/net/netfilter/ipset/ip_set.ko.xz: a.ko\n")
    write(host, f"/lib/modules/{release}/modules.builtin", "kernel/net/netfilter/nf-conntrack-netlink.ko\n")
    found = effects.modules(host)
    assert not found.gone
    assert found.states == {
        "br_netfilter": "built-in",
        "ip_set": "loadable",
        "ip_set_hash_ipportip": "absent",
        "xt_set": "loaded",
        "nf_conntrack_netlink": "built-in",
    }


def test_security_modules_and_firewalls(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = effects.process.Completed((), 3, "inactive\n", "")
    monkeypatch.setattr(effects.process, "run", lambda *_, **__: answer)
    assert effects.security(host) == Security()
    assert effects.firewalls(host) == Firewalls()
    write(host, "/sys/fs/selinux/enforce", "1")
    write(host, "/sys/module/apparmor/parameters/enabled", "Y\n")
    write(host, "/etc/ufw/ufw.conf", "# ENABLED=yes\nENABLED=no\n")
    assert effects.security(host) == Security("enforcing", apparmor=True)
    assert effects.firewalls(host) == Firewalls()
    write(host, "/etc/ufw/ufw.conf", "ENABLED=yes\n")
    answer = effects.process.Completed((), 0, "active\n", "")
    assert effects.firewalls(host) == Firewalls(("firewalld", "ufw"))


@pytest.mark.parametrize(
    ("printed", "variant"),
    [
        ("iptables v1.8.11 (nf_tables)", "nf_tables"),
        ("iptables v1.8.11 (legacy)", "legacy"),
        ("iptables v1.6.1", ""),
    ],
)
def test_the_variant_of_iptables(
    host: Host, monkeypatch: pytest.MonkeyPatch, printed: str, variant: str
) -> None:
    monkeypatch.setattr(
        effects.process, "run", lambda *_, **__: effects.process.Completed((), 0, printed, "")
    )
    assert effects.tables(host).variant == variant


def test_room_is_asked_for_above_what_does_not_exist_yet(host: Host) -> None:
    found = effects.disks(host).disks
    assert [disk.path for disk in found] == ["/home/agnes/.local/share/corral", "/var/lib/docker"]
    assert all(disk.free > 0 and disk.inodes > 0 for disk in found)


@pytest.mark.parametrize("probe", [effects.manager, effects.enforcer_unit, effects.enforcer, effects.linger])
def test_root_has_none_of_what_belongs_to_a_user(tmp_path: Path, probe: effects.Probe) -> None:
    with pytest.raises(CannotTell, match="as the user who runs agents"):
        probe(Host({}, Path("/root"), 0, tmp_path))


def test_every_probe_says_what_it_is_for() -> None:
    assert all(probe.__doc__ for probe in effects.PROBES.values())


def test_a_name_server_over_tls_is_asked_over_tls_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, str]] = []

    def tls(query: dns.message.Message, host: str, *, timeout: float, port: int, server_hostname: str) -> Any:
        assert timeout > 0
        asked.append((host, port, server_hostname))
        return dns.message.make_response(query)

    monkeypatch.setattr("dns.query.tls", tls)
    monkeypatch.setattr("dns.query.udp_with_fallback", lambda *_, **__: pytest.fail("asked in the clear"))
    assert ask_server("tls://192.0.2.53#dns.example") == ""
    assert ask_server("tls://[2001:db8::53]:8853#dns.example") == ""
    assert asked == [("192.0.2.53", 853, "dns.example"), ("2001:db8::53", 8853, "dns.example")]
