"""Any other harness: the user's own lines of the image bring it, and the user's own words start it."""

from __future__ import annotations

import re
from itertools import permutations
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator

from policy.mounts import is_within
from policy.profiles.base import Profile
from policy.profiles.config import ProfileOptions, problem
from policy.secrets import changes_behaviour

MAX_LINES = 64
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+(?:=[A-Za-z0-9.+:~-]+)?")
_INSTRUCTION = re.compile(r"(?:RUN|ENV)\s+\S")
_STATE = re.compile(r"(?:[A-Za-z0-9_.][A-Za-z0-9_.-]*/)*[A-Za-z0-9_.][A-Za-z0-9_.-]*")
SHELL = ("/bin/bash",)
PACKAGES = ("ca-certificates", "git")


def _line(text: str) -> str:
    if not _INSTRUCTION.match(text):
        raise problem("a line of the image begins with RUN or ENV", "write RUN or ENV before it")
    named = re.findall(r"([A-Za-z_]\w*)=|^ENV\s+([A-Za-z_]\w*)", text) if text.startswith("ENV") else []
    for name in (one or other for one, other in named):
        if changes_behaviour(name):
            raise problem(f"{name} changes what every program of the image does", "set it for yours alone")
    if "\r" in text or "\0" in text or re.search(r"(?<!\\)\n", text.rstrip("\n")):
        raise problem("one entry holds one instruction", "end each line but the last with a backslash")
    if re.match(r"RUN\s+--", text) or re.search(r"\\\s*\Z", text):
        raise problem("an option of RUN, or a line that has no end", "write the command alone")
    return text.rstrip("\n")


def _package(text: str) -> str:
    if not _PACKAGE.fullmatch(text):
        raise problem("not the name of a Debian package", "for example: python3-venv")
    return text


def _state(text: str) -> str:
    if not _STATE.fullmatch(text) or {".", ".."} & set(text.split("/")):
        raise problem("a state directory is named relative to the home", "for example: .config/tool")
    return text


def _apart(paths: tuple[str, ...]) -> tuple[str, ...]:
    # What lies in another is the agent's to exchange for a link, and Docker follows it on this host.
    for one, other in permutations(paths, 2):
        if is_within(one, other):
            raise problem("a state directory in another one", "name the upper one only")
    return paths


Word = Annotated[str, Field(min_length=1, max_length=4096)]
Words = Annotated[tuple[Word, ...], Field(strict=False, max_length=64)]


class GenericOptions(ProfileOptions):
    """``image``: lines of a Dockerfile, RUN or ENV, run as root in the build. ``packages``: of Debian.

    ``interactive`` (default: a shell), ``one_shot``, ``prompted``, ``resume``, ``daemon``: what is started.
    ``state``: directories below the home that outlive a session.
    """

    image: Annotated[
        tuple[Annotated[str, Field(max_length=8192), AfterValidator(_line)], ...],
        Field(strict=False, max_length=MAX_LINES),
    ] = ()
    packages: Annotated[
        tuple[Annotated[str, AfterValidator(_package)], ...], Field(strict=False, max_length=256)
    ] = ()
    interactive: Words = SHELL
    one_shot: Words = ()
    prompted: Words = ()
    resume: Words = ()
    daemon: Words = ()
    state: Annotated[
        tuple[Annotated[str, AfterValidator(_state)], ...],
        Field(strict=False, max_length=16),
        AfterValidator(_apart),
    ] = ()

    @field_validator("interactive", "one_shot", "prompted", "resume", "daemon")
    @classmethod
    def _no_nul(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        if any("\0" in word for word in words):
            raise problem("a NUL in an argument", "remove it")
        return words

    def shape(self) -> dict[str, Any]:
        """See ProfileOptions."""
        starts = ("interactive", "one_shot", "prompted", "resume", "daemon")
        return {
            **{name: getattr(self, name) for name in starts},
            "image_lines": self.image,
            "debian_packages": tuple(dict.fromkeys((*PACKAGES, *self.packages))),
            "state_dirs": self.state,
        }


GENERIC = Profile(
    name="generic",
    title="any other harness",
    install=None,
    interactive=SHELL,
    one_shot=(),
    resume=(),
    options=GenericOptions,
    modes=frozenset({"run", "daemon"}),
    debian_packages=PACKAGES,
)
