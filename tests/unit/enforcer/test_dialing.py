"""The dial sockets by themselves: where they are, who may speak, and what a flood on one takes from the others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from enforcer import asking
from enforcer import dialing as dialing_module
from enforcer.dialing import Dialing, listen, refusal
from enforcer.doors import ClosedError
from enforcer.lookups import Lookups, Result
from enforcer.pinmodel import Answer
from enforcer.sessions import Session
from enforcer.vetting import Verdict
from policy.declaration import Pattern
from policy.identity import Sandbox, StatePaths

from .dialbench import connected
from .servicebench import eventually
from .sessionbench import BOX, proxy, session

ZONE = Pattern(host="*.example.com")
OTHER = Sandbox("other-0a0b0c0e")


class Bench:
    """Dial sockets of two sandboxes; names resolve when ``gate`` is open, and are opened when ``door`` is."""

    def __init__(self, tmp_path: Path, uid: int | None = None) -> None:
        # Longer than the path of a socket may be.
        self.data = tmp_path / ("x" * 120)
        self.sessions: list[Session] = []
        for number, box in ((1, BOX), (11, OTHER)):
            StatePaths(self.data / box.id).dial.mkdir(mode=0o700, parents=True)
            self.sessions += [session(number, ZONE, sandbox=box), proxy(number + 8, sandbox=box)]
        self.names: list[str] = []
        self.told: list[tuple[Any, ...]] = []
        self.opened: list[tuple[str, str, tuple[str, ...]]] = []
        self.answers = ("192.0.2.1",)
        self.closed: ClosedError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        loop = asyncio.get_running_loop()
        self.lookups = Lookups(self._ask, loop.time)
        self.dialing = Dialing(
            lambda: self.sessions,
            self.lookups,
            self,  # type: ignore[arg-type]
            self,
            lambda text: Verdict(not text.startswith("10."), "private (10.0.0.0/8)"),
            loop.time,
            self.data,
            uid,
        )

    async def _ask(self, name: str) -> Result:
        self.names.append(name)
        await self.gate.wait()
        return Answer(name, self.answers, 60, 0.0)

    def asked(self, *words: Any) -> None:
        self.told.append(words)

    async def open(
        self, container: str, name: str, _ports: Any, addresses: Any, _ttl: float
    ) -> tuple[str, ...]:
        if self.closed is not None:
            raise self.closed
        self.opened.append((container, name, tuple(addresses)))
        return tuple(addresses)

    def path(self, box: Sandbox = BOX) -> Path:
        return StatePaths(self.data / box.id).dial / "dial.sock"


def play(tmp_path: Path, acts: Callable[[Bench], Awaitable[None]], uid: int | None = None) -> None:
    async def main() -> None:
        bench = Bench(tmp_path, uid)
        assert bench.dialing.follow() == ""
        try:
            await asyncio.wait_for(acts(bench), 30)
        finally:
            bench.dialing.close()

    asyncio.run(main())


def test_each_sandbox_has_its_own_and_speaks_for_itself_alone(tmp_path: Path) -> None:
    async def acts(bench: Bench) -> None:
        bench.sessions[2] = session(11, Pattern(host="*.example.org"), sandbox=OTHER)
        assert stat.S_IMODE(bench.path().stat().st_mode) == 0o600
        async with connected(bench.path()) as one, connected(bench.path(OTHER)) as other:
            assert (await one.dial("a.example.com"))["ok"]
            assert (await other.dial("a.example.com"))["kind"] == "denied"
            assert (await other.dial("a.example.org"))["ok"]
        assert bench.opened == [
            ("c9", "a.example.com", ("192.0.2.1",)),
            ("c19", "a.example.org", ("192.0.2.1",)),
        ]
        assert bench.told == [(OTHER.id, "c19", "a.example.com", 443, "denied")]
        assert bench.names == ["a.example.com", "a.example.org"]

    play(tmp_path, acts)


def test_what_the_proxy_closed_is_told(tmp_path: Path) -> None:
    async def acts(bench: Bench) -> None:
        async with connected(bench.path()) as line:
            answer = await line.ask(op="refused", name="a.example.com", port=443, reason="sni-mismatch")
            assert answer == {"ok": True}
        assert bench.told == [(BOX.id, "c9", "a.example.com", 443, "sni-mismatch")]
        assert not bench.names

    play(tmp_path, acts)


@pytest.mark.parametrize("kind", ["denied", "busy", "unready"])
def test_what_the_doors_say_is_said(tmp_path: Path, kind: Any) -> None:
    async def acts(bench: Bench) -> None:
        bench.closed = ClosedError(kind, "why\nnot \u00e9")
        async with connected(bench.path()) as line:
            assert await line.dial("a.example.com") == {"ok": False, "kind": kind, "text": "why?not ?"}
        assert [row[-1] for row in bench.told] == ([] if kind == "unready" else [kind])

    play(tmp_path, acts)


def test_at_most_eight_addresses_are_opened_and_only_good_ones(tmp_path: Path) -> None:
    async def acts(bench: Bench) -> None:
        bench.answers = ("10.0.0.1", *(f"192.0.2.{number}" for number in range(1, 13)))
        async with connected(bench.path()) as line:
            found = (await line.dial("a.example.com"))["addresses"]
        assert found == [f"192.0.2.{number}" for number in range(1, 9)]

    play(tmp_path, acts)


def test_who_has_another_uid_is_not_heard(tmp_path: Path) -> None:
    async def acts(bench: Bench) -> None:
        bench.dialing._uid = os.geteuid() + 1
        async with connected(bench.path()) as line:
            line.send(b'{"v":1,"op":"dial","name":"a.example.com","port":443}\n')
            with contextlib.suppress(ConnectionResetError):
                assert await line.reader.read() == b""
        assert not bench.names

    play(tmp_path, acts)


def test_a_proxy_that_nobody_knows_yet_is_told_so(tmp_path: Path) -> None:
    async def acts(bench: Bench) -> None:
        async with connected(bench.path()) as line:
            del bench.sessions[1]
            assert (await line.dial("a.example.com"))["kind"] == "unready"

    play(tmp_path, acts)


def test_a_permission_that_ends_while_a_name_server_thinks_asks_nobody_to_open(tmp_path: Path) -> None:
    async def acts(bench: Bench) -> None:
        bench.gate.clear()
        async with connected(bench.path()) as line:
            waiting = asyncio.create_task(line.dial("a.example.com"))
            await eventually(lambda: bench.names)
            del bench.sessions[0]
            bench.gate.set()
            assert (await waiting)["kind"] == "denied"
        assert not bench.opened

    play(tmp_path, acts)


def test_a_flood_of_lines_and_connections_takes_nothing_from_another_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialing_module, "CONNECTIONS", 8)
    monkeypatch.setattr(dialing_module, "RATE", 20.0)
    monkeypatch.setattr(dialing_module, "BURST", 20.0)

    async def acts(bench: Bench) -> None:
        answered = 0

        async def flood() -> None:
            nonlocal answered
            async with connected(bench.path()) as line:
                line.send(b'{"v":1,"op":"dial","name":"a.example.org","port":443}\n' * 200)
                while await line.answer():
                    answered += 1

        loop = asyncio.get_running_loop()
        began = loop.time()
        floods = [asyncio.create_task(flood()) for _ in range(40)]
        await eventually(lambda: answered >= 20)
        assert len(bench.dialing._listeners[BOX.id].clients) == 8
        async with connected(bench.path(OTHER)) as line:
            for number in range(20):
                assert (await line.dial(f"n{number}.example.com"))["ok"]
        # Of 8,000 lines a rate's worth was answered, and the others wait without being read.
        assert answered <= 20 + 20 * (loop.time() - began) + 1
        for task in floods:
            task.cancel()
        await asyncio.wait(floods)

    play(tmp_path, acts)


def test_names_that_are_slow_to_compare_take_a_share_of_the_loop_however_many_lines_bring_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = [0.0]

    async def acts(bench: Bench) -> None:
        loop = asyncio.get_running_loop()
        bench.dialing._clock = lambda: loop.time() + spent[0]

        def slow(*_words: Any) -> asking.Refused:
            spent[0] += 0.1
            return asking.Refused("no")

        monkeypatch.setattr(asking, "judge", slow)
        answered = 0

        async def flood() -> None:
            nonlocal answered
            async with connected(bench.path()) as line:
                while await line.dial("a.example.org"):
                    answered += 1

        began = loop.time()
        floods = [asyncio.create_task(flood()) for _ in range(40)]
        await eventually(lambda: answered >= 3 and loop.time() + spent[0] - began > 3)
        for task in floods:
            task.cancel()
        await asyncio.wait(floods)
        burst = dialing_module.BURST / (dialing_module.RATE / dialing_module.SHARE)
        assert spent[0] <= burst + 0.2 + dialing_module.SHARE * (loop.time() - began + spent[0])

    play(tmp_path, acts)


def test_as_many_names_are_under_way_as_may_be_and_others_are_told_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialing_module, "PENDING", 2)

    async def acts(bench: Bench) -> None:
        bench.gate.clear()

        async def one(number: int, box: Sandbox = BOX) -> Any:
            async with connected(bench.path(box)) as line:
                return await line.dial(f"n{number}.example.com")

        waiting = [asyncio.create_task(one(number)) for number in range(2)]
        await eventually(lambda: len(bench.names) == 2)
        assert (await one(3))["kind"] == "busy"
        other = asyncio.create_task(one(4, OTHER))
        await eventually(lambda: len(bench.names) == 3)
        bench.gate.set()
        assert all([(await task)["ok"] for task in (*waiting, other)])
        assert (await one(3))["ok"]

    play(tmp_path, acts)


def test_who_hangs_up_while_waiting_gives_its_place_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialing_module, "CONNECTIONS", 1)

    async def acts(bench: Bench) -> None:
        bench.gate.clear()
        async with connected(bench.path()) as line:
            line.send(b'{"v":1,"op":"dial","name":"a.example.com","port":443}\n')
            await eventually(lambda: bench.names)
        bench.gate.set()
        async with connected(bench.path()) as line:
            assert (await line.dial("a.example.com"))["ok"]

    play(tmp_path, acts)


# -- where the sockets are


def directory(tmp_path: Path) -> Path:
    made = tmp_path / "proxy"
    made.mkdir(mode=0o700)
    return made


def test_a_dead_predecessors_socket_is_replaced(tmp_path: Path) -> None:
    place = directory(tmp_path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(place / "dial.sock"))
    descriptor, sock, mark = listen(place, os.geteuid())
    found = (place / "dial.sock").stat()
    assert (found.st_dev, found.st_ino) == mark
    sock.close()
    os.close(descriptor)


@pytest.mark.parametrize("what", ["missing", "link", "writable", "foreign", "file", "directory"])
def test_a_place_that_is_not_its_users_alone_gets_no_socket(tmp_path: Path, what: str) -> None:
    place, uid = tmp_path / "proxy", os.geteuid()
    if what == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "real")
    elif what != "missing":
        directory(tmp_path)
        place.chmod(0o770 if what == "writable" else 0o700)
        uid += what == "foreign"
    if what == "file":
        (place / "dial.sock").write_text("something")
    if what == "directory":
        (place / "dial.sock").mkdir()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="proxy"):
        listen(place, uid)
    assert set(os.listdir("/proc/self/fd")) == before
    assert not (place / "dial.sock").is_socket()


def test_what_cannot_be_made_is_told_and_tried_again(tmp_path: Path) -> None:
    async def acts(bench: Bench) -> None:
        path = bench.path()
        path.unlink()
        path.parent.rmdir()
        assert str(path.parent) in bench.dialing.follow()
        assert not bench.dialing.serves(BOX.id)
        assert bench.dialing.serves(OTHER.id)
        path.parent.mkdir(mode=0o700)
        assert bench.dialing.follow() == ""
        assert path.is_socket()
        bench.sessions = [one for one in bench.sessions if one.sandbox.id != BOX.id]
        assert bench.dialing.follow() == ""
        assert not path.exists()

    play(tmp_path, acts)


def test_a_refusal_is_one_short_line_of_ascii() -> None:
    assert refusal("denied", "a\r\n\x00\u2028b" + "c" * 1000)["text"] == "a????b" + "c" * 294


def test_reading_what_a_server_said_counts_against_the_sandbox_that_asked(tmp_path: Path) -> None:
    async def acts(bench: Bench) -> None:
        now = [0.0]
        bench.dialing._clock = bench.lookups._clock = lambda: now[0]

        async def ask(name: str) -> Result:
            now[0] += 2 * dialing_module.BURST / dialing_module.RATE * dialing_module.SHARE
            return Answer(name, bench.answers, 60, 0.0)

        bench.lookups._ask = ask
        async with connected(bench.path()) as line:
            assert (await line.dial("a.example.com"))["ok"]
        asking, other = (bench.dialing._listeners[box.id].asking for box in (BOX, OTHER))
        assert not asking.take(now[0])
        assert other.take(now[0])

    play(tmp_path, acts)
