"""Who is a stranger, and what is done about one: no Docker here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from enforcer.strangers import EXECS, GOES_ON, Strangers, exec_problem, goes_on_to_ask, joined, reasons
from policy.container import DEAD_RESOLVER
from policy.declaration import LABEL_SANDBOX, LABEL_UID
from policy.errors import EngineError
from policy.identity import Sandbox

UID = 1000
SANDBOX = Sandbox("demo-0a0b0c0d")
NETWORK = SANDBOX.network
LABELS = {LABEL_SANDBOX: SANDBOX.id, LABEL_UID: str(UID)}


def container(
    ident: str,
    mode: str = NETWORK,
    *networks: str,
    labels: Mapping[str, str] | None = None,
    running: bool = True,
    dns: str | None = None,
) -> dict[str, Any]:
    return {
        "Id": ident,
        "Name": f"/{ident}",
        "State": {"Running": running},
        "Config": {"Labels": dict(labels or {})},
        "HostConfig": {"NetworkMode": mode, "Dns": [dns] if dns else []},
        "NetworkSettings": {"Networks": {name: {} for name in networks}},
    }


def session(ident: str = "s", *networks: str) -> dict[str, Any]:
    return container(ident, NETWORK, *(networks or (NETWORK,)), labels=LABELS, dns=DEAD_RESOLVER)


class Engine:
    """A Docker that remembers what it was told."""

    version = "26.1.5"

    def __init__(self, *rows: dict[str, Any]) -> None:
        self.rows = {row["Id"]: row for row in rows}
        self.execs: dict[str, dict[str, Any]] = {}
        self.done: list[tuple[str, ...]] = []
        self.refuses = False

    def container(self, ident: str) -> dict[str, Any] | None:
        return self.rows.get(ident)

    def exec(self, ident: str) -> dict[str, Any] | None:
        return self.execs.get(ident)

    def disconnect(self, network: str, ident: str) -> None:
        self._do("disconnect", network, ident)
        self.rows[ident]["NetworkSettings"]["Networks"].pop(network, None)

    def stop(self, ident: str) -> None:
        self._do("stop", ident)

    def _do(self, *what: str) -> None:
        if self.refuses:
            raise EngineError("Docker: no")
        self.done.append(what)

    def identifiers(self, uid: int) -> list[str]:
        return list(self.rows)

    def joiners(self) -> list[str]:
        return []

    def networks(self) -> list[dict[str, Any]]:
        return []

    def network(self, ident: str) -> dict[str, Any] | None:
        return None

    def subscribe(self) -> Iterator[Mapping[str, Any]]:
        return iter(())

    def close(self) -> None:
        pass


def look(ident: str, *rows: dict[str, Any], refuses: bool = False) -> tuple[Engine, Strangers]:
    engine, watch = Engine(*rows), Strangers(UID, UID)
    engine.refuses = refuses
    watch.look(engine, ident, [NETWORK])
    return engine, watch


def test_a_session_on_its_own_network_is_no_stranger() -> None:
    engine, watch = look("s", session())
    assert engine.done == []
    assert watch.rows == {}


@pytest.mark.parametrize("networks", [(), (NETWORK,), (NETWORK, "bridge")])
def test_a_foreign_container_leaves_the_sandboxs_network_and_keeps_its_own(networks: tuple[str, ...]) -> None:
    engine, watch = look("f", container("f", NETWORK, *networks))
    assert engine.done == [("disconnect", NETWORK, "f")]
    assert watch.rows["f"][0].reasons == ("corral did not start it", "disconnected")


def test_a_session_leaves_every_network_but_its_own() -> None:
    engine, watch = look("s", session("s", NETWORK, "bridge", "app"))
    assert engine.done == [("disconnect", "app", "s"), ("disconnect", "bridge", "s")]
    assert {row.network for row in watch.rows["s"]} == {"app", "bridge"}


def test_a_declared_container_with_dockers_resolver_leaves_its_network() -> None:
    found = reasons(container("s", NETWORK, NETWORK, labels=LABELS), [NETWORK], UID)
    assert list(found) == [NETWORK]


def test_a_foreign_container_elsewhere_is_nobodys_business() -> None:
    engine, watch = look("f", container("f", "bridge", "bridge"))
    assert (engine.done, watch.rows) == ([], {})


@pytest.mark.parametrize("labels", [{}, LABELS], ids=["foreign", "declared"])
def test_whoever_joined_a_sessions_network_namespace_is_stopped(labels: dict[str, str]) -> None:
    joiner = container("j", "container:s", labels=labels, dns=DEAD_RESOLVER)
    engine, watch = look("j", session(), joiner)
    assert engine.done == [("stop", "j")]
    (row,) = watch.rows["j"]
    assert (row.container, row.network) == ("j", NETWORK)
    assert row.reasons == ("it shares the network of s, and corral did not start it", "stopped")


def test_a_joiner_of_a_joiner_is_stopped() -> None:
    rows = (session(), container("j", "container:s"), container("k", "container:j"))
    assert look("k", *rows)[0].done == [("stop", "k")]


def test_a_joiner_that_does_not_run_yet_is_reported_only() -> None:
    engine, watch = look("j", session(), container("j", "container:s", running=False))
    assert engine.done == []
    assert watch.rows["j"][0].reasons[1] == "not running"


def test_a_late_event_does_not_hide_that_a_joiner_was_stopped() -> None:
    joiner = container("j", "container:s")
    engine, watch = look("j", session(), joiner)
    joiner["State"]["Running"] = False
    watch.look(engine, "j", [NETWORK])
    assert watch.rows["j"][0].reasons[1] == "stopped"


@pytest.mark.parametrize("target", ["f", "gone", "j"])
def test_a_joiner_of_a_foreign_or_vanished_container_is_nobodys_business(target: str) -> None:
    engine, watch = look("j", container("f", "bridge", "bridge"), container("j", f"container:{target}"))
    assert (engine.done, watch.rows) == ([], {})


def test_what_could_not_be_done_is_reported_too() -> None:
    _, watch = look("f", container("f", NETWORK, NETWORK), refuses=True)
    assert watch.rows["f"][0].reasons[1] == "could not be disconnected: Docker: no"
    _, watch = look("j", session(), container("j", "container:s"), refuses=True)
    assert watch.rows["j"][0].reasons[1] == "could not be stopped: Docker: no"


def test_joined_names_the_other_container_or_nothing() -> None:
    assert joined(container("j", "container:abc")) == "abc"
    assert joined(container("j", "bridge")) is None
    assert joined({}) is None


@pytest.mark.parametrize(
    ("user", "privileged", "problem"),
    [
        ("", False, None),
        ("1000", False, None),
        ("1000:1000", False, None),
        ("1000:0", False, "docker exec as 1000:0: corral did not start it"),
        ("root", False, "docker exec as root: corral did not start it"),
        ("", True, "docker exec --privileged: corral did not start it"),
        ("root", True, "docker exec --privileged as root: corral did not start it"),
    ],
)
def test_an_exec_is_a_stranger_when_it_is_not_the_sessions_user(
    user: str, privileged: bool, problem: str | None
) -> None:
    details = {"ProcessConfig": {"user": user, "privileged": privileged}}
    assert exec_problem(details, ("1000", "1000:1000")) == problem


def test_execs_are_reported_until_their_container_ends_and_not_without_bound() -> None:
    engine, watch = Engine(session()), Strangers(UID, UID)
    for number in range(EXECS + 5):
        engine.execs[f"e{number}"] = {"ProcessConfig": {"user": "root", "privileged": False}}
        watch.executed(engine, "s", "name", NETWORK, f"e{number}")
    assert len(watch.rows) == EXECS
    assert "e20" in watch.rows
    watch.ended("other")
    assert len(watch.rows) == EXECS
    watch.ended("s")
    assert watch.rows == {}
    watch.executed(engine, "s", "name", NETWORK, "unknown")
    assert watch.rows == {}


def test_a_stranger_is_forgotten_when_its_container_is_removed_not_when_it_ends() -> None:
    _, watch = look("f", container("f", NETWORK, NETWORK))
    watch.ended("f")
    assert watch.rows
    watch.removed("f")
    assert watch.rows == {}


@pytest.mark.parametrize(
    "version",
    ["", "unknown", "20.10.24+dfsg1", "23.0.10", "24.0.9", "25.0.4", "19.03.15", "25", "22.06.0-beta.0"],
)
def test_an_engine_may_go_on_to_ask_unless_its_release_is_known_not_to(version: str) -> None:
    assert goes_on_to_ask(version)


@pytest.mark.parametrize(
    "version", ["23.0.11", "23.0.15", "25.0.5", "26.0.0", "26.1.5+dfsg1", "28.5.2", "100.0"]
)
def test_an_engine_that_asks_nobody_for_a_container_without_a_network_is_known(version: str) -> None:
    assert not goes_on_to_ask(version)


def expelled(*networks: str, version: str = "20.10.24", running: bool = True) -> tuple[Engine, Strangers]:
    engine, watch = Engine(container("f", NETWORK, *networks, running=running)), Strangers(UID, UID)
    engine.version = version
    watch.look(engine, "f", [NETWORK])
    return engine, watch


def test_whoever_is_left_without_a_network_is_stopped_where_its_questions_would_go_on() -> None:
    engine, watch = expelled(NETWORK)
    assert engine.done == [("disconnect", NETWORK, "f"), ("stop", "f")]
    assert watch.rows["f"][0].reasons == ("corral did not start it", f"disconnected, and stopped: {GOES_ON}")


def test_whoever_was_taken_off_before_it_ran_is_stopped_when_it_runs() -> None:
    engine, watch = expelled(NETWORK, running=False)
    assert engine.done == [("disconnect", NETWORK, "f")]
    engine.rows["f"]["State"]["Running"] = True
    watch.look(engine, "f", [NETWORK])
    assert engine.done[-1] == ("stop", "f")


def test_a_container_with_a_network_of_its_own_goes_on() -> None:
    engine, watch = expelled(NETWORK, "bridge")
    assert engine.done == [("disconnect", NETWORK, "f")]
    assert watch.rows["f"][0].reasons[1] == "disconnected"


def test_a_session_that_is_expelled_from_elsewhere_keeps_its_own_network_and_runs() -> None:
    engine, watch = Engine(session("s", NETWORK, "bridge")), Strangers(UID, UID)
    engine.version = "20.10.24"
    watch.look(engine, "s", [NETWORK])
    assert engine.done == [("disconnect", "bridge", "s")]


def test_a_late_event_does_not_hide_that_it_was_stopped_and_a_new_start_is_seen() -> None:
    engine, watch = expelled(NETWORK)
    engine.rows["f"]["State"]["Running"] = False
    watch.look(engine, "f", [NETWORK])
    assert GOES_ON in watch.rows["f"][0].reasons[1]
    engine.rows["f"]["State"]["Running"] = True
    watch.look(engine, "f", [NETWORK])
    assert engine.done.count(("stop", "f")) == 2
