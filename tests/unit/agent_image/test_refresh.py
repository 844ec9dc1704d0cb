from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from agent_image import refresh
from agent_image.harnesses import artifact, load_lock
from policy import profiles
from policy.errors import CorralError
from policy.profiles import NpmTarball

TOOL = NpmTarball(
    "@x/tool", (("package/bin/tool", "/usr/local/bin/tool"), ("package/lib/", "/usr/local/lib/tool/"))
)


def tarball(*names: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
    return buffer.getvalue()


def claim(content: bytes) -> str:
    return "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()


class Registry:
    """What npm would say of packages: name -> newest version and what is in the tarball."""

    def __init__(self, directory: Path, content: bytes, integrity: str | None = None) -> None:
        self.directory, self.content = directory, content
        self.integrity = integrity or claim(content)
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, *words: str) -> str:
        self.asked.append(words)
        if words[0] == "pack":
            package, _, version = words[-1].rpartition("@")
            flat = package.removeprefix("@").replace("/", "-")
            (self.directory / f"{flat}-{version}.tgz").write_bytes(self.content)
            return ""
        return json.dumps({"version": "9.0.0", "dist.integrity": self.integrity}[words[2]])


GOOD = tarball("package/bin/tool", "package/lib/a.js")


def test_what_is_fetched_is_pinned_by_its_hash(tmp_path: Path) -> None:
    ask = Registry(tmp_path, GOOD)
    assert refresh.pin(ask, TOOL, "9.0.0", tmp_path) == {
        "package": "@x/tool",
        "version": "9.0.0",
        "integrity": claim(GOOD),
    }
    assert "--ignore-scripts" in ask.asked[-1]
    assert list(tmp_path.iterdir()) == []


def test_another_tarball_than_the_registry_claims_is_not_pinned(tmp_path: Path) -> None:
    with pytest.raises(CorralError, match="the registry claims"):
        refresh.pin(Registry(tmp_path, GOOD, claim(b"")), TOOL, "9.0.0", tmp_path)


@pytest.mark.parametrize("names", [("package/bin/tool",), ("package/bin/toolbox", "package/lib/a")])
def test_a_tarball_without_what_the_profile_takes_is_not_pinned(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    with pytest.raises(CorralError, match="has no package/"):
        refresh.pin(Registry(tmp_path, tarball(*names)), TOOL, "9.0.0", tmp_path)


def test_the_newest_version_of_a_variant_is_chosen_by_number() -> None:
    versions = [
        "0.9.0-linux-x64",
        "0.10.0-linux-x64",
        "0.11.0-linux-arm64",
        "0.11.0",
        "0.10.0-alpha.1-linux-x64",
    ]

    def ask(*_words: str) -> str:
        return json.dumps(versions)

    assert refresh.newest(ask, NpmTarball("tool", (), "-linux-x64")) == "0.10.0-linux-x64"
    with pytest.raises(CorralError, match="no version that ends in -linux-riscv64"):
        refresh.newest(ask, NpmTarball("tool", (), "-linux-riscv64"))


def test_what_is_pinned_in_the_newest_version_is_not_fetched_again() -> None:
    lock = load_lock()

    def ask(*words: str) -> str:
        assert words[0] == "view" and words[2] in {"version", "versions"}, words
        pins: list[dict[str, Any]] = [pin for entry in lock["npm"].values() for pin in entry.values()]
        found = [pin["version"] for pin in pins if pin["package"] == words[1]]
        return json.dumps(found if words[2] == "versions" else found[0])

    said: list[str] = []

    def resolve(package: str, python: str, tags: Any) -> dict[str, Any]:
        pins = next(entry for entry in lock["pip"].values() if entry["package"] == package)["wheels"]
        return report(*((*pin.split("=="), digest) for pin, hashes in pins.items() for digest in hashes))

    assert refresh.refresh(ask, resolve, lock, Path("unused"), said.append) == lock
    assert said == []


def test_npm_that_fails_is_said_with_its_last_line(tmp_path: Path) -> None:
    class Failing:
        def run(self, argv: Any, env: Any, on_line: Any) -> int:
            on_line("npm error code E404")
            return 1

    with pytest.raises(CorralError, match="npm view x version failed: npm error code E404"):
        refresh.npm(Failing(), {}, tmp_path)("view", "x", "version")


def test_what_is_pinned_is_what_a_build_checks() -> None:
    for name in profiles.names():
        found = artifact(name, "amd64")
        if found is not None:
            pin = load_lock()["npm"][name]["amd64"]
            assert base64.b64encode(bytes.fromhex(found.sha512)).decode() == pin["integrity"][7:]


def report(*rows: tuple[str, ...]) -> dict[str, Any]:
    """What pip would say, of (name, version, hash)."""
    return {
        "install": [
            {
                "metadata": {"name": name, "version": version},
                "download_info": {"archive_info": {"hashes": {"sha256": digest}}},
            }
            for name, version, digest in rows
        ]
    }


def test_wheels_of_both_platforms_are_pinned_under_one_version() -> None:
    def resolve(_package: str, _python: str, tags: Any) -> dict[str, Any]:
        arm = "manylinux2014_aarch64" in tags
        return report(("tool", "1.0", "aa"), ("Lib_C.x", "2.0", "cc" if arm else "bb"))

    assert refresh.resolved(resolve, "tool", "3.11") == {
        "package": "tool",
        "version": "1.0",
        "python": "3.11",
        "wheels": {"lib-c-x==2.0": ["bb", "cc"], "tool==1.0": ["aa"]},
    }


def test_platforms_that_need_different_versions_are_refused() -> None:
    def resolve(_package: str, _python: str, tags: Any) -> dict[str, Any]:
        return report(("tool", "1.0" if "manylinux2014_aarch64" in tags else "1.1", "aa"))

    with pytest.raises(CorralError, match=r"tool==1\.0, tool==1\.1"):
        refresh.resolved(resolve, "tool", "3.11")
