"""A Docker Engine and an enforcer in memory, as far as the command line uses them."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Network
from typing import Any

import requests
from docker.errors import APIError, NotFound

from corral import __version__
from policy import versions
from policy.errors import EnforcerError, NotReadyError

stream_pair = socket.socketpair


def refusal(status: int, explanation: str) -> APIError:
    """What docker-py raises for an answer of the engine."""
    response = requests.Response()
    response.status_code = status
    kind = NotFound if status == 404 else APIError
    return kind(explanation, response=response, explanation=explanation)


class FakeDocker:
    """Keeps networks and containers the way the engine reports them; refuses what the engine refuses."""

    def __init__(self) -> None:
        self.networks_by_name: dict[str, dict[str, Any]] = {}
        self.containers_by_id: dict[str, dict[str, Any]] = {}
        self.images_by_id: dict[str, dict[str, Any]] = {}
        self.timeout = 60
        self.calls: list[str] = []
        self.warnings: list[str] = []
        self.fail: dict[str, Exception] = {}
        self.overlapping: list[IPv4Network] = []
        self.stdout = b""
        self.stderr = b""
        self.exit_code = 0
        self.exec_output: tuple[bytes, bytes, int] = (b"", b"", 0)
        self.commands: list[list[str]] = []
        self.created: list[dict[str, Any]] = []
        self._ids = itertools.count(1)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            raise self.fail[name]

    def info(self) -> dict[str, Any]:
        self._called("info")
        return {"NCPU": 2}

    # networks

    def networks(self, filters: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        self._called("networks")
        wanted = (filters or {}).get("label", [])
        return [row for row in self.networks_by_name.values() if _labelled(row, wanted)]

    def inspect_network(self, name: str) -> dict[str, Any]:
        self._called("inspect_network")
        name = self._network_name(name)
        if name not in self.networks_by_name:
            raise refusal(404, f"network {name} not found")
        network = self.networks_by_name[name]
        on_it = {
            ident: {"Name": row["Names"][0].lstrip("/")}
            for ident, row in self.containers_by_id.items()
            if name in row["NetworkSettings"]["Networks"] and row["State"] == "running"
        }
        return {**network, "Containers": on_it}

    def create_network(self, name: str, **options: Any) -> dict[str, Any]:
        self._called("create_network")
        subnet = IPv4Network(options["ipam"]["Config"][0]["Subnet"])
        known = [
            IPv4Network(config["Subnet"])
            for network in self.networks_by_name.values()
            for config in network["IPAM"]["Config"]
        ]
        if any(subnet.overlaps(other) for other in (*known, *self.overlapping)):
            raise refusal(403, "Pool overlaps with other one on this address space")
        self.networks_by_name[name] = {
            "Name": name,
            "Id": f"net{next(self._ids)}",
            "Driver": options["driver"],
            "EnableIPv6": options["enable_ipv6"],
            "Internal": options["internal"],
            "Attachable": bool(options["attachable"]),
            "IPAM": {"Options": None, **options["ipam"]},
            "Options": dict(options["options"]),
            "Labels": dict(options["labels"]),
        }
        return {"Id": self.networks_by_name[name]["Id"], "Warning": ""}

    def remove_network(self, name: str) -> None:
        self._called("remove_network")
        if self.inspect_network(name)["Containers"]:
            raise refusal(403, f"network {name} has active endpoints")
        name = self._network_name(name)
        del self.networks_by_name[name]

    def _network_name(self, given: str) -> str:
        return next((name for name, row in self.networks_by_name.items() if row["Id"] == given), given)

    def disconnect_container_from_network(self, ident: str, name: str, force: bool = False) -> None:
        self._called("disconnect")
        del self.containers_by_id[ident]["NetworkSettings"]["Networks"][name]

    # images

    def images(self, filters: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        self._called("images")
        wanted = (filters or {}).get("label", [])
        return [row for row in self.images_by_id.values() if wanted and _labelled(row, wanted)]

    def remove_image(self, what: str) -> None:
        self._called("remove_image")
        for ident, row in self.images_by_id.items():
            if what == ident or what in row["RepoTags"]:
                row["RepoTags"] = [tag for tag in row["RepoTags"] if tag != what]
                if not row["RepoTags"]:
                    del self.images_by_id[ident]
                return
        raise refusal(404, f"No such image: {what}")

    # containers

    def create_container_from_config(self, body: Mapping[str, Any], name: str) -> dict[str, Any]:
        self._called("create")
        self.created.append(dict(body))
        endpoints = body["NetworkingConfig"]["EndpointsConfig"]
        ident = f"{next(self._ids):064x}"
        self.containers_by_id[ident] = {
            "Id": ident,
            "Names": ["/" + name],
            "State": "created",
            "ImageID": str(body.get("Image", "")),
            "Command": " ".join((*(body.get("Entrypoint") or ()), *(body.get("Cmd") or ()))),
            "Labels": dict(body["Labels"]),
            "NetworkSettings": {
                "Networks": {
                    network: {"IPAMConfig": dict(endpoint["IPAMConfig"]), "IPAddress": ""}
                    for network, endpoint in endpoints.items()
                }
            },
            "Body": dict(body),
        }
        return {"Id": ident, "Warnings": list(self.warnings)}

    def containers(
        self,
        all: bool = False,  # noqa: A002 - docker-py's name
        filters: Mapping[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        self._called("containers")
        filters = filters or {}
        wanted = filters.get("label", [])
        found = []
        for row in self.containers_by_id.values():
            if not all and row["State"] != "running":
                continue
            if "network" in filters and filters["network"] not in row["NetworkSettings"]["Networks"]:
                continue
            if not _labelled(row, wanted):
                continue
            found.append(row)
        return found

    def inspect_container(self, ident: str) -> dict[str, Any]:
        row = self._find(ident)
        body = row.get("Body") or {"HostConfig": {}}
        return {
            "Id": row["Id"],
            "Config": {"Labels": row["Labels"]},
            "HostConfig": body["HostConfig"],
            "NetworkSettings": row["NetworkSettings"],
        }

    def _find(self, ident: str) -> dict[str, Any]:
        for key, row in self.containers_by_id.items():
            if ident in {key, row["Names"][0].lstrip("/")}:
                return row
        raise refusal(404, f"No such container: {ident}")

    def start(self, ident: str) -> None:
        self._called("start")
        row = self._find(ident)
        row["State"] = "running"
        for endpoint in row["NetworkSettings"]["Networks"].values():
            endpoint["IPAddress"] = endpoint["IPAMConfig"]["IPv4Address"]

    def wait(self, ident: str, timeout: float | None = None) -> dict[str, Any]:
        self._called("wait")
        self._find(ident)["State"] = "exited"
        return {"StatusCode": self.exit_code}

    def logs(self, ident: str, stdout: bool, stderr: bool) -> bytes:
        self._called("logs")
        return self.stdout if stdout else self.stderr

    def stop(self, ident: str, timeout: int = 10) -> None:
        self._called("stop")
        self._find(ident)["State"] = "exited"

    def remove_container(self, ident: str, force: bool = False, v: bool = False) -> None:
        self._called("remove")
        row = self._find(ident)
        if row["State"] == "running" and not force:
            raise refusal(409, f"cannot remove container {ident}: container is running")
        del self.containers_by_id[row["Id"]]

    def kill(self, ident: str, name: str) -> None:
        self._called("kill")
        self._find(ident)["State"] = "exited"

    def close(self) -> None:
        self._called("close")

    def exec_create(self, ident: str, argv: list[str], user: str, workdir: str = "") -> dict[str, Any]:
        self._called("exec")
        self._find(ident)
        self.commands.append(argv)
        return {"Id": "exec1"}

    def exec_start(self, ident: str, socket: bool) -> Any:
        """Give the reading end of a stream that holds the output in frames, and ends."""
        assert socket
        ours, theirs = stream_pair()
        with ours:
            for number, text in ((1, self.exec_output[0]), (2, self.exec_output[1])):
                if text:
                    ours.sendall(bytes([number, 0, 0, 0]) + len(text).to_bytes(4, "big") + text)
        return theirs

    def exec_inspect(self, ident: str) -> dict[str, Any]:
        return {"ExitCode": self.exec_output[2]}


def _labelled(row: Mapping[str, Any], wanted: Iterable[str]) -> bool:
    """Judge as the engine does: ``key`` alone, or ``key=value``."""
    labels = row.get("Labels") or {}
    pairs = [label.partition("=") for label in wanted]
    return all(key in labels and (not sign or labels[key] == value) for key, sign, value in pairs)


class FakeEnforcer:
    """Grants every declared name one address, unless told to refuse."""

    def __init__(self) -> None:
        self.version_answer: dict[str, Any] = {
            **versions.describe(__version__),
            "writer": {**versions.describe(__version__, versions.WRITER_SCHEMAS), "reachable": True},
        }
        self.running = True
        self.refusal: str | None = None
        self.withdrawn: list[str] = []
        self.awaited: list[str] = []
        self.names: dict[str, list[str]] = {}
        self.warnings: list[str] = []
        self.status_answer: dict[str, Any] = {"permit_ranges": [], "sandboxes": [], "strangers": []}
        self.changes: list[tuple[Any, ...]] = []
        self.check_answer: dict[str, Any] = {"sessions": []}
        self.live_answer: dict[str, Any] = {
            "pins": [],
            "host": [],
            "skeleton": {"jump": True, "backstop": True, "input": True, "ipv6": True, "problems": []},
        }

    def _alive(self) -> None:
        if not self.running:
            raise EnforcerError(
                "the enforcer is not running: what runs keeps its fence, nothing new starts",
                "systemctl --user start corral-enforcer",
            )

    def version(self) -> dict[str, Any]:
        self._alive()
        return self.version_answer

    def await_ready(self, ident: str, timeout: float = 15.0) -> dict[str, Any]:
        self._alive()
        self.awaited.append(ident)
        if self.refusal:
            raise NotReadyError(self.refusal)
        return {"names": self.names, "warnings": self.warnings}

    def withdraw(self, ident: str) -> None:
        self._alive()
        self.withdrawn.append(ident)

    def status(self) -> dict[str, Any]:
        self._alive()
        return self.status_answer

    def live(self, sandbox: str) -> dict[str, Any]:
        self._alive()
        return self.live_answer

    def allow(
        self, sandbox: str, host: str, ports: Iterable[int], seconds: float | None, *, force: bool = False
    ) -> dict[str, Any]:
        self._alive()
        if self.refusal:
            raise NotReadyError(self.refusal)
        self.changes.append(("allow", sandbox, host, tuple(ports), seconds, force))
        row = {"service": "main", "session": "00000001", "addresses": ["203.0.113.9"]}
        return {"host": host, "ports": list(ports), "seconds": seconds, "sessions": [row]}

    def deny(self, sandbox: str, host: str) -> dict[str, Any]:
        self._alive()
        self.changes.append(("deny", sandbox, host))
        return {"host": host, "sessions": [{"service": "main", "session": "00000001"}]}

    def refresh(self, sandbox: str | None, names: Iterable[str] = ()) -> dict[str, Any]:
        self._alive()
        self.changes.append(("refresh", sandbox, tuple(names)))
        row = {
            "name": "api.example.com",
            "before": ["203.0.113.1"],
            "addresses": ["203.0.113.2"],
            "error": None,
        }
        return {"names": [{**row, "state": "OK"}], "sessions": []}

    def check(self, sandbox: str, host: str, port: int, *, resolve: bool = False) -> dict[str, Any]:
        self._alive()
        self.changes.append(("check", sandbox, host, port, resolve))
        found = {"addresses": ["203.0.113.9"], "refused": {"10.0.0.5": "private (10.0.0.0/8)"}, "error": None}
        return {**self.check_answer, **({"resolution": found} if resolve else {})}


def routes(*destinations: str) -> str:
    """What ``ip -j -4 route show table all`` prints for some routes."""
    import json

    rows: Iterable[dict[str, str]] = ({"dst": text, "dev": "eth0"} for text in destinations)
    return json.dumps(list(rows))
