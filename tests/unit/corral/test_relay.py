from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest

from corral import process, relay, relaylaunch
from corral.relay import Manager, Relay
from enforcer.netfilter.namespace import Daemon
from policy.declaration import HostService
from policy.errors import CorralError
from policy.identity import Sandbox

SANDBOX = Sandbox("demo-0123abcd")
GATEWAY = IPv4Address("172.16.0.1")
LLAMA = Relay(SANDBOX, 8081, GATEWAY, 7)


class FakeSystemd:
    """The user's manager: transient units with a state and a description."""

    def __init__(self) -> None:
        self.units: dict[str, dict[str, str]] = {}
        self.started: list[str] = []
        self.refuse = ""

    def run(self, argv: Sequence[str], **_: Any) -> process.Completed:
        out = ""
        if argv[0] == "systemd-run":
            if self.refuse:
                raise process.ProgramError(self.refuse)
            options = dict(
                part.removeprefix("--").partition("=")[::2] for part in argv if part.startswith("--")
            )
            unit = options["unit"]
            if unit in self.units:
                raise process.ProgramError(f"Unit {unit} was already loaded")
            self.units[unit] = {"ActiveState": "active", "Description": options["description"]}
            self.started.append(unit)
        elif argv[2] == "show":
            unit = self.units.get(argv[-1], {"ActiveState": "inactive", "Description": argv[-1]})
            out = "".join(f"{key}={value}\n" for key, value in unit.items())
        elif argv[2] == "stop":
            for name in argv[3:]:
                self.units.pop(name, None)
        elif argv[2] == "list-units":
            prefix = argv[-1].rstrip("*")
            out = "".join(
                f"{name} loaded {unit['ActiveState']} listening {unit['Description']}\n"
                for name, unit in self.units.items()
                if name.startswith(prefix)
            )
        return process.Completed(tuple(argv), 0, out, "")


@pytest.fixture
def systemd(monkeypatch: pytest.MonkeyPatch) -> FakeSystemd:
    fake = FakeSystemd()
    monkeypatch.setattr(relay.process, "run", fake.run)
    monkeypatch.setattr(relay, "find_proxy", lambda: "/lib/systemd/systemd-socket-proxyd")
    return fake


def test_the_socket_is_bound_to_gateway_and_bridge_and_leads_to_loopback() -> None:
    argv = LLAMA.argv("/lib/systemd/systemd-socket-proxyd")
    assert "--user" in argv
    assert argv[-5:] == (
        *("172.16.0.1", "8081", "corral-0123abcd"),
        *("/lib/systemd/systemd-socket-proxyd", "127.0.0.1:8081"),
    )


def test_one_relay_a_port() -> None:
    services = [
        HostService(name="b", port=9000),
        HostService(name="a", port=8081),
        HostService(name="c", port=9000),
    ]
    assert [one.port for one in relay.relays(SANDBOX, services, GATEWAY, 7)] == [8081, 9000]


def test_a_running_relay_is_left_alone(systemd: FakeSystemd) -> None:
    manager = Manager({})
    manager.ensure([LLAMA])
    manager.ensure([LLAMA])
    assert systemd.started == ["corral-relay-0123abcd-8081.service"]


def test_a_bridge_that_was_made_anew_gets_a_new_socket(systemd: FakeSystemd) -> None:
    manager = Manager({})
    manager.ensure([LLAMA])
    manager.ensure([Relay(SANDBOX, 8081, GATEWAY, 8)])
    assert len(systemd.started) == 2
    assert "interface 8" in systemd.units["corral-relay-0123abcd-8081.service"]["Description"]


def test_a_failed_relay_is_started_again(systemd: FakeSystemd) -> None:
    manager = Manager({})
    manager.ensure([LLAMA])
    systemd.units["corral-relay-0123abcd-8081.service"]["ActiveState"] = "failed"
    manager.ensure([LLAMA])
    assert systemd.units["corral-relay-0123abcd-8081.service"]["ActiveState"] == "active"


