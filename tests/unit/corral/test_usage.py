"""What sandboxes take is counted as the disk has it, and a build that has no room does not begin."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from corral import room, state, usage
from corral.context import Invocation
from corral.room import room_for
from corral.usage import Image, human, images_of, of_sandbox, size_of
from policy.errors import CorralError, EngineGoneError

BLOCK = 4096


def test_a_tree_is_counted_by_blocks_and_each_file_once(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "below").mkdir(parents=True)
    (tree / "file").write_bytes(b"x" * 10 * BLOCK)
    sole, whole = size_of(tree)
    assert whole and sole >= 10 * BLOCK
    (tree / "below" / "again").hardlink_to(tree / "file")
    (tree / "link").symlink_to("/usr")
    (tree / "hole").touch()
    os.truncate(tree / "hole", 1 << 40)
    assert size_of(tree)[0] - sole < 2 * BLOCK
    assert size_of(tmp_path / "nothing") == (0, True)


def test_too_many_entries_are_said_to_be_more(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / str(number)).touch()
    assert size_of(tmp_path, most=10)[1] is False
    assert size_of(tmp_path, most=21)[1] is True


def test_heaps_of_names_are_not_held_but_said_to_be_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        (tmp_path / str(number)).write_bytes(b"x" * BLOCK)
    monkeypatch.setattr(usage, "HELD", 5 * len(str(tmp_path)), raising=False)
    size, whole = size_of(tmp_path)
    assert whole is False and size >= 4 * BLOCK


@pytest.mark.skipif(os.geteuid() == 0, reason="root opens what is closed")
def test_what_is_closed_is_said_to_be_more(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    assert size_of(tmp_path)[1] is False


def test_images_are_those_whose_names_or_label_say_so() -> None:
    rows = [
        {
            "Id": "1",
            "RepoTags": ["corral/box-0a0b0c0d:latest"],
            "Size": 500,
            "SharedSize": 100,
            "Labels": None,
        },
        {
            "Id": "2",
            "RepoTags": [],
            "Size": 400,
            "SharedSize": -1,
            "Labels": {"io.corral.image": "corral/box-0a0b0c0d:latest"},
        },
        {"Id": "3", "RepoTags": ["my/corral:latest"], "Size": 9, "SharedSize": 0, "Labels": {}},
    ]
    assert images_of(rows) == {"box-0a0b0c0d": Image(900, 800, ("corral/box-0a0b0c0d:latest", "2"))}


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (437_000_000, "437 MB"), (2 * 10**15, "2000.0 TB")],
)
def test_sizes_are_written_as_docker_does(size: int, text: str) -> None:
    assert human(size) == text


class Engine:
    def df(self) -> dict[str, Any]:
        return {"LayersSize": 1234567890, "Images": []}

    def info(self) -> dict[str, Any]:
        return {"DockerRootDir": "/"}


def test_the_report_adds_up_and_works_without_docker(invocation: Invocation) -> None:
    state.prepare(invocation.paths, invocation.loaded.profile)
    state.remember_project(invocation.paths, invocation.loaded.project)
    (invocation.paths.workspace / "file").write_bytes(b"x" * 3 * BLOCK)
    (invocation.data / "my-corral-x").mkdir()

    def gone() -> Any:
        raise EngineGoneError("Docker is not running")

    for connect in (Engine, gone):
        found = usage.report(invocation.user, invocation.data, connect)  # type: ignore[arg-type]
        (row,) = found.sandboxes
        assert row.workspace >= 3 * BLOCK
        assert found.total["files"] == row.files
        body = usage.body(found)
        assert body["sandboxes"][0]["project"] == str(invocation.loaded.project)
        text = usage.render(found)
        assert row.sandbox in text and "free at" in text
        assert ("images are not known: Docker is not running" in text) == (connect is gone)
        assert ("1.2 GB" in text) == (connect is not gone)
    assert of_sandbox(invocation.data / "nothing-0a0b0c0d", None).files == 0


def fs(free: int, inodes: int = 10**6) -> os.statvfs_result:
    return os.statvfs_result((1, 1, 10**12, free, free, 10**7, inodes, inodes, 0, 255))


@pytest.mark.parametrize(
    ("engine", "data", "inodes", "present", "problem"),
    [
        (10**10, 10**10, 10**6, None, None),
        (10**8, 10**10, 10**6, None, "100 MB are free at /e"),
        (5 * 10**8, 10**10, 10**6, 4 * 10**8, None),
        (5 * 10**8, 10**10, 10**6, 6 * 10**8, "500 MB are free at /e"),
        (10**10, 10**7, 10**6, None, "10.0 MB are free at /d"),
        (10**10, 10**10, 10, None, "10 files can still be made at /e"),
    ],
)
def test_a_build_without_room_is_refused(
    engine: int, data: int, inodes: int, present: int | None, problem: str | None, tmp_path: Path
) -> None:
    at = {tmp_path / "e": fs(engine, inodes), tmp_path / "d": fs(data)}
    for place in at:
        place.mkdir()
    found = room_for(tmp_path / "e", tmp_path / "d" / "not" / "yet", present, at.__getitem__)
    text = None if found is None else found[0].replace(str(tmp_path), "").replace("/d/not/yet", "/d")
    assert (text is None) == (problem is None)
    assert problem is None or (text is not None and text.startswith(problem))


def test_where_nobody_can_tell_a_build_begins(tmp_path: Path) -> None:
    def refuse(_: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    assert room_for(Path("/nowhere/at/all"), tmp_path, None, refuse) is None
    assert room_for(None, tmp_path, None, lambda _: fs(10**12)) is None


def test_a_disk_that_is_full_is_named_and_one_that_nobody_can_ask_is_not() -> None:
    home, project = Path("/home"), Path("/project")
    rooms = {home: fs(10**9), project: fs(0)}
    found = room.full([home, project], rooms.__getitem__)
    assert found is not None and found[0].startswith("the disk of /project is full")
    rooms[project] = fs(10**9, inodes=0)
    found = room.full([home, project], rooms.__getitem__)
    assert found is not None and found[0].startswith("the disk of /project can hold no more files")
    assert room.full([home], rooms.__getitem__) is None

    def refuse(_: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    assert room.full([home, project], refuse) is None


def test_the_refusal_names_image_and_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(room, "room_for", lambda *_: ("too little", "make room"))
    monkeypatch.setattr(room, "look", lambda *_: None)
    with pytest.raises(CorralError, match="no room to build corral/x:latest: too little"):
        room.insist(Engine(), "corral/x:latest", tmp_path)  # type: ignore[arg-type]
