from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_image import context
from agent_image.context import certificates, differences, digest, files, write_context, write_sealed
from policy.errors import CorralError, PolicyError
from policy.profiles import BakedFile
from tests.unit.agent_image.goldens import CERTIFICATE, CERTIFICATES, opencode


def modes(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): oct(stat.S_IMODE(path.lstat().st_mode))
        for path in sorted(directory.rglob("*"))
    }


def test_context_has_these_files_with_these_modes(tmp_path: Path) -> None:
    assert write_context(opencode(), tmp_path / "build")
    assert modes(tmp_path / "build") == {
        "Dockerfile": "0o644",
        "root": "0o755",
        "root/etc": "0o755",
        "root/etc/host.conf": "0o644",
        "root/etc/opencode": "0o755",
        "root/etc/opencode/opencode.json": "0o644",
        "root/usr": "0o755",
        "root/usr/local": "0o755",
        "root/usr/local/bin": "0o755",
        "root/usr/local/bin/corral-entrypoint": "0o755",
        "root/usr/local/bin/corral-proxy": "0o755",
        "root/usr/local/bin/corral-verify": "0o755",
    }


def test_umask_does_not_show(tmp_path: Path) -> None:
    write_context(opencode(), tmp_path / "a")
    before = os.umask(0o077)
    try:
        write_context(opencode(), tmp_path / "b")
    finally:
        os.umask(before)
    assert modes(tmp_path / "a") == modes(tmp_path / "b")


def test_programs_of_the_image_say_who_interprets_them(tmp_path: Path) -> None:
    for file in files(opencode()):
        if file.path.startswith("root/usr/local/bin/"):
            assert file.content.startswith(b"#!/usr/bin/python3 -IS\n")


def test_same_inputs_leave_the_directory_alone(tmp_path: Path) -> None:
    directory = tmp_path / "build"
    write_context(opencode(), directory)
    inode = directory.stat().st_ino
    assert not write_context(opencode(), directory)
    assert directory.stat().st_ino == inode


@pytest.mark.parametrize("change", ["edit", "add", "mode", "link", "remove"])
def test_whatever_was_changed_is_replaced(tmp_path: Path, change: str) -> None:
    directory = tmp_path / "build"
    write_context(opencode(), directory)
    dockerfile = directory / "Dockerfile"
    good = dockerfile.read_bytes()
    match change:
        case "edit":
            dockerfile.write_bytes(good + b"USER root\n")
        case "add":
            (directory / "root/etc/ld.so.preload").write_text("/x.so\n")
        case "mode":
            dockerfile.chmod(0o600)
        case "link":
            dockerfile.rename(tmp_path / "elsewhere")
            dockerfile.symlink_to(tmp_path / "elsewhere")
        case "remove":
            dockerfile.unlink()
    assert write_context(opencode(), directory)
    assert not dockerfile.is_symlink()
    assert dockerfile.read_bytes() == good
    assert not (directory / "root/etc/ld.so.preload").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_directory_that_others_could_write_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "build"
    write_context(opencode(), directory)
    directory.chmod(0o777)
    with pytest.raises(CorralError, match="written by others") as caught:
        write_context(opencode(), directory)
    assert caught.value.exit_code == 1


def test_link_in_place_of_the_directory_is_refused_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "build").symlink_to(tmp_path / "other")
    with pytest.raises(CorralError, match="not a directory"):
        write_context(opencode(), tmp_path / "build")
    assert list((tmp_path / "other").iterdir()) == []


def test_somebody_elses_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_context(opencode(), tmp_path / "build")
    monkeypatch.setattr(context.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CorralError, match="belongs to uid"):
        write_context(opencode(), tmp_path / "build")


def test_failure_while_writing_leaves_the_old_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "build"
    write_context(opencode(), directory)
    before = modes(directory)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(context, "_fill", full)
    with pytest.raises(OSError, match="No space"):
        write_context(opencode(uid=1001), directory)
    assert modes(directory) == before
    assert [path.name for path in tmp_path.iterdir()] == ["build"]


@pytest.mark.parametrize(
    "change",
    [
        {"uid": 1001},
        {"gid": 1001},
        {"architecture": "arm64"},
        {"base": "debian:trixie-slim"},
        {"packages": ("make",)},
        {"owned_dirs": ()},
        {"baked_files": (BakedFile("/etc/opencode/opencode.json", "{}"),)},
        {"baked_files": (BakedFile("/etc/opencode/opencode.json", "{}", 0o755),)},
        {"ca_certificates": (CERTIFICATE,)},
        {"apt_mirror": "https://mirror.example/debian"},
        {"npm_registry": "https://mirror.example/npm"},
        {"pip_index": "https://mirror.example/simple"},
    ],
)
def test_digest_changes_with_every_input(change: dict[str, object]) -> None:
    assert digest(opencode()) == digest(opencode())
    assert digest(opencode(**change)) != digest(opencode())


