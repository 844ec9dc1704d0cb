"""Every file that is read at the start, damaged in every way: the service starts, and nothing is wider."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from enforcer import config, pins, pinstore
from enforcer.addressbook import AddressBook
from enforcer.overrides import MAX_GRANTS, MAX_PORTS, Overrides, dump, parse
from enforcer.pins import InUse, Subscribe, Wish
from policy import savedfile, versions
from policy.declaration import Declaration, HostService, Name
from policy.errors import CorralError, PolicyError
from tests.unit.enforcer.pin_engine import BOX, LAB, NAME, A, B, C, started

from .servicebench import PIN, World, ask, play

__all__ = ["play"]
DEEP = "[" * 100_000
NOW, WALL = 1000.0, 1e9
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 10**400, -(10**400), 1e308, -1e308, float("inf"), float("-inf"), float("nan"), "", "x", "\ud800",
    "1" * 5000, "9" * 400, "203.0.113.1", [], [1], [[]], {}, {"x": 1}, {"": {}}, ["a", "b"], [{}], "::1", "OK", "STALE",
)  # fmt: skip


def damaged(body: Any) -> Iterator[Any]:
    """Yield the body with each of its parts replaced by each odd value, and left out."""
    yield from ODD
    if isinstance(body, dict):
        for key, inner in body.items():
            yield {k: v for k, v in body.items() if k != key}
            for odd in damaged(inner):
                yield {**body, key: odd}
            for name in ("", "x", "\ud800", "1" * 5000):
                yield {name if k == key else k: v for k, v in body.items()}
    elif isinstance(body, list):
        for index in range(len(body)):
            yield body[:index] + body[index + 1 :]
            for odd in damaged(body[index]):
                yield [*body[:index], odd, *body[index + 1 :]]


def saved_pins() -> dict[str, Any]:
    engine = started()
    engine.rotate(B, C, after=60)
    engine.send(InUse(BOX, A))
    body = pins.save(engine.state, engine.now, WALL)
    return {**body, "remembered": {"gone.example": {"addresses": [A], "ttl": 60, "answered": WALL}}}


def test_saved_pins_damaged_anywhere_are_refused_or_work_and_hold_no_other_address() -> None:
    body, read, refused = saved_pins(), 0, 0
    for odd in damaged(body):
        try:
            state = pinstore.restore(odd, NOW, WALL, LAB)
        except ValueError:
            refused += 1
            continue
        read += 1
        state, _ = pins.step(state, Subscribe(BOX, "172.16.0.2", (Wish(NAME),)), NOW)
        for moment in (NOW, NOW + 1e5):
            state, _ = pins.step(state, pins.Tick(), moment)
            pins.next_due(state)
            allowed = pins.allowed(state)[BOX][NAME]
            assert {grant.address for grant in allowed} <= {A, B, C, "203.0.113.1"}
            assert moment == NOW or not state.leases
            pins.status(state, BOX, moment)
            json.dumps(pins.save(state, moment, WALL))
    assert read > 50
    assert refused > 500


def test_saved_permissions_damaged_anywhere_are_refused_or_never_last_longer() -> None:
    made = Overrides().allow("c.example", (443,), NOW + 60).allow("d.example", (443,), None)
    declaration = Declaration(names=(Name(host="a.example"),))
    body = json.loads(dump(made.deny("a.example", declaration), NOW, WALL))
    read = 0
    for odd in damaged(body):
        try:
            found = parse(json.dumps(odd), NOW, WALL)
        except ValueError:
            continue
        read += 1
        json.dumps(dump(found, NOW, WALL))
        for ports in found.granted.values():
            for until in ports.values():
                assert until is None or until <= NOW + 60 or odd["granted"] != body["granted"]
    assert read > 5


def test_a_file_grants_no_more_than_a_request_can() -> None:
    body = json.loads(dump(Overrides().allow("c.example", (443,), None), NOW, WALL))
    names = {f"n{number}.example": {"443": None} for number in range(MAX_GRANTS + 1)}
    for change in (
        {"granted": names, "listed": list(names)},
        {"listed": ["c.example", *names]},
        {"granted": {"c.example": {str(port): None for port in range(1, MAX_PORTS + 2)}}},
    ):
        with pytest.raises(ValueError, match="damaged"):
            parse(json.dumps(body | change), NOW, WALL)


def test_a_saved_address_book_damaged_anywhere_is_read_as_far_as_it_goes() -> None:
    for odd in damaged({"version": 1, "addresses": {A: [["a.example", ""], ["b.example", "private"]]}}):
        book = AddressBook()
        book.restore(odd)
        json.dumps(book.save())


def test_a_label_damaged_anywhere_is_refused_or_read() -> None:
    made = Declaration(names=(Name(host="a.example"),), host_services=(HostService(name="m", port=1),))
    for odd in damaged(json.loads(made.to_label())):
        try:
            Declaration.from_label(json.dumps(odd))
        except PolicyError:
            continue
    with pytest.raises(PolicyError, match="not JSON"):
        Declaration.from_label(DEEP)


CONFIGS = (
    f"x = {DEEP}",
    "[timers]\nreconcile = " + "9" * 4000,
    "[timers]\nreconcile = 1e999",
    "[timers]\nreconcile = nan",
    "[timers]\nreconcile = true",
    '[dns]\nservers = ["tls://192.0.2.1#not a name"]',
    '[dns]\nservers = ["tls://192.0.2.1#127.0.0.1"]',
    '[dns]\nservers = ["192.0.2.1:99999"]',
    '[dns]\nservers = ["192.0.2.1:' + "9" * 5000 + '"]',
    "[dns]\nservers = 7",
    "permit_ranges = [1]",
    'permit_ranges = ["x"]',
    f"permit_ranges = [{'9' * 400}]",
    "subnet_range = []",
    "unknown = 1",
    "\x00",
)


@pytest.mark.parametrize("text", CONFIGS, ids=range(len(CONFIGS)))
def test_a_configuration_that_cannot_be_used_is_told(tmp_path: Path, text: str) -> None:
    file = tmp_path / "enforcer.toml"
    file.write_text(text)
    try:
        config.load(file)
    except PolicyError as error:
        assert str(file) in error.message
    else:
        # A number and a truth value that the model takes as what they are.
        assert "permit_ranges = [1]" in text or "true" in text


def fifo(path: Path) -> None:
    os.mkfifo(path)


def huge(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(savedfile.MOST + 1)


KINDS: dict[str, Callable[[Path], object]] = {
    "deep": lambda path: path.write_text(DEEP),
    "deep pins": lambda path: path.write_text('{"version": 1, "wall": ' + DEEP),
    "no object": lambda path: path.write_text("[]"),
    "binary": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "huge numbers": lambda path: path.write_text('{"version": 1, "wall": 1' + "0" * 400 + "}"),
    "empty": lambda path: path.write_text(""),
    "a pipe": fifo,
    "a directory": lambda path: path.mkdir(),
    "huge": huge,
}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_lies_in_its_files_the_service_starts_and_works(
    play: Callable[..., World], kind: str
) -> None:
    def before(world: World) -> None:
        world.container("c1", "00000001")
        world.container("c2", "00000002", "172.16.0.3")
        directory = world.data / "enforcer"
        (directory / "sessions").mkdir(parents=True)
        for path in (
            directory / "pins.json",
            directory / "addresses.json",
            directory / "sessions" / "c2.json",
        ):
            KINDS[kind](path)

    async def acts(world: World) -> None:
        await ask(world.client.await_ready, "c1")
        assert set(world.writer.pins) == {PIN}
        # A denial may have been in the file of this one.
        with pytest.raises(CorralError, match="cannot be read"):
            await ask(world.client.await_ready, "c2")

    play(acts, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mark_of_the_state_that_cannot_be_read_is_told(tmp_path: Path, kind: str) -> None:
    KINDS[kind](tmp_path / versions.STATE_FILE)
    with pytest.raises(CorralError):
        versions.open_state(tmp_path, "1.0")
