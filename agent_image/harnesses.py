"""The harnesses corral can put into an image: exact versions with the hashes of what the registries serve.

What is taken out of a tarball, and where it goes, is the profile's; ``harnesses.lock.json`` pins it: for each
harness and platform (Docker's word for an architecture; amd64-baseline is without AVX2) the npm package, its
exact version and the registry's Subresource Integrity string. A platform may lag behind another: they are
published one by one. ``client`` is the npm client that fetches them, node and npm as one Python wheel: it is
there in ten seconds, where Debian's npm and the 383 packages it depends on took 32 (and 111 through a proxy).
``make update-harnesses`` writes the lock anew.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import re
from importlib import resources
from typing import Any

from policy import profiles
from policy.errors import EngineError, PolicyError
from policy.profiles import BASELINE, Install, NpmTarball
from policy.records import dataclass

LOCK = "harnesses.lock.json"
SCHEMA = 2

_PACKAGE = re.compile(r"(?:@[a-z0-9][a-z0-9._-]*/)?[a-z0-9][a-z0-9._-]*")
_VERSION = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+(?:-[0-9A-Za-z.-]+)?")
_PYTHON_VERSION = re.compile(r"[0-9]+(?:\.[0-9]+)*(?:(?:a|b|rc|\.post)[0-9]+)?")
_MINOR = re.compile(r"3\.[0-9]{1,2}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Artifact:
    """One npm tarball, pinned. ``sha512`` is its hash, 128 hex digits; ``files`` are as in NpmTarball."""

    package: str
    version: str
    sha512: str
    files: tuple[tuple[str, str], ...]

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


def install_of(harness: str) -> Install | None:
    """Return what a harness is made of; None when the user's own lines of the image bring it.

    Raises:
        PolicyError: there is no such harness.
    """
    if harness not in profiles.names():
        raise PolicyError(f"there is no harness {harness!r}", f"known are: {', '.join(profiles.names())}")
    return profiles.get(harness).install


def platform_of(install: Install, architecture: str, *, baseline: bool = False) -> str:
    """Return the platform whose build an engine gets.

    Args:
        install: the harness's.
        architecture: of the engine ("amd64", "arm64").
        baseline: whether its processor is one without AVX2.
    """
    plain = architecture + BASELINE
    return plain if baseline and plain in install.tarballs else architecture


def artifact(
    harness: str, architecture: str, lock: dict[str, Any] | None = None, *, baseline: bool = False
) -> Artifact | None:
    """Return the tarball that has to be fetched for ``harness``; None when it needs none.

    Args:
        harness: name of a profile.
        architecture, baseline: see ``platform_of``.
        lock: instead of the packaged one.

    Raises:
        PolicyError: there is no such harness.
        EngineError: it is not pinned for that architecture.
        ValueError: the lock itself is malformed, or does not belong to the profile.
    """
    install = install_of(harness)
    if install is None or not install.tarballs:
        return None
    pins = _checked(lock)["npm"].get(harness, {})
    platform = platform_of(install, architecture, baseline=baseline)
    if platform not in install.tarballs or platform not in pins:
        known = sorted({name.removesuffix(BASELINE) for name in pins})
        raise EngineError(
            f"{harness} is not pinned for the architecture {architecture!r} of this Docker Engine",
            f"use an engine on one of: {', '.join(known)}",
        )
    return pinned(install.tarballs[platform], pins[platform])


def pinned(tarball: NpmTarball, pin: dict[str, str]) -> Artifact:
    """Return a tarball with its entry of the lock.

    Raises:
        ValueError: the entry is malformed, or another tarball's.
    """
    if pin["package"] != tarball.package or not pin["version"].endswith(tarball.variant):
        raise ValueError(f"{LOCK}: {pin['package']} {pin['version']} does not match {tarball.package}")
    return Artifact(
        package=_matching(_PACKAGE, pin["package"]),
        version=_matching(_VERSION, pin["version"]),
        sha512=hex_of(pin["integrity"]),
        files=tarball.files,
    )


@dataclass(frozen=True)
class Wheels:
    """Python packages, pinned. ``python`` is the only version of Python (major and minor) they are for."""

    package: str
    version: str
    python: str
    requirements: str


def wheels(harness: str, lock: dict[str, Any] | None = None) -> Wheels | None:
    """Return the Python packages of ``harness``; None when it has none.

    Raises:
        PolicyError: there is no such harness.
        ValueError: the lock itself is malformed, or does not belong to the profile.
    """
    install = install_of(harness)
    if install is None or not install.python:
        return None
    entry = _checked(lock)["pip"][harness]
    lines = []
    for pin, hashes in sorted(entry["wheels"].items()):
        name, _, version = pin.partition("==")
        # No hash at all would let pip take anything.
        if not hashes:
            raise ValueError(f"{LOCK}: {pin} has no hash")
        told = " ".join(f"--hash=sha256:{_matching(_SHA256, digest)}" for digest in hashes)
        lines.append(f"{_matching(_PACKAGE, name)}=={_matching(_PYTHON_VERSION, version)} {told}\n")
    if f"{install.python}=={entry['version']}" not in entry["wheels"]:
        raise ValueError(f"{LOCK}: {harness} does not match {install.python}")
    return Wheels(
        install.python,
        _matching(_PYTHON_VERSION, entry["version"]),
        _matching(_MINOR, entry["python"]),
        "".join(lines),
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


@functools.cache
def _packaged() -> dict[str, Any]:
    return load_lock()


def _checked(lock: dict[str, Any] | None) -> dict[str, Any]:
    body = _packaged() if lock is None else lock
    if body.get("schema") != SCHEMA:
        raise ValueError(f"{LOCK} has another schema than {SCHEMA}")
    return body


def _matching(pattern: re.Pattern[str], value: str) -> str:
    if not pattern.fullmatch(value):
        raise ValueError(f"{LOCK}: {value!r} does not match {pattern.pattern}")
    return value
