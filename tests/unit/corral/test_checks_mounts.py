from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from agent_image.files.verify.expectations import Expectations
from corral import checks
from corral.session import mounts
from policy.identity import StatePaths
from policy.loader import LoadedPolicy


def test_the_checker_is_told_every_mount_that_a_session_gets(
    loaded_of: Callable[[str], LoadedPolicy], home: Path
) -> None:
    (home / "notes").mkdir()
    loaded = loaded_of(f"profile: opencode\nname: demo\nmounts: {{ro: [{home}/notes]}}\n")
    loaded = replace(loaded, profile=replace(loaded.profile, shadow=(".env", ".tool/.env")))
    body = checks.expectations(
        loaded, uid=1000, gid=1000, home=home, gateway="172.16.0.1", probe="192.0.2.1", names={}
    )
    told = Expectations(json.loads(json.dumps(body)))
    given = mounts(loaded, StatePaths(home / "state"), "00000001")
    assert {mount.target for mount in given} == {*told.mounts, *told.state, *told.shadows}
    read_only = {mount.target for mount in given if mount.read_only}
    assert read_only == {*told.mounts_ro, *told.shadows}
    assert told.shadows == ["/home/agent/.env", "/home/agent/.tool/.env"]
