"""A project with a policy on disk, a console that remembers, and a Docker Engine that behaves."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from corral.console import Console
from corral.context import Invocation
from corral.session import User
from policy.loader import LoadedPolicy, load
from tests.unit.corral.fakes import FakeDocker, FakeEnforcer

# Tests may be run by root; corral is not.
UID = os.getuid() or 1000
POLICY = """\
profile: opencode
name: demo
egress:
  profile_defaults: false
  allow:
    - api.example.com
    - {host: git.example.com, ports: [22, 443], optional: true}
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    directory = tmp_path / "home"
    directory.mkdir()
    return directory


@pytest.fixture
def project(home: Path) -> Path:
    directory = home / "Projects" / "demo"
    directory.mkdir(parents=True)
    return directory


@pytest.fixture
def loaded_of(home: Path, project: Path) -> Callable[[str], LoadedPolicy]:
    def write_and_load(text: str = POLICY) -> LoadedPolicy:
        file = project / "corral.yaml"
        file.write_text(text)
        file.chmod(0o644)
        return load(file, home=home, environ={}, uid=UID, own=())

    return write_and_load


@pytest.fixture
def loaded(loaded_of: Callable[..., LoadedPolicy]) -> LoadedPolicy:
    return loaded_of()


@pytest.fixture
def user(home: Path) -> User:
    return User(uid=UID, gid=UID, home=home, environ={"PATH": os.environ["PATH"]})


@pytest.fixture
def docker_engine() -> FakeDocker:
    return FakeDocker()


@pytest.fixture
def enforcer() -> FakeEnforcer:
    return FakeEnforcer()


@pytest.fixture
def said() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def invocation(
    loaded: LoadedPolicy,
    user: User,
    docker_engine: FakeDocker,
    enforcer: FakeEnforcer,
    said: io.StringIO,
) -> Invocation:
    made = Invocation(user, loaded.project, Console(said))
    # What the properties would make on first use.
    made.__dict__.update(loaded=loaded, approved=loaded, api=docker_engine, enforcer=enforcer)
    return made