def test_the_relay_to_the_proxy_leads_to_its_address_and_is_made_anew_when_that_is_another(
    systemd: FakeSystemd,
) -> None:
    manager = Manager({})
    one = relay.to_proxy(SANDBOX, GATEWAY, 7, "172.16.0.5")
    assert one.argv("/proxy")[-2:] == ("/proxy", "172.16.0.5:8443")
    manager.ensure([one])
    manager.ensure([one])
    assert systemd.started == ["corral-relay-0123abcd-8443.service"]
    manager.ensure([relay.to_proxy(SANDBOX, GATEWAY, 7, "172.16.0.6")])
    assert len(systemd.started) == 2
    assert systemd.units[one.unit]["Description"].endswith(" to 172.16.0.6:8443")
    manager.ensure([LLAMA])
    manager.stop(SANDBOX, 8443)
    assert list(systemd.units) == [LLAMA.unit]
    manager.stop(SANDBOX, 8443)


def test_a_relay_to_the_proxy_that_cannot_be_started_says_whose_it_is(systemd: FakeSystemd) -> None:
    systemd.refuse = "no"
    with pytest.raises(CorralError, match="the sandbox's proxy: its relay on"):
        Manager({}).ensure([relay.to_proxy(SANDBOX, GATEWAY, 7, "172.16.0.5")])


@pytest.mark.parametrize(
    ("target", "becomes"),
    [
        ("127.0.0.1:8081", ("/proxy", "127.0.0.1:8081")),
        ("172.16.0.5:8443", ("env", "--", "/proxy", "172.16.0.5:8443")),
    ],
)
def test_what_leads_back_to_the_bridge_runs_where_the_bridge_is(
    target: str, becomes: tuple[str, ...]
) -> None:
    assert relaylaunch.becomes("/proxy", target, ("env", "--")) == becomes
    assert relaylaunch.becomes("/proxy", target, ()) == ("/proxy", target)


def test_down_stops_this_sandbox_s_relays_only(systemd: FakeSystemd) -> None:
    other = Sandbox("demo-0123abce")
    Manager({}).ensure([LLAMA, Relay(SANDBOX, 9000, GATEWAY, 7), Relay(other, 8081, GATEWAY, 9)])
    assert Manager({}).stop_all(SANDBOX) == 2
    assert list(systemd.units) == ["corral-relay-0123abce-8081.service"]
    assert Manager({}).stop_all(SANDBOX) == 0


def test_only_this_sandbox_s_units_are_found_in_a_listing() -> None:
    listing = (
        "corral-relay-0123abcd-8081.service loaded active running corral relay\n"
        "corral-relay-0123abce-8081.service loaded active running corral relay\n"
        "my-corral-relay-0123abcd-9.service loaded active running x\n"
    )
    assert relay.units_of(listing, SANDBOX) == {"corral-relay-0123abcd-8081.service"}


def reach(address: str, port: int) -> bytes:
    with socket.create_connection((address, port), timeout=5) as connection:
        return connection.recv(64)


def test_the_socket_is_handed_over_bound_to_its_device(tmp_path: Path) -> None:
    """The real launcher, bound to the loopback device; the proxy is a program that looks at what it got."""
    program = tmp_path / "proxy"
    program.write_text(
        f"#!{sys.executable}\n"
        "import os, socket, sys\n"
        "assert os.environ['LISTEN_FDS'] == '1' and os.environ['LISTEN_PID'] == str(os.getpid())\n"
        "listening = socket.socket(fileno=3)\n"
        "device = listening.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)\n"
        "print('ready', flush=True)\n"
        "connection, _ = listening.accept()\n"
        "connection.sendall(device.rstrip(b'\\0') + b' ' + sys.argv[1].encode())\n"
        "connection.close()\n"
    )
    program.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [sys.executable, "-I", relaylaunch.__file__, "127.0.0.1", str(port), "lo", str(program)]
    argv.append("198.51.100.9:8443")
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as launched:
        assert launched.stdout is not None
        assert launched.stdout.readline() == b"ready\n"
        assert reach("127.0.0.1", port) == b"lo 198.51.100.9:8443"
    assert launched.returncode == 0


