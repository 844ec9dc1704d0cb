"""What is shown of a session, and that no secret is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from corral import inspection
from corral.context import Invocation
from corral.inspection import describe, ending, render, without
from corral.lifecycle import Prepared, created
from corral.session import Request
from corral.sessions import Note, Session, all_of
from policy.container import Limits
from tests.unit.corral.conftest import UID
from tests.unit.corral.fakes import FakeDocker

SESSION = Session(
    "id1",
    "corral-box-0a0b0c0d-main-00000001",
    "box-0a0b0c0d",
    "00000001",
    "main",
    "run",
    "/home/me/box",
    "exited",
    "Exited (3) 2 minutes ago",
    1.0,
    "",
    Note("review", "5" * 64, "sha256:1"),
)
INSPECT: dict[str, Any] = {
    "Image": "sha256:1",
    "State": {
        "Status": "exited",
        "Running": False,
        "ExitCode": 137,
        "OOMKilled": True,
        "StartedAt": "2026-01-31T09:00:00Z",
        "FinishedAt": "2026-01-31T09:01:00Z",
    },
    "Config": {
        "Entrypoint": ["/usr/local/bin/corral-entrypoint"],
        "Cmd": ["opencode", "run", "say hunter2-hunter2 twice"],
        "Env": ["HOME=/home/agent", "API_KEY=hunter2-hunter2"],
        "WorkingDir": "/home/me/box",
        "User": "1000:1000",
        "Labels": {
            "io.corral.sandbox": "box-0a0b0c0d",
            "io.corral.egress": '{"names":[{"host":"api.example.com","ports":[443,22]}],"host_services":'
            '[{"name":"llama","port":8081}]}',
            "org.example": "no concern of ours",
        },
    },
    "HostConfig": {
        "NetworkMode": "0-corral-box-0a0b0c0d",
        "PidsLimit": 4096,
        "Memory": 1 << 30,
        "NanoCpus": 1500000000,
        "Mounts": [
            {"Source": "/home/me/box", "Target": "/home/me/box"},
            {"Source": "/data/home", "Target": "/home/agent", "ReadOnly": True},
        ],
    },
}


def test_everything_that_is_asked_after_an_end_is_there() -> None:
    text = render(describe(SESSION, INSPECT, ["it said this", "and that"], []))
    for part in (
        "exit code 137, it was out of memory",
        "2026-01-31T09:01:00Z",
        "ro /data/home at /home/agent",
        "rw /home/me/box\n",
        "api.example.com:443,22",
        "corral-host:8081 (llama)",
        "io.corral.sandbox=box-0a0b0c0d",
        "cpus 1.5",
        "review",
        "  and that",
    ):
        assert part in text
    assert "org.example" not in text


def test_no_secret_is_shown_wherever_it_is() -> None:
    body = describe(SESSION, INSPECT, ["key is hunter2-hunter2!"], ["hunter2-hunter2", "run"])
    for text in (json.dumps(body), render(body)):
        assert "hunter2" not in text
        assert "API_KEY" in text
        assert "say *** twice" in text
        # Too short to be one.
        assert "opencode" in text and "run" in text


def test_the_longest_secret_is_replaced_first() -> None:
    assert without({"a": ["abcdefgh abcdef"]}, ["abcdef", "abcdefgh"]) == {"a": ["*** ***"]}


def test_what_never_ran_has_no_exit_code() -> None:
    found = ending({"State": {"Status": "created", "ExitCode": 0, "StartedAt": "0001-01-01T00:00:00Z"}})
    assert (found.code, found.started) == (None, "")
    assert ending({"State": {"Status": "running", "Running": True}}).code is None


def test_what_an_agent_printed_cannot_command_the_terminal() -> None:
    text = render(describe(SESSION, INSPECT, ["\x1b]0;title\x07", "a\u202eb"], []))
    assert "\x1b" not in text and "\u202e" not in text


def test_secrets_are_those_of_the_policy_of_the_sessions_directory(
    invocation: Invocation, home: Path, docker_engine: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    env_file = home / "secrets.env"
    env_file.write_text("API_KEY=hunter2-hunter2\n")
    env_file.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(env_file, UID, -1)
    file = invocation.loaded.path
    file.write_text(f"profile: opencode\nname: demo\nsecrets:\n  env_file: {env_file}\n")
    prepared = Prepared(invocation.user, "sha256:1", None, {}, Limits())

    def logs(_: str, **options: Any) -> bytes:
        assert options["tail"] == 2 and not options["stream"]
        return b"one\nkey hunter2-hunter2\n"

    monkeypatch.setattr(docker_engine, "logs", logs)
    with created(invocation, prepared, Request("run", ("agent",), "00000001")):
        (found,) = all_of(docker_engine, invocation.user.uid, invocation.data)  # type: ignore[arg-type]
        body = inspection.inspect(invocation, found, 2)
    assert (
        body["last"] == ["one", "key ***"] if env_file.stat().st_uid == invocation.user.uid else body["last"]
    )
    assert body["session"] == "00000001"
