"""What the hosts file says while the kernel is being written: the state that is being written, or the one before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enforcer import hostsfile, pins
from enforcer.vetting import Vetting
from enforcer.writerclient import Held
from policy.errors import EnforcerError

from .servicebench import PIN, World, ask, eventually, play

__all__ = ["play"]
FIRST, SECOND, THIRD = "93.184.216.34", "93.184.216.35", "93.184.216.36"
NAME = "api.example.com"


def addresses(world: World) -> list[str]:
    rows = [line.split() for line in world.hosts("00000001").splitlines()]
    return [row[0] for row in rows if row[1:] == [NAME] and row[0] != "#"]


class Watched:
    """Looks at the hosts file right before and right after each write of the kernel."""

    def __init__(self, world: World) -> None:
        self.world, self.seen = world, list[list[str]]()
        self.meanwhile: Callable[[], None] = lambda: None
        self._apply = world.writer.apply
        world.writer.apply = self.apply  # type: ignore[method-assign]

    def apply(self, *words: Any) -> Held:
        writer = self.world.writer
        self.look()
        # Nothing leaves the kernel while it is published.
        rows = {row[3] for row in words[1]}
        assert set(addresses(self.world)) <= rows, (addresses(self.world), rows)
        held = self._apply(*words)
        self.meanwhile()
        self.look()
        assert set(addresses(self.world)) <= {row[3] for row in writer.pins}
        return held

    def look(self) -> None:
        self.seen.append(addresses(self.world))


def moved(world: World, *found: str) -> None:
    world.answers[NAME] = found


def test_a_name_whose_only_address_changes_has_one_all_the_while(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        watched = Watched(world)
        for address in (SECOND, THIRD, FIRST):
            moved(world, address)
            await ask(world.client.refresh, None)
            assert addresses(world) == [address]
        assert len(watched.seen) >= 6
        assert [] not in watched.seen

    play(acts)


def test_an_answer_that_comes_while_the_kernel_is_written_leaves_the_name_an_address(
    play: Callable[..., World],
) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        watched, loop, service = Watched(world), world.service._loop, world.service
        names = service.names

        def another() -> None:
            if THIRD not in world.answers[NAME]:
                moved(world, THIRD)
                loop.call_soon_threadsafe(service._spawn, asked())
                while THIRD not in names.state.names[NAME].latest:
                    pass

        async def asked() -> None:
            names.step(pins.Refresh())

        watched.meanwhile = another
        moved(world, SECOND)
        await ask(world.client.refresh, None)
        await eventually(lambda: addresses(world) == [THIRD])
        assert [] not in watched.seen

    play(acts)


def test_an_address_that_is_refused_from_now_on_leaves_the_hosts_file_before_the_kernel(
    play: Callable[..., World],
) -> None:
    async def acts(world: World) -> None:

        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        watched = Watched(world)
        world.gate.clear()
        world.service.names.step(pins.VettingChanged(Vetting.of(host_addresses=[FIRST])))
        await eventually(lambda: watched.seen)
        assert watched.seen[0] == []
        await eventually(lambda: PIN not in world.writer.pins)

    play(acts)


def test_while_the_kernel_cannot_be_written_the_name_keeps_what_is_open(play: Callable[..., World]) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")

        def refuse(*_words: Any) -> Held:
            raise EnforcerError("the writer does not answer")

        apply = world.writer.apply
        world.writer.apply = refuse  # type: ignore[method-assign]
        moved(world, SECOND)
        world.service.names.step(pins.Refresh())
        await eventually(lambda: world.service.errors)
        assert addresses(world) == [FIRST]
        assert not world.service.satisfied
        world.writer.apply = apply  # type: ignore[method-assign]
        await eventually(lambda: addresses(world) == [SECOND])

    play(acts)


def test_an_address_that_so_many_new_ones_displace_leaves_the_hosts_file_before_the_kernel(
    play: Callable[..., World],
) -> None:
    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        watched = Watched(world)
        # As many as a name may have open, and none of them is yet: there is no room for the old one.
        many = tuple(
            f"93.184.215.{number}"
            for number in range(1, world.service.names.state.settings.allowed_per_name + 1)
        )
        moved(world, *many)
        await ask(world.client.refresh, None)
        assert FIRST not in {row[3] for row in world.writer.pins}
        assert watched.seen[0] == []
        assert set(addresses(world)) <= set(many)

    play(acts)


def test_a_file_that_cannot_be_written_is_told_and_tried_again_until_it_can(
    play: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, tries = hostsfile.publish, list[Path]()

    def full(path: Path, _: bytes) -> bool:
        tries.append(path)
        raise EnforcerError(f"cannot publish the hosts file {path}: No space left on device")

    async def acts(world: World) -> None:
        world.container("c1", "00000001")
        await ask(world.client.await_ready, "c1")
        monkeypatch.setattr(hostsfile, "publish", full)
        moved(world, SECOND)
        with pytest.raises(EnforcerError, match="it is tried on"):
            await ask(world.client.refresh, None)
        (told,) = (await ask(world.client.status))["errors"]
        assert "No space left on device" in told
        assert addresses(world) == [FIRST]
        many = len(tries)
        await eventually(lambda: len(tries) > many + 2)
        monkeypatch.setattr(hostsfile, "publish", write)
        # Nothing else happens.
        await eventually(lambda: addresses(world) == [SECOND])
        await eventually(lambda: world.service.errors == {})

    play(acts)
