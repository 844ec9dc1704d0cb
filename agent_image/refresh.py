"""``make update-harnesses``: the newest version of each harness, fetched, hashed, looked into, and pinned.

npm, pip and their configuration say where the registries are; nothing of that is written down. A tarball is
pinned when its hash is the one that the registry claims and it holds what the profile takes out of it. Python
packages are pinned with all they need, as pip resolves them for each platform; pip checks them when they are
fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
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
Pip = Callable[[str, str, Sequence[str]], dict[str, Any]]
"""Asks pip what it would install of a package for a Python and platforms, and returns pip's report."""


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


# pip's words for the platforms that Debian 12 has, by Docker's word.
TAGS = {
    "amd64": ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64", "any"),
    "arm64": ("manylinux2014_aarch64", "manylinux_2_17_aarch64", "manylinux_2_28_aarch64", "any"),
}


def pip(runner: Runner, environ: Mapping[str, str], directory: Path) -> Pip:
    """Return a way to ask pip what it would install.

    It raises CorralError when pip fails.
    """

    def ask(package: str, python: str, tags: Sequence[str]) -> dict[str, Any]:
        said: list[str] = []
        report = directory / "report.json"
        argv = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        argv += ["--only-binary", ":all:", "--target", str(directory / "unused"), "--report", str(report)]
        short = python.replace(".", "")
        argv += ["--python-version", python, "--implementation", "cp"]
        argv += [word for abi in (f"cp{short}", "abi3", "none") for word in ("--abi", abi)]
        argv += [word for tag in tags for word in ("--platform", tag)]
        if runner.run([*argv, package], environ, said.append) != 0:
            raise CorralError(f"pip found no wheels for {package}: {said[-1] if said else 'it said nothing'}")
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found

    return ask


def resolved(ask: Pip, package: str, python: str) -> dict[str, Any]:
    """Return the entry of the lock for a Python package: one set of versions, the wheels of each platform.

    Raises:
        CorralError: pip fails, or finds other versions for one platform than for another.
    """
    found: dict[str, set[str]] = {}
    versions: list[set[str]] = []
    version = ""
    for tags in TAGS.values():
        pins = set()
        for row in ask(package, python, tags)["install"]:
            name = re.sub(r"[-_.]+", "-", row["metadata"]["name"]).lower()
            one = f"{name}=={row['metadata']['version']}"
            version = row["metadata"]["version"] if name == package else version
            pins.add(one)
            found.setdefault(one, set()).add(row["download_info"]["archive_info"]["hashes"]["sha256"])
        versions.append(pins)
    odd = sorted({pin for pins in versions for pin in pins if any(pin not in other for other in versions)})
    if odd:
        raise CorralError(f"{package} needs other packages on one platform than on another: {', '.join(odd)}")
    wheels = {name: sorted(hashes) for name, hashes in sorted(found.items())}
    return {"package": package, "version": version, "python": python, "wheels": wheels}


def refresh(
    ask: Npm, resolve: Pip, lock: Mapping[str, Any], directory: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the lock with the newest versions; a tarball that is pinned in its newest is left alone."""
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
    libraries = {}
    for name, entry in lock["pip"].items():
        libraries[name] = resolved(resolve, entry["package"], entry["python"])
        if libraries[name] != entry:
            say(f"{name}: {libraries[name]['version']}, {len(libraries[name]['wheels'])} packages")
    return {**lock, "npm": made, "pip": libraries}


def main() -> int:
    """Write the lock anew."""
    file = Path(__file__).with_name(LOCK)
    try:
        with tempfile.TemporaryDirectory() as directory:
            ask = npm(SubprocessRunner(), os.environ, Path(directory))
            resolve = pip(SubprocessRunner(), os.environ, Path(directory))
            lock = refresh(ask, resolve, load_lock(), Path(directory), print)
    except CorralError as error:
        print(error.render(), file=sys.stderr)
        return 1
    file.write_text(json.dumps(lock, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