def test_digest_tells_a_mode_from_another() -> None:
    plain = (BakedFile("/etc/opencode/opencode.json", "{}"),)
    program = (BakedFile("/etc/opencode/opencode.json", "{}", 0o755),)
    assert digest(opencode(baked_files=plain)) != digest(opencode(baked_files=program))


def test_pip_is_told_its_index() -> None:
    found = {file.path: file for file in files(opencode(pip_index="https://mirror.example/simple"))}
    assert found["root/etc/pip.conf"].content == b"[global]\nindex-url = https://mirror.example/simple\n"
    assert "root/etc/pip.conf" not in {file.path for file in files(opencode())}


def test_corrals_own_files_cannot_be_baked_over() -> None:
    programs = [f"/usr/local/bin/corral-{name}" for name in ("entrypoint", "verify", "proxy")]
    for path in (*programs, "/etc/host.conf"):
        with pytest.raises(PolicyError, match="corral's own"):
            files(opencode(baked_files=(BakedFile(path),)))


def test_bundle_is_split_into_single_certificates() -> None:
    found = certificates((CERTIFICATES,))
    assert len(found) == 2
    assert all(pem.count(b"BEGIN CERTIFICATE") == 1 for pem in found)
    names = [file.path for file in files(opencode(ca_certificates=(CERTIFICATES,)))]
    assert len([name for name in names if name.startswith("certificates/corral-")]) == 2


def test_order_and_layout_of_certificates_do_not_matter() -> None:
    spaced = b"some text\r\n" + CERTIFICATES.replace(b"\n", b"\r\n")
    assert certificates((CERTIFICATE, CERTIFICATES)) == certificates((spaced,))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "no PEM certificate"),
        (b"\x30\x82", "no PEM certificate"),
        (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "cannot be decoded"),
        (b"-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n", "cannot be decoded"),
        (CERTIFICATE + b"-----BEGIN EC PRIVATE KEY-----\n", "private key"),
    ],
)
def test_what_is_no_certificate_is_refused(text: bytes, why: str) -> None:
    with pytest.raises(PolicyError, match=why):
        certificates((text,))


def _tamper_content(directory: Path) -> None:
    (directory / "Dockerfile").write_text("FROM evil\n")


def _tamper_new(directory: Path) -> None:
    (directory / "root" / "evil").write_text("x")


def _tamper_removed(directory: Path) -> None:
    (directory / "Dockerfile").unlink()


def _tamper_mode(directory: Path) -> None:
    (directory / "Dockerfile").chmod(0o777)


def _tamper_link(directory: Path) -> None:
    (directory / "Dockerfile").unlink()
    (directory / "Dockerfile").symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    ("tamper", "told"),
    [
        (_tamper_content, "  changed: Dockerfile"),
        (_tamper_new, "  new: root/evil"),
        (_tamper_removed, "  removed: Dockerfile"),
        (_tamper_mode, "  mode 644 -> 777: Dockerfile"),
        (_tamper_link, "  changed: Dockerfile"),
    ],
)
def test_a_build_directory_that_was_tampered_with_is_refused_until_it_is_removed(
    tmp_path: Path, tamper: Callable[[Path], None], told: str
) -> None:
    directory, spec = tmp_path / "build", opencode()
    assert write_sealed(spec, directory)
    assert not write_sealed(spec, directory)
    tamper(directory)
    for wanted in (spec, replace(spec, uid=4242)):
        with pytest.raises(CorralError, match="was tampered with") as caught:
            write_sealed(wanted, directory)
        assert told in caught.value.message.splitlines()
        assert caught.value.exit_code == 1
    assert differences(spec, directory)
    shutil.rmtree(directory)
    assert write_sealed(spec, directory)
    assert differences(spec, directory) == []


def test_other_inputs_are_no_tampering_also_after_being_cut_off_between_any_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, first, second = tmp_path / "build", opencode(), replace(opencode(), uid=4242)
    steps = ("write_context", "_write_seal")
    for step in steps:
        for after in (False, True):
            shutil.rmtree(directory, ignore_errors=True)
            write_sealed(first, directory)
            original = getattr(context, step)

            def cut(*args: Any, original: Any = original, after: bool = after) -> None:
                if after:
                    original(*args)
                raise KeyboardInterrupt

            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(context, step, cut)
                write_sealed(second, directory)
            write_sealed(second, directory)
            assert differences(second, directory) == []


def test_a_build_directory_of_before_has_no_seal_and_gets_one(tmp_path: Path) -> None:
    directory = tmp_path / "build"
    write_context(opencode(), directory)
    (directory / "Dockerfile").write_text("x")
    assert write_sealed(opencode(), directory)
    _tamper_content(directory)
    with pytest.raises(CorralError):
        write_sealed(opencode(), directory)
