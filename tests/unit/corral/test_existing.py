"""Which image a name means, and that it stays the one the sandbox was built on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_image.foreign import Foreign
from corral import context, existing
from corral.existing import FORCE, Pin, choose
from policy.errors import ArgumentError, CorralError
from policy.loader import LoadedPolicy
from policy.revision import Machine, compare, revision, widens

OLD, NEW = "sha256:" + "a" * 64, "sha256:" + "b" * 64
NAME = "tools:3"


@pytest.mark.parametrize(
    ("now", "pin", "there", "force", "ident"),
    [
        (NEW, None, False, False, NEW),
        (OLD, Pin(NAME, OLD), True, False, OLD),
        (NEW, Pin("other:1", OLD), True, False, NEW),
        (NEW, Pin(NAME, OLD), True, False, OLD),
        (None, Pin(NAME, OLD), True, False, OLD),
        (NEW, Pin(NAME, OLD), True, True, NEW),
        (NEW, Pin(NAME, OLD), False, True, NEW),
    ],
)
def test_a_name_means_what_it_meant_until_the_user_asks_for_the_new_image(
    now: str | None, pin: Pin | None, there: bool, force: bool, ident: str
) -> None:
    chosen, told = choose(NAME, now, pin, there, force=force)
    assert chosen == ident
    moved = pin is not None and pin.reference == NAME and now != pin.ident
    assert bool(told) == moved
    assert (FORCE in told) == (moved and not force)


@pytest.mark.parametrize(
    ("now", "pin", "force", "fix"),
    [
        (None, None, False, "docker pull"),
        (None, Pin(NAME, OLD), True, "docker pull"),
        (NEW, Pin(NAME, OLD), False, FORCE),
        (None, Pin(NAME, OLD), False, "docker pull"),
    ],
)
def test_without_the_image_that_was_built_on_nothing_is_built(
    now: str | None, pin: Pin | None, force: bool, fix: str
) -> None:
    with pytest.raises(CorralError) as caught:
        choose(NAME, now, pin, False, force=force)
    assert fix in (caught.value.hint or "")


def test_what_is_kept_is_read_again_and_damage_is_refused(tmp_path: Path) -> None:
    assert existing.read(tmp_path) is None
    existing.write(tmp_path, Pin(NAME, OLD))
    assert existing.read(tmp_path) == Pin(NAME, OLD)
    for damaged in ("", "[]", "{}", "[" * 100_000, "\0"):
        (tmp_path / existing.FILE).write_text(damaged)
        # Nothing kept would mean whatever the name means now.
        with pytest.raises(CorralError, match="cannot be read") as caught:
            existing.read(tmp_path)
        assert FORCE in (caught.value.hint or "")
        assert existing.read(tmp_path, force=True) is None


class Images:
    """An engine with images: what it is asked for -> layers."""

    def __init__(self, **layers: list[str]) -> None:
        self.layers = layers

    def inspect_image(self, image: str) -> dict[str, object]:
        return {"RootFS": {"Layers": self.layers[image]}}


@pytest.mark.parametrize(
    ("made", "base", "fine"),
    [
        (["a", "b", "c"], ["a", "b"], True),
        (["a", "c"], ["a", "b"], False),
        (["a"], ["a", "b"], False),
        (["c", "a", "b"], ["a", "b"], False),
        ([], [], False),
    ],
)
def test_an_image_stands_on_the_one_that_was_looked_at_or_is_refused(
    made: list[str], base: list[str], fine: bool
) -> None:
    api: Any = Images(**{"corral/x:1": made, OLD: base})
    foreign = Foreign(NAME, OLD, "corral/x:base")
    if fine:
        existing.stands_on(api, "corral/x:1", foreign)
        return
    with pytest.raises(CorralError, match="but on another"):
        existing.stands_on(api, "corral/x:1", foreign)


def test_the_environments_image_has_to_be_approved_like_the_files(
    loaded_of: Callable[[str], LoadedPolicy],
) -> None:
    plain = loaded_of("profile: opencode\nname: demo\n")
    found = context.with_image(plain, "tools:3")
    written = loaded_of("profile: opencode\nname: demo\nimage: tools:3\n")
    assert revision(found) == revision(written)
    assert widens(compare(revision(plain), revision(found), Machine(1 << 34)))
    with pytest.raises(ArgumentError, match="CORRAL_SANDBOX_IMAGE is not an image reference"):
        context.with_image(plain, "--privileged")
