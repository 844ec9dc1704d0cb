from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from corral import session
from corral.startplace import chosen
from policy.container import WORKSPACE
from policy.errors import ArgumentError
from policy.loader import LoadedPolicy

from .conftest import POLICY

Load = Callable[..., LoadedPolicy]


@pytest.fixture
def mounted(loaded_of: Load, home: Path, project: Path) -> LoadedPolicy:
    for name in ("data", "notes", "private"):
        (home / name / "deep").mkdir(parents=True)
    (project / "src").mkdir()
    (project / "file").touch()
    (project / "out").symlink_to(home / "private")
    (project / "in").symlink_to(home / "data" / "deep")
    return loaded_of(POLICY + f"mounts:\n  rw: [{home}/data]\n  ro: [{home}/notes]\n")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (".", "Projects/demo"),
        ("src", "Projects/demo/src"),
        ("../demo/src/", "Projects/demo/src"),
        ("~/data", "data"),
        ("~/notes/deep", "notes/deep"),
        ("in", "data/deep"),
    ],
)
def test_directories_of_the_project_and_of_mounts_are_places(
    mounted: LoadedPolicy, home: Path, text: str, meant: str
) -> None:
    found = chosen(mounted, mounted.project, home, text)
    assert found == home / meant
    assert session.workdir(mounted, found) == str(found)


@pytest.mark.parametrize(
    "text", ["file", "missing", "..", "/", "~/private", "out", "", "a\nb", "/proc/self", WORKSPACE, "~"]
)
def test_everything_else_is_refused(mounted: LoadedPolicy, home: Path, text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        chosen(mounted, mounted.project, home, text)
    assert caught.value.exit_code == 2


def test_the_workspace_of_a_project_that_is_read_only_is_a_place(loaded_of: Load, home: Path) -> None:
    loaded = loaded_of(POLICY + "mounts: {project: ro}\n")
    found = chosen(loaded, loaded.project, home, WORKSPACE)
    assert session.workdir(loaded, found) == WORKSPACE
