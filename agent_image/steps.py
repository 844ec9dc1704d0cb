"""The steps of a build, read off what its builder prints.

BuildKit numbers what it does, some of it at the same time; the classic builder goes from step to step.
Both begin with a line that tells them apart. Nothing here is decided by it but what is shown.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from policy.records import dataclass

BEGAN, DONE, CACHED, FAILED = "began", "done", "cached", "failed"

_BUILDKIT = re.compile(r"#(?P<number>[0-9]+) (?P<text>.*)")
_CLASSIC = re.compile(r"Step (?P<number>[0-9]+)/[0-9]+ : (?P<text>.*)")
_ENDED = re.compile(
    r"DONE (?P<seconds>[0-9]+(?:\.[0-9]+)?)s|(?P<cached>CACHED)|(?P<failed>ERROR: .*)|(?P<canceled>CANCELED)"
)
# BuildKit's word about where a step stands: [stage 2/5].
_PLACE = re.compile(r"\[[^\]]* [0-9]+/[0-9]+\] ")
_OURS = re.compile(r"FROM (?:trust|harness)(?: |$)")
_FROM = re.compile(r"FROM (?:docker\.io/(?:library/)?)?(?P<image>[^ @]+)")
_LOOKED_UP = re.compile(r"\[internal\] load metadata for (?:docker\.io/(?:library/)?)?(?P<image>[^ @]+)")
# The shell of agent_image.dockerfile: (what only that step has, what it does). The first that fits counts.
_RUNS = (
    ("update-ca-certificates", "certificates"),
    ("python3-pip-whl", "what fetches the harness"),
    ("mkdir -p /fetch /out", "harness"),
    ("--no-install-recommends", "packages"),
    ("/etc/passwd", "user and directories"),
    ("/corral-prepare", "fitting the existing image"),
    ("/corral-compiling", "entrypoint"),
    ("security.capability", "taking privileges from programs"),
)
_OUR_RUN = "RUN set -eu; "
# What takes no time, and BuildKit does not even list.
_CONFIGURATION = frozenset(
    {"ARG", "CMD", "ENTRYPOINT", "ENV", "HEALTHCHECK", "LABEL", "SHELL", "STOPSIGNAL", "USER", "WORKDIR"}
)


@dataclass(frozen=True)
class Step:
    """One thing a builder does. ``minor``: it is of no interest unless somebody wants all of it."""

    title: str
    minor: bool = False


@dataclass(frozen=True)
class Event:
    """What became of a step: BEGAN, DONE, CACHED or FAILED; ``seconds`` it took, 0 when it began.

    ``key`` tells steps of one build apart.
    """

    key: int
    step: Step
    what: str
    seconds: float = 0.0


def named(text: str) -> Step:  # noqa: PLR0911 - a table of kinds
    """Return the step that a builder names so: an instruction of the Dockerfile, or work of its own."""
    looked_up = _LOOKED_UP.fullmatch(text)
    if looked_up:
        return Step(f"looking up {looked_up['image']}")
    if text.startswith(("[internal] ", "[auth] ")):
        return Step(text, minor=True)
    text = _PLACE.sub("", text, count=1)
    if text == "exporting to image":
        return Step("writing the image")
    if _OURS.match(text):
        return Step(text, minor=True)
    base = _FROM.match(text)
    if base:
        return Step(f"base image {base['image']}")
    if text.startswith(_OUR_RUN):
        for piece, title in _RUNS:
            if piece in text:
                return Step(title)
    return Step(" ".join(text.split()), minor=text.partition(" ")[0].upper() in _CONFIGURATION)


class _Going:
    def __init__(self, step: Step, began: float) -> None:
        self.step, self.began = step, began
        self.ended = False
        # Of the classic builder: it runs a program, whose output looks as it likes.
        self.runs = False


class Steps:
    """What a build has done so far.

    Args:
        clock: seconds, monotonic; for what the builder does not time itself.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[int, _Going] = {}
        self._current = 0
        self._take: Callable[[str], Sequence[Event]] | None = None

    def line(self, line: str) -> Sequence[Event]:
        """Take one line that the builder printed; return what it tells."""
        if self._take is None:
            self._take = self._buildkit if _BUILDKIT.fullmatch(line) else None
            self._take = self._take or (self._classic if _CLASSIC.fullmatch(line) else None)
        return self._take(line) if self._take is not None else ()

    def finish(self, *, failed: bool) -> Sequence[Event]:
        """Return what becomes of what goes on when the build has ended; of several, any may have failed."""
        if self._take == self._classic:
            return self._end(self._current, FAILED if failed else DONE)
        return ()

    def _buildkit(self, line: str) -> Sequence[Event]:
        found = _BUILDKIT.fullmatch(line)
        # "..." is where its lines are interrupted by those of another step; 0 is the builder itself.
        if not found or found["text"] == "..." or found["number"] == "0":
            return ()
        number, text = int(found["number"]), found["text"]
        known = self._known.get(number)
        if known is None:
            return self._begin(number, named(text))
        ended = _ENDED.fullmatch(text)
        if ended is None:
            # A base image is looked at, and fetched only when a step needs it: the same number once more.
            again = known.ended and text.startswith(("sha256:", "extracting "))
            return self._begin(number, known.step) if again else ()
        if ended["canceled"]:
            known.ended = True
            return ()
        if ended["seconds"]:
            return self._end(number, DONE, float(ended["seconds"]))
        return self._end(number, CACHED if ended["cached"] else FAILED)

    def _classic(self, line: str) -> Sequence[Event]:
        found = _CLASSIC.fullmatch(line)
        if found:
            before, self._current = self._current, int(found["number"])
            return [*self._end(before, DONE), *self._begin(self._current, named(found["text"]))]
        known = self._known[self._current]
        if line.startswith(" ---> Running in "):
            known.runs = True
        elif line == " ---> Using cache" and not known.runs:
            return self._end(self._current, CACHED)
        return ()

    def _begin(self, key: int, step: Step) -> Sequence[Event]:
        self._known[key] = _Going(step, self._clock())
        return [Event(key, step, BEGAN)]

    def _end(self, key: int, what: str, seconds: float | None = None) -> Sequence[Event]:
        known = self._known.get(key)
        if known is None or known.ended:
            return ()
        known.ended = True
        if what == CACHED:
            return [Event(key, known.step, what)]
        took = self._clock() - known.began if seconds is None else seconds
        return [Event(key, known.step, what, took)]
