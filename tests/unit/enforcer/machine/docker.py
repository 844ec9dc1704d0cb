"""A Docker in memory: what it holds, and events that arrive as the test wants them to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from enforcer.hostsfile import render
from enforcer.sessions import MASKED, READ_ONLY
from policy.container import SessionSpec, create_body, network_body
from policy.declaration import Declaration
from policy.errors import EngineError
from policy.identity import Sandbox, StatePaths
from tests.unit.enforcer.machine.faults import Faults

UID = 1000

Inspect = dict[str, Any]


class Box:
    """A sandbox with its own subnet: 172.16.<number>.0/26."""

    def __init__(self, number: int) -> None:
        self.sandbox = Sandbox(f"box{number}-0a0b0c0{number}")
        self.subnet, self.gateway = f"172.16.{number}.0/26", f"172.16.{number}.1"
        self.network: Inspect = network_body(
            self.sandbox, UID, self.subnet, self.gateway, f"172.16.{number}.48/28"
        )

    def address(self, host: int) -> str:
        return f"{self.gateway[:-1]}{2 + host}"


class FakeDocker:
    """Both the daemon and a client of it; ``up`` says whether it answers.

    ``events`` are those that nobody has read yet.
    """

    version = "26.1.5"

    def __init__(self, faults: Faults, data: Path) -> None:
        self.faults = faults
        self.data = data
        self.up = True
        self.inspects: dict[str, Inspect] = {}
        self.nets: dict[str, Inspect] = {
            "bridge": {"Name": "bridge", "Labels": {}, "IPAM": {"Config": [{"Subnet": "172.17.0.0/16"}]}}
        }
        self.events: list[Mapping[str, Any]] = []

    # -- the client: see enforcer.engine.Engine

    def _answer(self, where: str) -> None:
        if not self.up:
            raise EngineError("Docker: it does not run")
        self.faults.call("engine", where)

    def identifiers(self, uid: int) -> list[str]:
        self._answer("identifiers")
        return [
            ident
            for ident, row in self.inspects.items()
            if row["Config"]["Labels"].get("io.corral.uid") == str(uid)
        ]

    def container(self, ident: str) -> Inspect | None:
        self._answer("container")
        return self.inspects.get(ident)

    def networks(self) -> list[Inspect]:
        self._answer("networks")
        return list(self.nets.values())

    def network(self, ident: str) -> Inspect | None:
        self._answer("network")
        found = self.nets.get(ident)
        on = [i for i, row in self.inspects.items() if ident in row["NetworkSettings"]["Networks"]]
        return None if found is None else {**found, "Containers": {i: {} for i in on}}

    def disconnect(self, network: str, ident: str) -> None:
        self._answer("disconnect")
        self.faults.service_writes("disconnect")
        if ident in self.inspects:
            self.detach(network, ident)

    def stop(self, ident: str) -> None:
        self._answer("stop")
        self.faults.service_writes("stop")
        if ident in self.inspects and self.inspects[ident]["State"]["Running"]:
            self.die(ident)

    def ended(self, uid: int, *, or_created: bool = False) -> list[str]:
        self._answer("ended")
        wanted = ("exited", "created") if or_created else ("exited",)
        return [i for i in self.identifiers(uid) if self.inspects[i]["State"]["Status"] in wanted]

    def remove(self, ident: str) -> None:
        self._answer("remove")
        self.faults.service_writes("remove")
        if ident in self.inspects and self.inspects[ident]["State"]["Status"] in ("exited", "created"):
            self.destroy(ident)

    def joiners(self) -> list[str]:
        self._answer("joiners")
        return [
            ident
            for ident, row in self.inspects.items()
            if str(row["HostConfig"].get("NetworkMode", "")).startswith("container:")
            and row["State"]["Running"]
        ]

    def exec(self, ident: str) -> Inspect | None:
        self._answer("exec")
        return None

    def subscribe(self) -> Iterator[Mapping[str, Any]]:
        raise NotImplementedError("events are handed over one by one")

    def close(self) -> None:
        pass

    # -- the daemon

    def emit(self, action: str, ident: str, network: bool = False) -> None:
        if network:
            actor = {"ID": "net", "Attributes": {"container": ident} if ident else {}}
            self.events.append({"Type": "network", "Action": action, "Actor": actor})
        else:
            labels = self.inspects[ident]["Config"]["Labels"] if ident in self.inspects else {}
            actor = {"ID": ident, "Attributes": dict(labels)}
            self.events.append({"Type": "container", "Action": action, "Actor": actor})

    def create(
        self,
        ident: str,
        box: Box,
        session: str,
        address: str,
        declaration: Declaration,
        host_config: Mapping[str, Any] = {},
        user: str | None = None,
    ) -> None:
        """What ``corral run`` does before it asks whether the container may start."""
        hosts = StatePaths(self.data / box.sandbox.id).hosts(session)
        if not hosts.exists():
            hosts.parent.mkdir(parents=True)
            names = [name.host for name in declaration.names]
            hosts.write_bytes(render("main", address, box.gateway, names))
        spec = SessionSpec(
            sandbox=box.sandbox, service="main", session=session, purpose="run", uid=UID, gid=UID, image="x",
            address=address, hosts_file=str(hosts), project="/p", workdir="/p", argv=("x",), declaration=declaration,
        )  # fmt: skip
        body = create_body(spec)
        config = {k: v for k, v in body.items() if k not in ("HostConfig", "NetworkingConfig")}
        self.inspects[ident] = {
            "Id": ident,
            "Name": f"/{spec.container}",
            "State": {"Status": "created", "Running": False},
            "Config": {**config, "User": user or config["User"]},
            "HostConfig": {
                **body["HostConfig"],
                "MaskedPaths": sorted(MASKED),
                "ReadonlyPaths": sorted(READ_ONLY),
                **host_config,
            },
            "NetworkSettings": {"Networks": {box.sandbox.network: {"IPAMConfig": {"IPv4Address": address}}}},
        }
        self.emit("create", ident)

    def create_stranger(self, ident: str, network: str) -> None:
        self.inspects[ident] = {
            "Id": ident,
            "Name": f"/{ident}",
            "State": {"Status": "created", "Running": False},
            "Config": {"Labels": {}},
            "HostConfig": {"NetworkMode": network},
            "NetworkSettings": {"Networks": {network: {}}},
        }
        self.emit("create", ident)

    def create_joiner(self, ident: str, target: str) -> None:
        """A container in another one's network namespace, running."""
        self.inspects[ident] = {
            "Id": ident,
            "Name": f"/{ident}",
            "State": {"Status": "running", "Running": True},
            "Config": {"Labels": {}},
            "HostConfig": {"NetworkMode": f"container:{target}"},
            "NetworkSettings": {"Networks": {}},
        }
        self.emit("create", ident)
        self.emit("start", ident)

    def _state(self, ident: str, status: str) -> None:
        running = status in ("running", "paused")
        row = self.inspects[ident]
        networks = {
            name: {**end, "IPAddress": (end.get("IPAMConfig") or {}).get("IPv4Address") if running else ""}
            for name, end in row["NetworkSettings"]["Networks"].items()
        }
        self.inspects[ident] = {
            **row,
            "State": {"Status": status, "Running": running},
            "NetworkSettings": {"Networks": networks},
        }

    def start(self, ident: str) -> None:
        self._state(ident, "running")
        self.emit("connect", ident, network=True)
        self.emit("start", ident)

    def pause(self, ident: str, paused: bool) -> None:
        self._state(ident, "paused" if paused else "running")
        self.emit("pause" if paused else "unpause", ident)

    def die(self, ident: str) -> None:
        self._state(ident, "exited")
        self.emit("die", ident)
        self.emit("disconnect", ident, network=True)

    def destroy(self, ident: str) -> None:
        if self.inspects[ident]["State"]["Status"] in ("running", "paused"):
            self.die(ident)
        # A destroy event carries the labels, an inspect finds nothing any more.
        self.emit("destroy", ident)
        del self.inspects[ident]

    def rename(self, ident: str, name: str) -> None:
        self.inspects[ident] = {**self.inspects[ident], "Name": f"/{name}"}
        self.emit("rename", ident)

    def attach(self, network: str, ident: str) -> None:
        row = self.inspects[ident]
        networks = {**row["NetworkSettings"]["Networks"], network: {}}
        self.inspects[ident] = {**row, "NetworkSettings": {"Networks": networks}}
        self.emit("connect", ident, network=True)

    def detach(self, network: str, ident: str) -> None:
        row = self.inspects[ident]
        networks = {k: v for k, v in row["NetworkSettings"]["Networks"].items() if k != network}
        self.inspects[ident] = {**row, "NetworkSettings": {"Networks": networks}}
        self.emit("disconnect", ident, network=True)

    def add_network(self, name: str, subnet: str) -> None:
        self.nets[name] = {"Name": name, "Labels": {}, "IPAM": {"Config": [{"Subnet": subnet}]}}
        self.emit("create", "", network=True)

    def remove_network(self, name: str) -> None:
        del self.nets[name]
        self.emit("destroy", "", network=True)
