"""``make update-harnesses``: the newest version of each harness, fetched, hashed, looked into, and pinned.

npm and its configuration say where the registry is; nothing of that is written down. A tarball is pinned when
its hash is the one that the registry claims and it holds what the profile takes out of it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agent_image.builder import Runner
from agent_image.harnesses import LOCK, Artifact, load_lock, pinned
from agent_image.runner import SubprocessRunner
from policy import profiles
from policy.errors import CorralError
from policy.profiles import NpmTarball

Npm = Callable[..., str]
"""Runs npm with some words in a directory and returns what it printed."""


def npm(runner: Runner, environ: Mapping[str, str], directory: Path) -> Npm:
    """Return a way to ask npm.

    It raises CorralError when npm fails.
    """

    def ask(*words: str) -> str:
        said: list[str] = []
        argv = ("npm", "--prefix", str(directory), *words)
        if runner.run(argv, environ, said.append) != 0:
            raise CorralError(f"npm {' '.join(words)} failed: {said[-1] if said else 'it said nothing'}")
        return "\n".join(said)

    return ask


def newest(ask: Npm, tarball: NpmTarball) -> str:
    """Return the newest version of a package, or of its variant for a platform.

    Raises:
        CorralError: npm fails, or it is not published for that platform.
    """
    if not tarball.variant:
        return str(json.loads(ask("view", tarball.package, "version", "--json")))
    # The newest of all platforms may not be there for each yet.
    versions = json.loads(ask("view", tarball.package, "versions", "--json"))
    mine = [version for version in versions if version.endswith(tarball.variant)]
    if not mine:
        raise CorralError(f"{tarball.package} has no version that ends in {tarball.variant}")
    return str(max(mine, key=lambda version: _numbers(version.removesuffix(tarball.variant))))


def _numbers(version: str) -> tuple[int, ...]:
    release, _, before = version.partition("-")
    parts = [int(part) for part in release.split(".")]
    # 1.2.3-alpha comes before 1.2.3.
    return (*parts, 0 if before else 1)


def pin(ask: Npm, tarball: NpmTarball, version: str, directory: Path) -> dict[str, str]:
    """Fetch a tarball, check it, and return its entry of the lock.

    Raises:
        CorralError: npm fails, the hash is another than the registry claims, or something is missing.
    """
    name = f"{tarball.package}@{version}"
    entry = {
        "package": tarball.package,
        "version": version,
        "integrity": str(json.loads(ask("view", name, "dist.integrity", "--json"))),
    }
    made = pinned(tarball, entry)
    ask("pack", "--ignore-scripts", "--loglevel=error", "--pack-destination", str(directory), name)
    file = directory / made.tarball
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha512").digest()
    if found.hex() != made.sha512:
        told = base64.b64encode(found).decode()
        raise CorralError(f"{name}: the registry claims {entry['integrity']} and serves sha512-{told}")
    lacking = missing(made, file)
    file.unlink()
    if lacking:
        raise CorralError(f"{name} has no {', '.join(lacking)}", "look at its profile in policy/profiles")
    return entry


def missing(artifact: Artifact, file: Path) -> list[str]:
    """Return what a profile takes out of a tarball and what is not in it."""
    with tarfile.open(file) as tar:
        names = tar.getnames()
    return [
        member
        for member, _ in artifact.files
        if not any(name.startswith(member) if member.endswith("/") else name == member for name in names)
    ]


def refresh(ask: Npm, lock: Mapping[str, Any], directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the lock with the newest versions; what is pinned already in that version is left alone."""
    made: dict[str, dict[str, dict[str, str]]] = {}
    for name in profiles.names():
        install = profiles.get(name).install
        for platform, tarball in sorted(install.tarballs.items() if install is not None else ()):
            version = newest(ask, tarball)
            known = lock["npm"].get(name, {}).get(platform)
            if known is None or (known["package"], known["version"]) != (tarball.package, version):
                known = pin(ask, tarball, version, directory)
                say(f"{name} {platform}: {version}")
            made.setdefault(name, {})[platform] = known
    return {**lock, "npm": made}


def main() -> int:
    """Write the lock anew."""
    file = Path(__file__).with_name(LOCK)
    try:
        with tempfile.TemporaryDirectory() as directory:
            ask = npm(SubprocessRunner(), os.environ, Path(directory))
            lock = refresh(ask, load_lock(), Path(directory), print)
    except CorralError as error:
        print(error.render(), file=sys.stderr)
        return 1
    file.write_text(json.dumps(lock, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
