"""The harnesses corral can put into an image: exact versions with the hashes of what the registry serves.

``harnesses.lock.json`` names, for each harness and each architecture in Docker's words (amd64, arm64), the
npm package that holds the ready-made program, its exact version, the registry's Subresource Integrity string,
and the program's path in the tarball. A platform may lag behind another: they are published one by one.
``client`` is the npm client that fetches them, node and npm as one Python wheel: it is there in ten seconds,
where Debian's npm and the 383 packages it depends on took 32 (and 111 through a proxy).
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

from policy.errors import EngineError, PolicyError

LOCK = "harnesses.lock.json"
SCHEMA = 1

_PACKAGE = re.compile(r"(?:@[a-z0-9][a-z0-9._-]*/)?[a-z0-9][a-z0-9._-]*")
_VERSION = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+(?:-[0-9A-Za-z.-]+)?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PROGRAM = re.compile(r"[a-z0-9][a-z0-9._-]*")
_TARBALL_PATH = re.compile(r"package/(?:[A-Za-z0-9_-][A-Za-z0-9._-]*/)*[A-Za-z0-9_-][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Artifact:
    """One program in one npm tarball. ``sha512`` is 128 hex digits of the tarball."""

    program: str
    package: str
    version: str
    sha512: str
    path: str

    @property
    def tarball(self) -> str:
        """Name of the file that ``npm pack`` writes."""
        flat = self.package.removeprefix("@").replace("/", "-")
        return f"{flat}-{self.version}.tgz"


@dataclass(frozen=True)
class Client:
    """The npm client as a Python wheel; ``sha256`` is 64 hex digits of the wheel."""

    package: str
    version: str
    sha256: str

    @property
    def requirement(self) -> str:
        """A line of a requirements file that nothing but this wheel satisfies."""
        return f"{self.package}=={self.version} --hash=sha256:{self.sha256}"


def artifact(harness: str, architecture: str, lock: dict[str, Any] | None = None) -> Artifact:
    """Return what has to be fetched for ``harness`` on ``architecture`` ("amd64", "arm64").

    Raises:
        PolicyError: there is no such harness.
        EngineError: it is not pinned for that architecture.
        ValueError: the lock itself is malformed.
    """
    harnesses = _checked(lock)["harnesses"]
    if harness not in harnesses:
        raise PolicyError(f"there is no harness {harness!r}", f"known are: {', '.join(sorted(harnesses))}")
    entry = harnesses[harness]
    platforms = entry["platforms"]
    if architecture not in platforms:
        raise EngineError(
            f"{harness} is not pinned for the architecture {architecture!r} of this Docker Engine",
            f"use an engine on one of: {', '.join(sorted(platforms))}",
        )
    platform = platforms[architecture]
    return Artifact(
        program=_matching(_PROGRAM, entry["program"]),
        package=_matching(_PACKAGE, platform["package"]),
        version=_matching(_VERSION, platform["version"]),
        sha512=hex_of(platform["integrity"]),
        path=_matching(_TARBALL_PATH, platform["path"]),
    )


def client(architecture: str, lock: dict[str, Any] | None = None) -> Client:
    """Return the npm client for an architecture that ``artifact`` accepts.

    Raises:
        EngineError: it is not pinned for that architecture.
        ValueError: the lock itself is malformed.
    """
    entry = _checked(lock)["client"]
    if architecture not in entry["wheels"]:
        raise EngineError(f"there is no npm client for the architecture {architecture!r}")
    algorithm, _, digest = entry["wheels"][architecture].partition(":")
    if algorithm != "sha256":
        raise ValueError(f"{LOCK}: a wheel's hash must be sha256, not {algorithm!r}")
    return Client(
        _matching(_PACKAGE, entry["package"]),
        _matching(_VERSION, entry["version"]),
        _matching(_SHA256, digest),
    )


def load_lock() -> dict[str, Any]:
    """Return the packaged lock as parsed JSON."""
    text = resources.files(__package__).joinpath(LOCK).read_text(encoding="utf-8")
    body: dict[str, Any] = json.loads(text)
    return body


def hex_of(integrity: str) -> str:
    """Turn one ``sha512-<base64>`` integrity string into hex.

    Raises:
        ValueError: another algorithm, more than one hash, or not 64 bytes.
    """
    algorithm, _, encoded = integrity.partition("-")
    if algorithm != "sha512":
        raise ValueError(f"integrity must be sha512, not {algorithm!r}")
    try:
        raw = base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise ValueError(f"integrity is not base64: {error}") from error
    if len(raw) != 64:
        raise ValueError(f"a sha512 has 64 bytes, not {len(raw)}")
    return raw.hex()


def _checked(lock: dict[str, Any] | None) -> dict[str, Any]:
    body = load_lock() if lock is None else lock
    if body.get("schema") != SCHEMA:
        raise ValueError(f"{LOCK} has another schema than {SCHEMA}")
    return body


def _matching(pattern: re.Pattern[str], value: str) -> str:
    if not pattern.fullmatch(value):
        raise ValueError(f"{LOCK}: {value!r} does not match {pattern.pattern}")
    return value
