from __future__ import annotations

import pytest

from agent_image.spec import PACKAGES
from policy.errors import EngineError, PolicyError
from policy.profiles import BakedFile
from tests.unit.agent_image.goldens import SPECS, opencode


@pytest.mark.parametrize(("uid", "gid"), [(0, 1000), (1000, 0)])
def test_root_is_refused(uid: int, gid: int) -> None:
    with pytest.raises(PolicyError, match="root"):
        opencode(uid=uid, gid=gid)


@pytest.mark.parametrize("uid", [-1, 65534, 2**31])
def test_ids_that_are_nobodys_are_refused(uid: int) -> None:
    with pytest.raises(PolicyError, match="cannot be the agent's"):
        opencode(uid=uid)


@pytest.mark.parametrize(
    "base", ["", "debian bookworm", "debian:12\nRUN x", "$BASE", "--platform=x", "a" * 256]
)
def test_base_that_is_no_image_name_is_refused(base: str) -> None:
    with pytest.raises(PolicyError, match="not the name of an image"):
        opencode(base=base)


@pytest.mark.parametrize(
    "base", ["debian", "debian:12-slim", "host.example:5000/a/b_c:T-1", f"x@sha256:{'a' * 64}"]
)
def test_image_names_are_taken(base: str) -> None:
    assert opencode(base=base).base == base


@pytest.mark.parametrize("package", ["", "-y", "a b", "x;reboot", "Git", "git=$(x)"])
def test_package_that_is_no_name_is_refused(package: str) -> None:
    with pytest.raises(PolicyError, match="not the name of a Debian package"):
        opencode(packages=(package,))


@pytest.mark.parametrize("package", ["sudo", "sudo=1.9", "opendoas"])
def test_package_that_makes_root_is_refused(package: str) -> None:
    with pytest.raises(PolicyError, match="no way to become root"):
        opencode(packages=(package,))


def test_a_wanted_version_replaces_the_plain_package() -> None:
    found = opencode(packages=("jq=1.6-2.1", "make")).all_packages
    assert "jq=1.6-2.1" in found
    assert "jq" not in found
    assert set(PACKAGES) - {"jq"} < set(found)
    assert list(found) == sorted(found)


@pytest.mark.parametrize(
    "path", ["/usr/bin/x", "/lib/x", "/", "/home/agent/x", "etc/x", "/etc/../usr/bin/x", "/etc/$(x)"]
)
def test_roots_files_do_not_replace_the_systems(path: str) -> None:
    with pytest.raises(PolicyError):
        opencode(owned_dirs=(path,))
    with pytest.raises(PolicyError):
        opencode(baked_files=(BakedFile(path),))


@pytest.mark.parametrize("mode", [0o4755, 0o666, 0o600])
def test_baked_files_have_one_of_two_modes(mode: int) -> None:
    with pytest.raises(PolicyError, match="0644 or 0755"):
        opencode(baked_files=(BakedFile("/etc/x", "", mode),))


@pytest.mark.parametrize("field", ["apt_mirror", "apt_security_mirror", "npm_registry", "pip_index"])
@pytest.mark.parametrize(
    "url", ["file:///srv/mirror", "mirror.example", "https://m.example/$(x)", "https://m.example/'"]
)
def test_mirror_that_is_no_plain_web_address_is_refused(field: str, url: str) -> None:
    with pytest.raises(PolicyError, match=field):
        opencode(**{field: url})


def test_login_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(PolicyError, match="credentials") as caught:
        opencode(npm_registry="https://me:hunter2@mirror.example/")
    assert "hunter2" not in caught.value.render()


def test_architecture_without_a_pinned_harness_is_an_error_of_the_engine() -> None:
    with pytest.raises(EngineError, match="riscv64"):
        opencode(architecture="riscv64")


@pytest.mark.parametrize(
    ("mirror", "own", "expected"),
    [
        (None, None, None),
        ("https://m.example/debian/", None, "https://m.example/debian-security"),
        ("https://m.example/debian", "https://s.example/x", "https://s.example/x"),
    ],
)
def test_security_mirror(mirror: str | None, own: str | None, expected: str | None) -> None:
    assert opencode(apt_mirror=mirror, apt_security_mirror=own).security_mirror == expected


@pytest.mark.parametrize(
    "option", [("Acquire", "x"), ("Acquire::Retries", "1; reboot"), ("A::B -o C::D", "1"), ("A::B", "")]
)
def test_option_of_apt_that_is_not_plain_is_refused(option: tuple[str, str]) -> None:
    with pytest.raises(PolicyError, match="not an option of apt"):
        opencode(apt_options=(option,))


def test_packages_for_one_python_are_not_added_to_an_existing_image() -> None:
    existing = SPECS["existing"].foreign
    with pytest.raises(PolicyError, match="for one Python only"):
        opencode(harness="aider", foreign=existing)
    assert opencode(harness="claude", foreign=existing).foreign is existing
