from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from agent_image.files.verify import files
from agent_image.files.verify.system import System
from tests.unit.agent_image.container import (
    HOME,
    NOTES,
    PROJECT,
    STATE,
    Container,
    expect,
    mountinfo,
    outcome,
)

SOCKET = "/var/run/docker.sock"


def test_docker_socket_is_found_even_as_a_dangling_link(container: Container) -> None:
    check = files.no_docker_socket(SOCKET)
    assert outcome(check, container)[0] == "ok"
    container.real("/var/run").mkdir(parents=True)
    container.real(SOCKET).symlink_to("/nowhere")
    assert outcome(check, container)[0] == "fail"


@pytest.mark.parametrize("home", ["/home/agent", HOME])
def test_credentials_are_found_in_either_home(container: Container, home: str) -> None:
    check = files.no_credential_dir(".ssh")
    assert outcome(check, container)[0] == "ok"
    container.real(f"{home}/.ssh").mkdir()
    assert outcome(check, container) == ("fail", f"{home}/.ssh is there")


def test_only_what_leads_to_mounts_is_visible(container: Container) -> None:
    container.put(f"{PROJECT}/src/deep/file")
    container.put(f"{NOTES}/anything")
    assert outcome(files.host_home_only_mounts, container) == ("ok", "mount components only")


def test_home_without_any_mount_is_fine(container: Container) -> None:
    assert outcome(files.host_home_only_mounts, container, home="/home/nobody")[0] == "ok"


@pytest.mark.parametrize("path", [f"{HOME}/.bashrc", f"{HOME}/Projects/other/file"])
def test_anything_else_of_the_home_is_found(container: Container, path: str) -> None:
    container.put(path)
    status, detail = outcome(files.host_home_only_mounts, container)
    assert status == "fail"
    assert "is visible" in detail


@pytest.mark.parametrize("point", [f"{HOME}/.cache", HOME, "/home", f"{HOME}/Projects"])
def test_mount_that_the_policy_does_not_have_is_found(container: Container, point: str) -> None:
    container.put("/proc/self/mountinfo", mountinfo((PROJECT, "rw"), (point, "rw")))
    status, detail = outcome(files.host_home_only_mounts, container)
    assert status == "fail"
    assert f"{point} is mounted" in detail


def test_mounts_inside_a_mount_of_the_policy_are_its_own(container: Container) -> None:
    container.put("/proc/self/mountinfo", mountinfo((PROJECT, "rw"), (f"{PROJECT}/data", "rw")))
    assert outcome(files.host_home_only_mounts, container)[0] == "ok"


@pytest.mark.parametrize("mount", [HOME, "/home"])
def test_policy_that_mounts_the_home_is_found(container: Container, mount: str) -> None:
    status, detail = outcome(files.host_home_only_mounts, container, mounts_rw=[mount])
    assert (status, detail) == ("fail", "the home itself is mounted")


def test_host_user_called_agent_is_judged_by_mounts_alone(container: Container) -> None:
    container.put("/home/agent/.bashrc")
    changes: dict[str, Any] = {"home": "/home/agent", "mounts_rw": ["/home/agent/work"], "mounts_ro": []}
    container.put("/proc/self/mountinfo", mountinfo(("/home/agent/work", "rw"), (STATE, "rw")))
    assert outcome(files.host_home_only_mounts, container, **changes)[0] == "ok"
    container.put("/proc/self/mountinfo", mountinfo(("/home/agent/.env", "ro")))
    assert outcome(files.host_home_only_mounts, container, **changes)[0] == "fail"
    changes["shadows"] = ["/home/agent/.env"]
    assert outcome(files.host_home_only_mounts, container, **changes)[0] == "ok"
    changes["state"] = ["/home/agent"]
    text = mountinfo(("/home/agent", "rw"), ("/home/agent/.env", "ro"))
    container.put("/proc/self/mountinfo", text)
    assert outcome(files.host_home_only_mounts, container, **changes)[0] == "ok"
    container.put("/proc/self/mountinfo", mountinfo(("/home/agent/.ssh", "rw")))
    assert outcome(files.host_home_only_mounts, container, **changes)[0] == "fail"


def test_spaces_in_mount_points_are_understood(container: Container) -> None:
    container.put("/proc/self/mountinfo", mountinfo((f"{HOME}/a\\040b", "rw")))
    assert outcome(files.host_home_only_mounts, container) == ("fail", f"{HOME}/a b is mounted")


def test_file_of_secrets_is_found(container: Container) -> None:
    assert outcome(files.env_file_not_mounted, container)[0] == "ok"
    assert outcome(files.env_file_not_mounted, container, env_file=None)[0] == "skip"
    container.put(f"{HOME}/secret.env")
    assert outcome(files.env_file_not_mounted, container)[0] == "fail"


def test_writable_mount_is_written_and_left_as_it_was(container: Container) -> None:
    assert outcome(files.rw_writable(PROJECT), container)[0] == "ok"
    assert container.listing(PROJECT) == []


