"""A file system that exists only as a table, and a project on the real one."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings

from policy.errors import PolicyError
from policy.loader import LoadedPolicy, load
from policy.mounts import Identity, Kind

# How long an example takes says something about the machine, not about the policy.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@dataclass
class FakeProbe:
    """Everything is a directory unless listed; ``links`` maps a path to its target, ``same`` to its twin."""

    kinds: dict[str, Kind] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)

    def resolve(self, path: str) -> str:
        path = posixpath.normpath(path)
        for link, target in self.links.items():
            if path == link or path.startswith(link + "/"):
                return self.resolve(target + path[len(link) :])
        return path

    def kind(self, path: str) -> Kind:
        return self.kinds.get(path, "directory")

    def identity(self, path: str) -> Identity | None:
        if self.kind(path) == "missing":
            return None
        for twin, original in self.same.items():
            if path == twin or path.startswith(twin + "/"):
                path = original + path[len(twin) :]
        return 1, hash(path)


@pytest.fixture
def fake_probe() -> type[FakeProbe]:
    return FakeProbe


@dataclass
class Workspace:
    """A home with a project in it, and a shorthand to load a policy there."""

    home: Path
    project: Path
    environ: Mapping[str, str] = field(default_factory=dict)

    def load(self, text: str | bytes) -> LoadedPolicy:
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        (self.project / "corral.yaml").write_bytes(raw)
        return load(
            self.project / "corral.yaml", home=self.home, environ=self.environ, uid=os.getuid(), own=()
        )

    def error(self, text: str | bytes) -> PolicyError:
        with pytest.raises(PolicyError) as caught:
            self.load(text)
        return caught.value

    def directory(self, path: str) -> Path:
        made = self.home / path
        made.mkdir(parents=True)
        return made


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    home = tmp_path / "home"
    (home / "Projects" / "demo").mkdir(parents=True)
    return Workspace(home, home / "Projects" / "demo")
