"""Each harness where nothing can be written: a full disk, a read-only project. It is said, and nothing hangs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.models.host import FINAL, serving

from .host import Host, Project
from .test_harnesses import ALL, COMMANDS, EDIT, KEY, PATIENCE, project_of


@dataclass(frozen=True)
class Trouble:
    """What a harness says, and its exit code, on a full disk and in a project it cannot write to."""

    full: str
    full_code: int
    read_only: str
    read_only_code: int = 0


ALL_TROUBLE = {
    "opencode": Trouble("Unexpected error", 1, "Read-only file system"),
    "claude": Trouble("the disk is full", 1, FINAL),
    "codex": Trouble("No space left on device", 1, "Read-only file system"),
    "gemini": Trouble("no space left on device", 1, FINAL),
    "aider": Trouble("No space left on device", 0, "Read-only file system"),
}
EACH = pytest.mark.parametrize("name", ALL_TROUBLE)
# Fills the home, the state of the harness and the project, and then becomes the program.
FILL = 'for place in "$HOME" {state} "$PWD"; do cat /dev/zero > "$place/fill"; done 2>/dev/null; exec "$@"'
SMALL = """\
cp -a "$1" /tmp/kept
mount -t tmpfs -o "size=$2,uid=1000,gid=1000,mode=700" small "$1"
cp -a /tmp/kept/. "$1"
rm -rf /tmp/kept
"""


@contextmanager
def small_disks(host: Host, project: Project) -> Iterator[None]:
    """The project, and all that corral keeps of its sandbox, on disks that are soon full."""
    state = f"{host.box.home}/.local/share/corral/{project.sandbox['sandbox']}"
    places = {state: "64m", project.path: "4m"}
    try:
        for place, size in places.items():
            host.root("bash", "-e", "-c", SMALL, "small", place, size)
        yield
    finally:
        project.corral("down", check=False)
        host.root("umount", *places, check=False)


@EACH
def test_a_full_disk_is_said_and_ends_a_one_shot(host: Host, name: str) -> None:
    harness, trouble = ALL[name], ALL_TROUBLE[name]
    with project_of(host, harness) as project, serving(host.box, COMMANDS, key=KEY, plain=EDIT):
        # The control: with room nothing is said of it.
        assert "is full" not in project.inside("true").stderr
        with small_disks(host, project):
            state = " ".join(f'"$HOME/{part}"' for part in harness.profile[0].state_dirs)
            fill = ("sh", "-c", FILL.replace("{state}", state), "sh")
            done = project.inside(*fill, *harness.one_shot(), check=False, timeout=PATIENCE)
            said = done.stdout + done.stderr
            assert trouble.full in said, said
            assert done.returncode == trouble.full_code, said
            # Whatever the harness makes of it, corral names the disk.
            assert f"the disk of {project.path} is full" in done.stderr
            assert not project.exists("made.txt") or project.read("made.txt") == ""
        # There is room again, and nothing else is wrong.
        assert project.inside("true").returncode == 0


@EACH
def test_a_read_only_project_is_said_and_ends_a_one_shot(host: Host, name: str) -> None:
    harness, trouble = ALL[name], ALL_TROUBLE[name]
    with project_of(host, harness) as project, serving(host.box, COMMANDS, key=KEY, plain=EDIT) as model:
        project.policy(harness.policy + "mounts: {project: ro}\n")
        done = project.inside(*harness.one_shot(), check=False, timeout=PATIENCE)
        said = done.stdout + done.stderr
        print(name, done.returncode, said[-4000:], flush=True)
        assert trouble.read_only in said, said
        assert done.returncode == trouble.read_only_code, said
        assert not project.exists("made.txt")
        # The model was told what came of its command, and the session went on to its end.
        talks = [row for row in model.requests() if row.get("protocol")]
        assert talks and (name == "aider" or max(row["results"] for row in talks) >= 1)
        project.corral("verify")
