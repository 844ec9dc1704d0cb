from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy import profiles
from policy.errors import PolicyError
from policy.init import starter
from policy.yamltree import parse

if TYPE_CHECKING:
    from conftest import Workspace


@pytest.mark.parametrize("profile", profiles.names())
@pytest.mark.parametrize(
    "name", ["demo", "my project", 'quo"te\\', "ünïcode", "日本", "yes", "3", "a: b # c", " x ", "a\nb", ""]
)
def test_starter_loads(workspace: Workspace, profile: str, name: str) -> None:
    loaded = workspace.load(starter(profile, name))
    assert loaded.policy.profile == profile
    # A name that no sandbox can have is left out, and the directory's name holds.
    assert loaded.name == (name if name.strip() == name and name.isprintable() and name else "demo")


def test_starter_loads_with_every_example_switched_on(workspace: Workspace) -> None:
    workspace.directory("Projects/shared")
    workspace.directory("Documents/notes")
    text = re.sub(r"^( *)# ( *(?:[a-z_]+:|- ))", r"\1\2", starter("opencode", "demo"), flags=re.MULTILINE)
    text = text.replace("    - /usr/local/share/ca-certificates/example.crt", "    - ~/ca.crt")
    text = text.replace("/usr/bin/restic", "/usr/bin/env")
    (workspace.home / "ca.crt").write_text("x")
    loaded = workspace.load(text)
    assert len(loaded.mounts) == 3
    assert loaded.env_file is not None
    assert loaded.policy.build.proxy.http
    assert [name.host for name in loaded.declaration.names][:2] == ["api.example.com", "git.example.com"]
    assert loaded.declaration.host_services
    assert [pattern.host for pattern in loaded.declaration.patterns][2:4] == [
        "*.example.com",
        r"regex:(api|preview)-[a-z0-9]+\.example\.com",
    ]


def test_starter_names_the_profiles_own_hosts() -> None:
    for host in profiles.get("opencode").default_egress:
        assert host in starter("opencode", "demo")


def test_starter_for_a_planned_profile_is_refused() -> None:
    with pytest.raises(PolicyError, match="not available yet"):
        starter("hermes", "demo")


@given(st.text(max_size=50))
def test_no_project_name_breaks_out_of_its_line(name: str) -> None:
    document = parse(starter("opencode", name))
    assert document.problems == []
    assert set(document.value) <= {"profile", "name", "mode", "egress"}
    assert document.value.get("name", name) == name


@pytest.mark.parametrize("profile", profiles.names())
def test_starter_names_the_variables_that_the_harness_reads_its_credential_from(profile: str) -> None:
    text = starter(profile, "demo")
    assert all(key in text for key in profiles.get(profile).keys)
    assert ("# One of: " in text) == bool(profiles.get(profile).keys)
