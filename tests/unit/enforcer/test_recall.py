"""A look that is kept is one that another look would repeat."""

from __future__ import annotations

from enforcer.netfilter.recall import Recall


class Kernel:
    """Something to read, with a mark beside it; ``meanwhile`` marks are what it moves to while being read."""

    def __init__(self) -> None:
        self.mark: int | None = 1
        self.content = "a"
        self.read_ = 0
        self.meanwhile: list[int | None] = []
        self.recall: Recall[str] = Recall(lambda: self.mark)

    def _read(self) -> str:
        self.read_ += 1
        found = self.content
        if self.meanwhile:
            self.mark = self.meanwhile.pop(0)
        return found

    def look(self) -> str:
        return self.recall.look(self._read)


def test_an_unchanged_mark_saves_the_reading() -> None:
    kernel = Kernel()
    assert [kernel.look(), kernel.look(), kernel.look()] == ["a", "a", "a"]
    assert kernel.read_ == 1


def test_another_mark_is_another_look() -> None:
    kernel = Kernel()
    kernel.look()
    kernel.mark, kernel.content = 2, "b"
    assert kernel.look() == "b"
    kernel.mark = 1
    kernel.look()
    assert kernel.read_ == 3


def test_a_mark_that_nobody_knows_keeps_nothing() -> None:
    kernel = Kernel()
    kernel.mark = None
    kernel.look()
    kernel.look()
    assert kernel.read_ == 2
    kernel.mark = 1
    kernel.look()
    kernel.mark = None
    kernel.look()
    assert kernel.read_ == 4


def test_what_moved_while_it_was_read_is_not_kept() -> None:
    kernel = Kernel()
    kernel.meanwhile = [2]
    kernel.look()
    kernel.look()
    assert kernel.read_ == 2
    kernel.recall.distrust()
    # Read under a mark, and nobody knows what happened since.
    kernel.meanwhile = [None]
    kernel.look()
    kernel.mark = 2
    kernel.look()
    assert kernel.read_ == 4


def test_what_is_distrusted_is_read() -> None:
    kernel = Kernel()
    kernel.look()
    kernel.recall.distrust()
    kernel.look()
    assert kernel.read_ == 2