def test_mount_that_cannot_be_written_is_found(container: Container) -> None:
    container.refused.add(PROJECT)
    assert outcome(files.rw_writable(PROJECT), container) == ("fail", "cannot be written: Permission denied")


def test_missing_mount_is_found(container: Container) -> None:
    assert outcome(files.rw_writable(f"{HOME}/gone"), container)[0] == "fail"
    assert outcome(files.ro_unwritable(f"{HOME}/gone"), container)[0] == "fail"


def test_files_that_would_belong_to_somebody_else_are_found(container: Container) -> None:
    container.owners[PROJECT] = 100999
    status, detail = outcome(files.rw_writable(PROJECT), container)
    assert status == "fail"
    assert "100999" in detail


def test_mounted_file_is_opened_but_not_changed(container: Container) -> None:
    path = container.put(f"{PROJECT}/file", "text")
    assert outcome(files.rw_writable(f"{PROJECT}/file"), container)[0] == "ok"
    assert path.read_text() == "text"


def test_read_only_mount_refuses(container: Container) -> None:
    assert outcome(files.ro_unwritable(NOTES), container)[0] == "ok"


def test_read_only_mount_that_takes_a_write_is_found_and_left_clean(container: Container) -> None:
    container.read_only.clear()
    assert outcome(files.ro_unwritable(NOTES), container) == ("fail", "can be written")
    assert container.listing(NOTES) == []


def test_write_that_succeeds_as_another_user_is_a_write(container: Container) -> None:
    container.read_only.clear()
    container.owners[NOTES] = 65534
    assert outcome(files.ro_unwritable(NOTES), container) == ("fail", "can be written")


def test_permissions_alone_do_not_make_a_mount_read_only(container: Container) -> None:
    container.read_only.clear()
    container.refused.add(NOTES)
    status, detail = outcome(files.ro_unwritable(NOTES), container)
    assert status == "fail"
    assert "not mounted read-only" in detail


def test_writable_mount_below_a_read_only_one_is_found(container: Container) -> None:
    below = f"{NOTES}/disk"
    container.put("/proc/self/mountinfo", mountinfo((NOTES, "ro"), (below, "rw,nosuid")))
    status, detail = outcome(files.ro_unwritable(NOTES), container)
    assert status == "fail"
    assert below in detail
    assert outcome(files.ro_unwritable(NOTES), container, mounts_rw=[below])[0] == "ok"
    container.put("/proc/self/mountinfo", mountinfo((NOTES, "ro"), (below, "ro,nosuid")))
    assert outcome(files.ro_unwritable(NOTES), container)[0] == "ok"


def test_state_belongs_to_the_agent(container: Container) -> None:
    assert outcome(files.state_writable(STATE), container)[0] == "ok"
    container.owners[STATE] = 0
    assert outcome(files.state_writable(STATE), container) == ("fail", "belongs to uid 0, not 1000")


def test_state_that_cannot_be_written_is_found(container: Container) -> None:
    container.refused.add(STATE)
    assert outcome(files.state_writable(STATE), container)[0] == "fail"


def test_a_root_that_takes_no_write_is_read_only(container: Container) -> None:
    assert outcome(files.read_only_root, container)[0] == "ok"


@pytest.mark.parametrize("path", files.ROOT_DIRS)
def test_each_part_of_the_root_is_tried(container: Container, path: str) -> None:
    container.read_only.remove(path)
    container.real(path).mkdir(exist_ok=True)
    assert outcome(files.read_only_root, container) == ("fail", f"{path} can be written")
    # Refused by permissions alone: another user of the image could.
    container.refused.add(path)
    assert outcome(files.read_only_root, container) == ("fail", f"{path} is not mounted read-only")


def test_code_can_be_mapped_from_an_ordinary_directory(container: Container) -> None:
    assert outcome(files.exec_dir(PROJECT), container)[0] == "ok"
    assert container.listing(PROJECT) == []


def test_directory_that_executes_nothing_is_found(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(files.mmap, "mmap", refuse)
    assert outcome(files.exec_dir(PROJECT), container)[0] == "fail"
    assert container.listing(PROJECT) == []


def test_program_that_starts_runs(container: Container) -> None:
    container.exit_code = 0
    assert outcome(files.runs("/usr/local/bin/tool"), container)[0] == "ok"
    assert container.executed[0][1:] == ("--version",)
    container.exit_code = -4
    assert outcome(files.runs("/usr/local/bin/tool"), container) == ("fail", "--version ended with -4")


def test_real_trials_succeed_and_leave_nothing(tmp_path: Path) -> None:
    system = System()
    file = tmp_path / "file"
    file.write_text("text")
    assert system.write(str(tmp_path)) == os.getuid()
    assert system.write(str(file)) == os.getuid()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "text"


def test_real_kernel_says_which_mounts_are_read_only() -> None:
    system = System()
    assert "/proc" in system.mounts()
    assert system.flags("/proc") & os.ST_RDONLY == ("ro" in system.mounts()["/proc"])
    assert expect().mounts == [PROJECT, NOTES]
