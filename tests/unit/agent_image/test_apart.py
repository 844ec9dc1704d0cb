"""The gate and the checks of a container without a network, or with a kernel, of its own."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence

import pytest

from agent_image.files.entrypoint import apart as gate
from agent_image.files.entrypoint.tries import Try
from agent_image.files.verify import apart
from agent_image.files.verify.main import checks, judge
from agent_image.files.verify.network import Reply
from tests.unit.agent_image.container import PROBE, Container, expect, outcome

HEAD = "Inter-|   Receive\n face |bytes    packets\n"
LO = "    lo:       0       0\n"
ROUTES = "Iface\tDestination\tGateway\n"
BODY = {"connection": "none", "probe": {"address": "192.0.2.1", "port": 443}}


def interfaces(*names: str) -> str:
    return HEAD + LO + "".join(f"{name:>6}: 0 0\n" for name in names)


def reader(text: str, flags: str = "0x0\n", routes: str = ROUTES) -> Callable[[str], str]:
    files = {gate.INTERFACES: text, gate.ROUTES: routes}
    return lambda path: files.get(path, flags)


def ending(kind: str) -> Callable[[Sequence[Try]], None]:
    def attempt(tries: Sequence[Try]) -> None:
        for one in tries:
            one.kind = kind

    return attempt


def policy(**changes: object) -> gate.Apart:
    found = gate.parse(json.dumps({**BODY, **changes}))
    assert found is not None
    return found


def passes(text: str, *, kind: str = "no-route", **files: str) -> bool:
    return gate.run(policy(), lambda _: None, reader(text, **files), ending(kind))


def test_only_lo_no_route_and_nothing_reachable_opens_the_gate() -> None:
    assert passes(interfaces())
    # What modules of the kernel leave in every namespace counts only when it is up.
    assert passes(interfaces("tunl0", "sit0"))


@pytest.mark.parametrize(
    "broken",
    [
        {"text": interfaces("eth0")},
        {"text": interfaces("eth0"), "flags": "0x1003\n"},
        {"text": interfaces("tunl0"), "flags": "0x81\n"},
        {"text": interfaces("tunl0"), "flags": "what\n"},
        {"text": HEAD},
        {"text": interfaces(), "routes": ROUTES + "eth0\t00000000\t010011AC\n"},
        *({"text": interfaces(), "kind": kind} for kind in ("connected", "data", "refused", "timeout")),
        {"text": interfaces(), "kind": "unreachable"},
    ],
)
def test_anything_more_than_lo_keeps_it_closed(broken: dict[str, str]) -> None:
    assert not passes(**broken)  # type: ignore[arg-type]


def test_what_cannot_be_read_keeps_it_closed() -> None:
    def unreadable(path: str) -> str:
        raise OSError(errno.EACCES, "denied", path)

    assert not gate.run(policy(), lambda _: None, unreadable, ending("no-route"))


def test_the_hosts_network_is_told_and_nothing_is_tried() -> None:
    told: list[str] = []
    assert gate.run(policy(connection="host"), told.append, attempt=lambda _: pytest.fail("tried"))
    assert told == [gate.NOT_ENFORCED]


def test_a_gate_of_a_sandbox_with_a_network_is_not_this_one() -> None:
    assert gate.parse('{"probe": {}}') is None


@pytest.mark.parametrize(
    "body",
    [
        {**BODY, "connection": "own"},
        {**BODY, "connection": None},
        {**BODY, "more": 1},
        {"connection": "none"},
        {**BODY, "probe": {"address": "here", "port": 443}},
        {**BODY, "probe": {"address": "192.0.2.1", "port": True}},
    ],
)
def test_what_is_not_exactly_understood_opens_nothing(body: object) -> None:
    with pytest.raises(Exception, match=r".*"):
        gate.parse(json.dumps(body))


# -- corral-verify


@pytest.fixture
def alone(container: Container) -> Container:
    container.put("/proc/self/net/dev", interfaces())
    container.put("/proc/self/net/route", ROUTES)
    gone = Reply("no-route", 0.0, code=errno.ENETUNREACH)
    container.open_tcp[PROBE, 443] = gone
    container.open_udp[PROBE, 443] = gone
    return container


def statuses(container: Container, connection: str) -> dict[str, tuple[str, str]]:
    expected = expect(connection=connection, names={"a.example": ["192.0.2.7"]}, peers={"p": "192.0.2.9"})
    return {name: judge(check, expected, container) for name, check in checks(expected)}


def test_without_a_network_lo_is_checked_and_the_rest_says_why_it_is_not(alone: Container) -> None:
    found = statuses(alone, "none")
    assert found["only-loopback"][0] == found["ipv6-disabled"][0] == found["embedded-dns-closed"][0] == "ok"
    for name in ("unlisted-host-blocked", "dns-closed", "peer-unreachable:p", "pinned-name:a.example"):
        assert found[name] == ("skip", apart.REASONS["none"])
    assert found["non-root"][0] == "ok"


def test_on_the_hosts_network_every_check_of_a_network_is_skipped(alone: Container) -> None:
    found = statuses(alone, "host")
    assert "only-loopback" not in found
    skipped = {name for name, (status, detail) in found.items() if detail == apart.REASONS["host"]}
    network = {
        "unlisted-host-blocked",
        "dns-closed",
        "embedded-dns-closed",
        "ipv6-disabled",
        "no-ipv6-address",
    }
    assert network <= skipped
    assert {found[name][0] for name in skipped} == {"skip"}
    assert found["no-capabilities"][0] == "ok"


@pytest.mark.parametrize("name", ["eth0", "tunl0"])
def test_another_interface_is_found(alone: Container, name: str) -> None:
    alone.put("/proc/self/net/dev", interfaces(name))
    alone.put(f"/sys/class/net/{name}/flags", "0x1003\n")
    assert outcome(apart.only_loopback, alone, connection="none")[0] == "fail"


def test_a_fallback_device_that_is_down_is_none(alone: Container) -> None:
    alone.put("/proc/self/net/dev", interfaces("tunl0"))
    alone.put("/sys/class/net/tunl0/flags", "0x80\n")
    assert outcome(apart.only_loopback, alone, connection="none")[0] == "ok"


@pytest.mark.parametrize("way", ["open_tcp", "open_udp"])
def test_any_other_end_than_no_route_is_found(alone: Container, way: str) -> None:
    getattr(alone, way)[PROBE, 443] = Reply("timeout", 0.9)
    assert outcome(apart.only_loopback, alone, connection="none")[0] == "fail"


def test_routes_or_no_lo_are_found(alone: Container) -> None:
    alone.put("/proc/self/net/route", ROUTES + "eth0\t0\t0\n")
    assert outcome(apart.only_loopback, alone, connection="none")[0] == "fail"
    alone.put("/proc/self/net/route", ROUTES)
    alone.put("/proc/self/net/dev", HEAD)
    assert outcome(apart.only_loopback, alone, connection="none")[0] == "fail"


def test_an_unknown_connection_is_no_expectation() -> None:
    with pytest.raises(ValueError, match="not a connection"):
        expect(connection="some")


def test_what_asks_the_hosts_kernel_says_that_it_cannot(container: Container) -> None:
    expected = expect(runtime="runsc")
    found = {name: judge(check, expected, container) for name, check in checks(expected)}
    for name in ("seccomp", "iptables-refused", "limits", "mounts-equal-policy"):
        assert found[name][0] == "skip"
        assert "runtime runsc" in found[name][1]
    assert found["non-root"][0] == found["unlisted-host-blocked"][0] == "ok"
