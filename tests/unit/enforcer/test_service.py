"""The service's loop with a fake engine, a fake writer and a resolver that answers from a table."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enforcer.client import Client
from policy.errors import EnforcerError, NotReadyError

from .servicebench import GATEWAY, PIN, SANDBOX, UID, World, ask, eventually, play

__all__ = ["play"]


def test_a_created_container_gets_what_it_declares_and_vetting_allows(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        answer = await ask(world.client.await_ready, "c1")
        assert answer["names"]["api.example.com"] == ["93.184.216.34"]
        assert any("maybe.example.com" in text for text in answer["warnings"])
        assert set(world.writer.pins) == {PIN}
        assert set(world.writer.host) == {("172.16.0.2", "tcp", 8081, GATEWAY)}
        assert "93.184.216.34   api.example.com" in world.hosts("00000001")
        assert "198.18.0.1" not in world.hosts("00000001")

    play(acts)


def test_entries_go_when_the_container_dies(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        del world.engine.inspects["c1"]
        world.engine.send("die", "c1")
        await eventually(lambda: not world.writer.pins and not world.writer.host)

    play(acts)


def test_nothing_is_applied_before_docker_was_asked(play: Callable[..., World]) -> None:
    # A list that is only empty because nobody looked yet would take away what stands.
    def before(world: World) -> None:
        world.container("c1", "00000001")
        world.writer.pins = {PIN: f"{SANDBOX.id} main api.example.com"}
        world.engine.listing.clear()

    async def acts(world: World) -> None:
        await ask(world.client.status)
        assert world.writer.applies == []
        world.engine.listing.set()
        await ask(world.client.await_ready, "c1")
        assert all(PIN in pins for pins in world.writer.applies)

    play(acts, before)


def test_a_restart_keeps_what_stands_until_the_names_were_asked(play: Callable[..., World]) -> None:
    def before(world: World) -> None:
        world.container("c1", "00000001")
        stray = ("172.16.0.9", "tcp", 443, "93.184.216.34")
        world.writer.pins = {PIN: f"{SANDBOX.id} main api.example.com", stray: "x"}
        world.gate.clear()

    async def acts(world: World) -> None:
        await eventually(lambda: world.writer.applies)
        world.gate.set()
        await ask(world.client.await_ready, "c1")
        assert all(PIN in pins for pins in world.writer.applies)
        assert set(world.writer.pins) == {PIN}

    play(acts, before)


@pytest.mark.parametrize(
    "extra",
    [
        {"Privileged": True},
        {"CapAdd": ["NET_ADMIN"]},
        {"CapDrop": []},
        {"NetworkMode": "host"},
        {"PidMode": "host"},
        {"IpcMode": "host"},
        {"UsernsMode": "host"},
        {"UTSMode": "host"},
        {"SecurityOpt": ["no-new-privileges", "seccomp=unconfined"]},
        {"SecurityOpt": []},
        {"Devices": [{"PathOnHost": "/dev/kvm"}]},
        {"Binds": ["/:/host"]},
        {"VolumesFrom": ["other"]},
        {"Dns": []},
        {"Dns": ["192.0.2.53"]},
        {"DnsOptions": ["use-vc"]},
        {"ExtraHosts": ["x:192.0.2.1"]},
        {"PortBindings": {"80/tcp": [{}]}},
        {"Sysctls": {}},
        {"Runtime": "nvidia"},
        {"MaskedPaths": []},
        {"ReadonlyPaths": []},
        {"SomethingNew": {"opens": "a door"}},
        {"RestartPolicy": {"Name": "always", "MaximumRetryCount": 0}},
        {"LogConfig": {"Type": "fluentd", "Config": {}}},
        {"ShmSize": 1 << 30},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_a_container_that_differs_in_any_field_gets_nothing(
    play: Callable[..., World], extra: dict[str, Any]
) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001", **extra)
        with pytest.raises(NotReadyError) as caught:
            await ask(world.client.await_ready, "c1")
        assert next(iter(extra)) in caught.value.message or "paths of /proc" in caught.value.message
        assert not world.writer.pins

    play(acts)


def test_what_an_engine_adds_by_its_own_configuration_is_accepted(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container(
            "c1",
            "00000001",
            Ulimits=[{"Name": "memlock", "Soft": -1, "Hard": -1}],
            LogConfig={"Type": "json-file", "Config": {"compress": "true"}},
            PidsLimit=None,
            Memory=123 << 20,
            NanoCpus=10**9,
            # Of an earlier corral, which gave none.
            DnsOptions=[],
        )
        await ask(world.client.await_ready, "c1")
        assert set(world.writer.pins) == {PIN}

    play(acts)


@pytest.mark.parametrize("runtime", ["runc", "runsc", "kata"])
def test_a_runtime_that_a_policy_may_name_changes_nothing(play: Callable[..., World], runtime: str) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001", Runtime=runtime)
        await ask(world.client.await_ready, "c1")
        assert set(world.writer.pins) == {PIN}

    play(acts)


def test_a_name_without_an_address_stops_the_start_and_is_named(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.answers = {}
        world.container("c1", "00000001")
        with pytest.raises(NotReadyError) as caught:
            await ask(world.client.await_ready, "c1")
        assert "api.example.com" in caught.value.message
        assert "maybe.example.com" not in caught.value.message
        assert not world.writer.pins

    play(acts)


def test_a_second_container_with_a_taken_address_gets_nothing(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        world.container("c2", "00000002")
        with pytest.raises(NotReadyError, match="already"):
            await ask(world.client.await_ready, "c2")

    play(acts)


def test_without_the_writer_nothing_is_published_and_the_reason_is_told(
    play: Callable[..., World],
) -> None:
    async def acts(world: World) -> None:
        world.writer.broken = True
        world.container("c1", "00000001")
        with pytest.raises(NotReadyError, match="the writer does not answer"):
            await ask(world.client.await_ready, "c1", 0.5)
        assert "93.184.216.34" not in world.hosts("00000001")
        world.writer.broken = False
        await ask(world.client.await_ready, "c1")
        assert "93.184.216.34" in world.hosts("00000001")

    play(acts)


def test_a_container_that_docker_does_not_show_is_looked_at_again_and_the_reason_is_told(
    play: Callable[..., World],
) -> None:
    async def acts(world: World) -> None:
        world.engine.broken.add("c1")
        world.container("c1", "00000001")
        with pytest.raises(NotReadyError, match="no answer for this container"):
            await ask(world.client.await_ready, "c1", 0.5)
        waiting = asyncio.ensure_future(ask(world.client.await_ready, "c1"))
        await asyncio.sleep(0)
        world.engine.broken.clear()
        # No event tells of it: it is asked for again.
        await waiting
        assert "93.184.216.34" in world.hosts("00000001")

    play(acts)


def test_an_unknown_container_is_refused(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        await ask(world.client.status)
        with pytest.raises(NotReadyError, match="does not know this container: Docker has no such"):
            await ask(world.client.await_ready, "nobody")

    play(acts)


def test_a_stranger_is_taken_off_the_network_and_reported(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        await ask(world.client.status)
        networks = {SANDBOX.network: {}, "bridge": {}}
        world.engine.inspects["s1"] = {
            "Id": "s1",
            "Name": "/stranger",
            "State": {"Status": "created"},
            "Config": {"Labels": {}},
            "HostConfig": {"NetworkMode": SANDBOX.network},
            "NetworkSettings": {"Networks": networks},
        }
        world.engine.send("create", "s1", ours=False)
        await eventually(lambda: world.engine.disconnected)
        assert world.engine.disconnected == [(SANDBOX.network, "s1")]
        found = (await ask(world.client.status))["strangers"]
        assert [(row["name"], row["network"]) for row in found] == [("stranger", SANDBOX.network)]
        assert found[0]["reasons"] == ["corral did not start it", "disconnected"]
        world.engine.send("destroy", "s1", ours=False)
        for _ in range(100):
            if not (await ask(world.client.status))["strangers"]:
                break
        else:
            raise AssertionError("still reported")

    play(acts)


def test_a_restart_of_a_sandbox_is_no_stranger(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        world.engine.send("die", "c1")
        await eventually(lambda: not world.writer.pins)
        world.engine.inspects["c1"]["State"] = {"Status": "exited", "Running": False}
        connect = {"ID": "n", "Attributes": {"container": "c1"}}
        world.engine.queue.put({"Type": "network", "Action": "connect", "Actor": connect})
        world.engine.inspects["c1"]["State"] = {"Status": "running", "Running": True}
        world.engine.inspects["c1"]["NetworkSettings"]["Networks"][SANDBOX.network]["IPAddress"] = (
            "172.16.0.2"
        )
        world.engine.send("start", "c1")
        await eventually(lambda: set(world.writer.pins) == {PIN})
        assert world.engine.disconnected == []

    play(acts)


def test_a_declared_container_with_a_live_resolver_is_taken_off(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001", Dns=[])
        connect = {"ID": "n", "Attributes": {"container": "c1"}}
        world.engine.queue.put({"Type": "network", "Action": "connect", "Actor": connect})
        await eventually(lambda: world.engine.disconnected == [(SANDBOX.network, "c1")])

    play(acts)


def test_one_container_that_docker_cannot_show_hides_no_other(play: Callable[..., World]) -> None:
    def before(world: World) -> None:
        world.container("c0", "00000000", "172.16.0.9")
        world.container("c1", "00000001")
        world.engine.broken.add("c0")

    async def acts(world: World) -> None:
        await ask(world.client.await_ready, "c1")
        assert set(world.writer.pins) == {PIN}

    play(acts, before)


@pytest.mark.parametrize(
    "mount",
    [
        ("/tmp/x", "/usr/local/bin/corral-entrypoint"),
        ("/tmp/x", "/usr"),
        ("/tmp/x", "/etc/x"),
        ("/tmp/x", "/"),
        ("/run", "/home/agent/run"),
        ("/var/run", "/x"),
        ("/", "/host"),
    ],
    ids=lambda mount: mount[1],
)
def test_a_mount_that_covers_the_guards_or_holds_the_engines_socket_gets_nothing(
    play: Callable[..., World], mount: tuple[str, str]
) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        body = {
            "Type": "bind",
            "Source": mount[0],
            "Target": mount[1],
            "BindOptions": {"Propagation": "rprivate"},
        }
        world.engine.inspects["c1"]["HostConfig"]["Mounts"].append(body)
        with pytest.raises(NotReadyError, match="mount"):
            await ask(world.client.await_ready, "c1")
        assert not world.writer.pins

    play(acts)


def test_an_endpoint_with_more_addresses_or_another_group_gets_nothing(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        endpoint = world.engine.inspects["c1"]["NetworkSettings"]["Networks"][SANDBOX.network]
        endpoint["IPAMConfig"]["IPv6Address"] = "2001:db8::1"
        with pytest.raises(NotReadyError, match="more addresses"):
            await ask(world.client.await_ready, "c1")
        world.container("c2", "00000002", "172.16.0.3")
        world.engine.inspects["c2"]["Config"]["User"] = f"{UID}:0"
        with pytest.raises(NotReadyError, match="runs as user"):
            await ask(world.client.await_ready, "c2")

    play(acts)


def test_asking_for_the_status_does_not_hide_that_an_address_is_in_use(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        applied = len(world.writer.applies)
        world.writer.packets = 5
        await ask(world.client.status)
        seen: list[Any] = []
        step = world.service.names.step
        world.service.names.step = lambda event: (seen.append(event), step(event))[1]  # type: ignore[assignment]
        world.container("c2", "00000002", "172.16.0.3")
        await ask(world.client.await_ready, "c2")
        assert len(world.writer.applies) > applied
        assert any(type(event).__name__ == "InUse" and event.address == PIN[3] for event in seen)

    play(acts)


def test_a_network_with_host_bits_in_its_subnet_is_read() -> None:
    from enforcer.tracker import subnets_of

    config = [{"Subnet": "172.18.0.5/16"}, {"Subnet": ""}, {}, {"Subnet": "x"}, {"Subnet": "fd00::1/64"}]
    assert subnets_of({"IPAM": {"Config": config}}) == ["172.18.0.0/16", "fd00::/64"]
    assert subnets_of({"IPAM": None}) == []


def test_a_sandbox_that_was_connected_elsewhere_is_taken_back(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        world.engine.inspects["c1"]["NetworkSettings"]["Networks"]["bridge"] = {}
        world.engine.queue.put(
            {"Type": "network", "Action": "connect", "Actor": {"ID": "n", "Attributes": {"container": "c1"}}}
        )
        await eventually(lambda: world.engine.disconnected == [("bridge", "c1")])
        world.engine.queue.put(
            {
                "Type": "network",
                "Action": "disconnect",
                "Actor": {"ID": "n", "Attributes": {"container": "c1"}},
            }
        )
        await eventually(lambda: set(world.writer.pins) == {PIN})

    play(acts)


def test_a_writer_that_was_away_when_the_status_was_asked_is_soon_well_again(
    play: Callable[..., World],
) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        world.writer.broken = True
        assert "the writer does not answer" in (await ask(world.client.status))["errors"]
        world.writer.broken = False
        await eventually(lambda: not world.service.errors)
        assert (await ask(world.client.status))["errors"] == []

    play(acts)


def test_status_and_live_tell_what_is_there(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        status = await ask(world.client.status)
        session = status["sandboxes"][0]["sessions"][0]
        assert session["state"] == "ready"
        assert session["names"][0]["state"] == "OK"
        assert json.dumps(status)
        live = await ask(world.client.live, SANDBOX.id)
        assert live["pins"] == [list(PIN)]
        assert live["skeleton"]["jump"]
        assert (await ask(world.client.live, "other-0a0b0c0e"))["pins"] == []

    play(acts)


def test_a_dead_service_is_told_with_the_command_that_starts_it(tmp_path: Path) -> None:
    with pytest.raises(EnforcerError) as caught:
        Client(tmp_path / "none.sock").status()
    assert caught.value.hint == "systemctl --user start corral-enforcer"


def test_who_joins_or_enters_a_sandbox_is_told_in_status(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        world.engine.inspects["j1"] = {
            "Id": "j1",
            "Name": "/joiner",
            "State": {"Running": True},
            "Config": {},
            "HostConfig": {"NetworkMode": "container:c1"},
        }
        world.engine.send("start", "j1", ours=False)
        await eventually(lambda: world.engine.stopped == ["j1"])
        world.engine.execs["e1"] = {"ProcessConfig": {"user": "root", "privileged": True}}
        event = {"ID": "c1", "Attributes": {"io.corral.uid": str(UID), "execID": "e1"}}
        world.engine.queue.put({"Type": "container", "Action": "exec_start: sh -c id", "Actor": event})
        await eventually(lambda: "e1" in world.service.tracker.strangers)
        told = {row["name"]: row["reasons"] for row in (await ask(world.client.status))["strangers"]}
        assert "stopped" in told["joiner"]
        name = world.engine.inspects["c1"]["Name"].lstrip("/")
        assert told[name][0] == "docker exec --privileged as root: corral did not start it"
        world.engine.send("die", "c1")
        await eventually(lambda: set(world.service.tracker.strangers) == {"j1"})

    play(acts)


def test_execs_and_joiners_from_before_the_service_started_are_found(play: Callable[..., World]) -> None:
    def before(world: World) -> None:
        world.container("c1", "00000001")
        world.engine.inspects["c1"]["ExecIDs"] = ["e1"]
        world.engine.execs["e1"] = {"ProcessConfig": {"user": "0", "privileged": False}}
        world.container("j1", "00000002", "172.16.0.3", NetworkMode="container:c1")
        world.engine.inspects["j1"]["State"] = {"Status": "running", "Running": True}

    async def acts(world: World) -> None:
        await eventually(lambda: set(world.service.tracker.strangers) == {"e1", "j1"})
        assert world.engine.stopped == ["j1"]

    play(acts, before)
