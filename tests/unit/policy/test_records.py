"""A class that is made later is the standard library's dataclass."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
import threading
from dataclasses import FrozenInstanceError, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from policy.records import dataclass

ROOT = Path(__file__).parents[3]


def both(**options: Any) -> list[tuple[type, type]]:
    """A base and what is derived from it, made by ours and by the standard library."""
    found = []
    for make in (dataclass, dataclasses.dataclass):

        @make(**options)  # type: ignore[call-overload]
        class Base:
            """What it is."""

            a: int
            b: str = "x"
            c: list[int] = field(default_factory=list, repr=False)

            @property
            def twice(self) -> int:
                return 2 * self.a

        @make(**options)  # type: ignore[call-overload]
        class Derived(Base):
            d: int = 4

            def __post_init__(self) -> None:
                self.__dict__["seen"] = self.a

        found.append((Base, Derived))
    return found


@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"eq": False}, {"repr": False}, {"order": True}])
@pytest.mark.parametrize("which", [0, 1])
def test_its_instances_do_the_same(options: dict[str, Any], which: int) -> None:
    told = []
    for classes in both(**options):
        kind = classes[which]
        first, second = kind(1), kind(1, b="x", c=[])
        hashable = kind.__hash__ is not None
        changed = replace(first, a=2)
        said = repr(first).rpartition(".")[2] if options.get("repr", True) else ""
        told.append(
            [
                said,
                first == second,
                first == changed,
                changed.twice,
                hashable,
                [one.name for one in fields(kind)],
                kind.__match_args__,  # type: ignore[attr-defined]
                kind.__doc__ is None,
                vars(copy.copy(first)) == vars(first),
                dataclasses.asdict(first),
                [getattr(kind, name, None) for name in ("b", "d")],
                getattr(first, "seen", None),
            ]
        )
        with pytest.raises(TypeError):
            kind()
        with pytest.raises(TypeError):
            kind(1, nothing=2)
        if options.get("frozen"):
            with pytest.raises(FrozenInstanceError):
                first.a = 5
    assert told[0] == told[1]


def test_its_fields_are_there_for_who_asks_before_there_is_an_instance() -> None:
    for asked in (is_dataclass, fields, dataclasses.make_dataclass):
        base, derived = both(frozen=True)[0]
        if asked is dataclasses.make_dataclass:
            made: Any = dataclasses.make_dataclass("Made", ["e"], bases=(derived,), kw_only=True, frozen=True)
            assert [one.name for one in fields(made)] == ["a", "b", "c", "d", "e"]
        else:
            assert asked(derived)
        assert derived(1).a == base(1).a == 1


def test_a_class_that_only_inherits_is_made_too() -> None:
    base, _ = both()[0]

    class Plain(base):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__(7)

    class Bare(base):  # type: ignore[misc,valid-type]
        pass

    assert Plain().a == 7
    assert Bare(3) == Bare(3) != Bare(4)


def test_what_makes_another_class_is_made_at_once() -> None:
    @dataclass(slots=True)
    class Slots:
        a: int = 1

    @dataclass
    class Own:
        a: int

        def __init__(self) -> None:
            self.a = 3

    assert not hasattr(Slots(), "__dict__")
    assert Own() == Own() and Own().a == 3


def test_what_makes_its_instances_itself_goes_on_doing_so() -> None:
    @dataclass
    class Odd(Exception):
        a: int

    assert Odd(3).a == 3 and Odd(3).args == (3,)


def test_threads_that_want_the_same_class_get_it() -> None:
    for _ in range(50):
        _, derived = both()[0]
        start, made = threading.Barrier(4), list[Any]()

        def work(start: threading.Barrier = start, made: list[Any] = made, kind: Any = derived) -> None:
            start.wait(10)
            made.append(kind(1))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert made == [derived(1)] * 4


def test_few_are_made_by_importing_the_command_line() -> None:
    code = (
        "import sys, dataclasses\n"
        "made = []\n"
        "real = dataclasses._process_class\n"
        "dataclasses._process_class = lambda cls, *rest: (made.append(cls.__module__), real(cls, *rest))[1]\n"
        "import corral.run, agent_image.builder\n"
        "print(*[name for name in made if name.partition('.')[0] in {'corral', 'policy', 'agent_image'}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT
    )
    # Those of which there are constants.
    made = done.stdout.split()
    assert "policy.profiles.base" in made and len(made) < 25, made
