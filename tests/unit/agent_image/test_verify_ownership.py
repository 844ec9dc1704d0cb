"""Files of root's: who they belong to, what can be done to them, and that no try leaves a trace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent_image.archive import executable
from agent_image.files.verify import mounting
from agent_image.files.verify.attempts import SMALL, TRIES
from agent_image.files.verify.ownership import GUARDS, root_owned
from agent_image.files.verify.system import System
from tests.unit.agent_image.container import Container, outcome

TOOL = "/usr/local/bin/tool"


def tool(container: Container) -> None:
    container.put(TOOL, "text", mode=0o755)
    container.owners[TOOL] = 0
    container.refused.add(TOOL)


@pytest.mark.parametrize("path", [*GUARDS, TOOL])
def test_roots_file_is_out_of_reach(container: Container, path: str) -> None:
    tool(container)
    assert outcome(root_owned(path), container)[0] == "ok"


@pytest.mark.parametrize("way", TRIES)
def test_each_way_to_change_roots_file_is_tried_and_named(
    container: Container, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(container)

    def attempt(name: str, path: str) -> str:
        if name == way:
            return ""
        raise PermissionError(1, "no")

    monkeypatch.setattr(container, "attempt", attempt)
    assert outcome(root_owned(TOOL), container) == ("fail", f"can be {way}")


def test_what_could_not_be_put_back_is_told(container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(container)
    monkeypatch.setattr(container, "attempt", lambda way, _: "it is gone" if way == "removed" else 1 / 0)
    assert outcome(root_owned(TOOL), container)[0] == "fail"

    def attempt(name: str, path: str) -> str:
        if name == "removed":
            return "it is gone"
        raise PermissionError(1, "no")

    monkeypatch.setattr(container, "attempt", attempt)
    assert outcome(root_owned(TOOL), container) == ("fail", "can be removed (it is gone)")


@pytest.mark.parametrize(
    ("way", "told"), [("here", "mounted over"), ("there", "mounted over in namespaces of its own")]
)
def test_mounting_over_roots_file_is_tried(container: Container, way: str, told: str) -> None:
    tool(container)
    container.mounting[way] = True
    assert outcome(root_owned(TOOL), container) == ("fail", f"can be {told}")


def test_file_of_the_agent_is_not_roots(container: Container) -> None:
    tool(container)
    container.owners[TOOL] = 1000
    assert outcome(root_owned(TOOL), container) == ("fail", "belongs to uid 1000")


def test_the_published_hosts_file_is_the_users_but_mounted_read_only(container: Container) -> None:
    assert container.owner("/etc/hosts") == 1000
    assert outcome(root_owned("/etc/hosts"), container)[0] == "ok"
    container.read_only.remove("/etc/hosts")
    assert outcome(root_owned("/etc/hosts"), container) == ("fail", "belongs to uid 1000")
    # No other file is excused by its mount.
    container.owners["/etc/resolv.conf"] = 1000
    container.read_only.add("/etc/resolv.conf")
    assert outcome(root_owned("/etc/resolv.conf"), container) == ("fail", "belongs to uid 1000")


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o757])
def test_mode_that_lets_others_write_is_found_although_the_mount_refuses(
    container: Container, mode: int
) -> None:
    tool(container)
    container.real(TOOL).chmod(mode)
    status, detail = outcome(root_owned(TOOL), container)
    assert status == "fail"
    assert f"{mode:04o}" in detail


def test_missing_file_of_root_is_a_failure(container: Container) -> None:
    assert outcome(root_owned("/usr/local/bin/gone"), container)[0] == "fail"


def snapshot(top: Path) -> list[tuple[str, int, int, bytes | None]]:
    return sorted(
        (
            str(path.relative_to(top)),
            path.lstat().st_mode,
            path.lstat().st_uid,
            path.read_bytes() if path.is_file() else None,
        )
        for path in top.rglob("*")
    )


@pytest.mark.parametrize("kind", ["file", "directory"])
@pytest.mark.parametrize("way", TRIES)
def test_a_try_that_succeeds_leaves_everything_as_it_was(tmp_path: Path, way: str, kind: str) -> None:
    top = tmp_path / "a" / "b"
    top.mkdir(parents=True)
    path = top / "x"
    if kind == "file":
        path.write_bytes(b"text\n" * 3)
        path.chmod(0o640)
    else:
        path.mkdir(mode=0o750)
    before = snapshot(tmp_path)
    opening = kind == "directory" and way.startswith(("opened", "truncated", "emptied", "linked"))
    if opening:
        with pytest.raises(OSError):
            System().attempt(way, str(path))
    else:
        assert System().attempt(way, str(path)) == ""
    assert snapshot(tmp_path) == before


def test_a_large_file_is_not_emptied(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(SMALL + 1)
    for way in ("emptied", "emptied by a reader"):
        with pytest.raises(OSError, match="not tried"):
            System().attempt(way, str(path))
    assert System().attempt("truncated", str(path)) == ""
    assert path.stat().st_size == SMALL + 1


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("way", TRIES)
def test_the_kernel_refuses_every_try_on_roots_file(tmp_path: Path, way: str) -> None:
    tmp_path.chmod(0o755)
    top = tmp_path / "etc"
    top.mkdir(mode=0o755)
    path = top / "hosts"
    path.write_text("text\n")
    path.chmod(0o644)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # From within: the directories above are closed to others.
            os.chdir(tmp_path)
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            System().attempt(way, "etc/hosts")
        except OSError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert snapshot(top) == [("hosts", 0o100644, 0, b"text\n")]


def tried_to_mount(tmp_path: Path, *wrapper: str) -> dict[str, bool]:
    program = tmp_path / "corral-verify"
    program.write_bytes(executable("verify"))
    target = tmp_path / "target"
    target.touch()
    argv = [*wrapper, sys.executable, "-IS", "-c", mounting.CODE.format(str(program)), target]
    done = subprocess.run(argv, cwd="/", capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.skipif(os.getuid() != 0, reason="mounts")
def test_mounting_is_seen_to_succeed_and_is_taken_away_again(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    assert unshare
    # In a mount namespace of the test's own.
    found = tried_to_mount(tmp_path, unshare, "--mount", "--propagation", "private")
    assert found["here"]
    assert found["there"] == found["namespaces"]
    assert str(tmp_path / "target") not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.skipif(os.getuid() != 0, reason="gives up what root may")
def test_without_the_right_to_mount_it_is_refused(tmp_path: Path) -> None:
    setpriv = shutil.which("setpriv")
    assert setpriv
    found = tried_to_mount(tmp_path, setpriv, "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")
    assert not found["here"]


def test_a_try_to_mount_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError)):
        System(program=str(tmp_path / "gone")).mount_over("/etc/hosts")


def test_another_process_of_the_user_cannot_look_into_the_checker(tmp_path: Path) -> None:
    code = (
        "import ctypes, sys; sys.path.insert(0, sys.argv[1]); from verify import mounting; mounting.undumpable(); "
        "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    )
    program = tmp_path / "corral-verify"
    program.write_bytes(executable("verify"))
    argv = [sys.executable, "-IS", "-c", code, str(program)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "0"


def test_where_roots_files_are_the_agents_own_the_mount_has_to_protect_them(container: Container) -> None:
    container.become_rootless()
    for path in GUARDS:
        status, detail = outcome(root_owned(path), container)
        assert status == "ok"
        assert detail.startswith("mounted read-only")
    container.read_only.remove(GUARDS[0])
    status, detail = outcome(root_owned(GUARDS[0]), container)
    assert status == "fail"
    assert "belongs to the agent" in detail
