"""The harnesses corral knows."""

from __future__ import annotations

from policy.errors import PolicyError
from policy.problems import show
from policy.profiles.aider import AIDER
from policy.profiles.base import (
    BASELINE,
    PLATFORMS,
    Argv,
    BakedFile,
    Install,
    ManagedDir,
    NpmTarball,
    Profile,
    SeedFile,
    Start,
    VerifyCheck,
)
from policy.profiles.claude import CLAUDE
from policy.profiles.codex import CODEX
from policy.profiles.config import ProfileOptions
from policy.profiles.gemini import GEMINI
from policy.profiles.generic import GENERIC
from policy.profiles.opencode import OPENCODE

__all__ = [
    "BASELINE",
    "PLATFORMS",
    "Argv",
    "BakedFile",
    "Install",
    "ManagedDir",
    "NpmTarball",
    "Profile",
    "ProfileOptions",
    "SeedFile",
    "Start",
    "VerifyCheck",
    "get",
    "names",
    "planned",
]

_PROFILES = {profile.name: profile for profile in (AIDER, CLAUDE, CODEX, GEMINI, GENERIC, OPENCODE)}
_PLANNED = ("hermes", "goose")


def names() -> tuple[str, ...]:
    """Return the profiles that can be used, sorted."""
    return tuple(sorted(_PROFILES))


def planned() -> tuple[str, ...]:
    """Return the profiles that are announced but not available yet."""
    return _PLANNED


def get(name: str) -> Profile:
    """Return a profile.

    Raises:
        PolicyError: unknown, or not available yet.
    """
    profile = _PROFILES.get(name)
    if profile is not None:
        return profile
    available = f"available: {', '.join(names())}"
    if name in _PLANNED:
        raise PolicyError(f"profile {name} is not available yet", available)
    import difflib

    near = difflib.get_close_matches(name, [*names(), *_PLANNED], n=1)
    raise PolicyError(
        f"unknown profile {show(name)}", f"did you mean {near[0]}? {available}" if near else available
    )