def test_a_socket_that_was_opened_elsewhere_is_passed_out() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with relaylaunch.listen_inside(("env",), ("127.0.0.1", str(port), "lo")) as listening:
        assert listening.getsockname() == ("127.0.0.1", port)
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0") == b"lo"
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            listening.accept()[0].close()


def test_a_socket_that_cannot_be_opened_elsewhere_is_a_failure(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="no socket came out"):
        relaylaunch.listen_inside(("env",), ("127.0.0.1", "1", "corral-none"))
    assert "No such device" in capfd.readouterr().err


def test_a_relay_of_the_users_own_engine_enters_it_and_ends_with_it(systemd: FakeSystemd) -> None:
    first, second = Daemon(10, 1, 3), Daemon(10, 2, 3)
    (one,) = relay.relays(SANDBOX, [HostService(name="a", port=8081)], GATEWAY, 7, first)
    argv = one.argv("/proxy")
    assert "--property=PartOf=docker.service" in argv
    assert argv[-4:] == ("10", "1", "3", "--")
    Manager({}).ensure([one])
    Manager({}).ensure([one])
    assert len(systemd.started) == 1
    Manager({}).ensure([Relay(SANDBOX, 8081, GATEWAY, 7, second)])
    assert len(systemd.started) == 2


@pytest.mark.parametrize("place", ["path", "abstract"])
def test_systemd_is_told_when_the_port_is_open(tmp_path: Path, place: str) -> None:
    name = str(tmp_path / "notify") if place == "path" else f"\0corral-test-{tmp_path.name}-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd_s:
        systemd_s.bind(name)
        systemd_s.settimeout(10)
        relaylaunch.tell_ready({"NOTIFY_SOCKET": name.replace("\0", "@", 1)})
        assert systemd_s.recv(64) == b"READY=1"
    relaylaunch.tell_ready({})


def test_a_missing_bridge_is_a_failure_of_the_launcher() -> None:
    with pytest.raises(OSError, match="No such device"):
        relaylaunch.listen("127.0.0.1", 1, "corral-none")


def test_a_relay_that_cannot_start_names_its_port(systemd: FakeSystemd) -> None:
    systemd.refuse = "systemd-run failed: Address already in use"
    with pytest.raises(CorralError, match=r"host service 8081.*\n.*already in use") as caught:
        Manager({}).ensure([LLAMA])
    assert "journalctl --user -u corral-relay-0123abcd-8081.service" in (caught.value.hint or "")
    with pytest.raises(CorralError) as caught:
        Manager({}).ensure([Relay(SANDBOX, 80, GATEWAY, 7)])
    assert "ip_unprivileged_port_start" in (caught.value.hint or "")


def test_the_manager_is_found_without_a_login() -> None:
    assert relay.environment({"PATH": "/bin"}, 1000)["XDG_RUNTIME_DIR"] == "/run/user/1000"
    assert relay.environment({"XDG_RUNTIME_DIR": "/x"}, 1000)["XDG_RUNTIME_DIR"] == "/x"


def test_a_bridge_in_another_machine_is_explained() -> None:
    assert relay.bridge_ifindex(SANDBOX, lambda name: 12 if name == "corral-0123abcd" else 0) == 12
    with pytest.raises(CorralError, match="not on this machine"):
        relay.bridge_ifindex(Sandbox("demo-0123abce"))


def test_a_missing_proxy_program_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CorralError, match="systemd-socket-proxyd is missing"):
        relay.find_proxy([str(tmp_path / "none")])
