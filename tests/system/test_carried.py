"""What a user has of opencode on the host comes along, and no more of it than is said."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.models.host import FINAL, PORT, serving

from .host import Host
from .test_harnesses import COMMANDS, KEY, PROMPT

POLICY = f"""\
profile: opencode
limits: {{best_effort: true}}
egress: {{profile_defaults: false}}
host_services: [{{name: model, port: {PORT}}}]
approvals: "off"
"""
# As a user would have it, with a key in it, and without the file that opencode insists on.
CONFIG = """{"model": "mine/demo", "provider": {"mine": {"npm": "@ai-sdk/openai-compatible", "name": "mine",
  "options": {"baseURL": "http://corral-host:PORT/v1", "apiKey": "KEY"},
  "models": {"demo": {"name": "demo", "limit": {"context": 65536, "output": 4096}}}}}}"""
LOOK = """\
cd ~/.config/opencode; find . -type f | sort; for place in . agent; do touch $place/x 2>&1; done
cat ~/.local/share/opencode/auth.json
"""


@pytest.fixture
def configured(host: Host) -> Iterator[Host]:
    home = host.box.home
    host.box.write(
        f"{home}/.config/opencode/opencode.json", CONFIG.replace("PORT", str(PORT)).replace("KEY", KEY)
    )
    host.box.write(f"{home}/.config/opencode/agent/review.md", "Review it.\n")
    host.box.write(f"{home}/.local/share/opencode/auth.json", '{"of": "the host"}', mode=0o600)
    try:
        yield host
    finally:
        host.shell("rm -rf ~/.config/opencode ~/.local/share/opencode")


def test_what_the_user_has_of_opencode_is_there_read_only_and_told(configured: Host) -> None:
    host = configured
    project = host.project("carried", POLICY)
    with serving(host.box, COMMANDS, key=KEY):
        done = project.inside("opencode", "run", PROMPT, timeout=560)
        assert FINAL in done.stdout
        assert project.read("made.txt") == "1000\n"
        assert "copied 2 files of /home/dev/.config/opencode into the sandbox" in done.stderr
        assert "copied /home/dev/.local/share/opencode/auth.json into the sandbox" in done.stderr
        assert KEY not in done.stderr
        # What is there is the user's and the file that was missing, and nobody can write beside it.
        seen = project.inside("sh", "-c", LOOK)
        assert seen.stdout.splitlines()[:3] == ["./.gitignore", "./agent/review.md", "./opencode.json"]
        assert seen.stdout.count("Read-only file system") == 2
        assert seen.stdout.endswith('{"of": "the host"}')
        assert "copied" not in seen.stderr
        # The next session has what the user changed, and keeps the login that the sandbox has.
        host.shell(
            "echo Anew. > ~/.config/opencode/agent/review.md; echo '{}' > ~/.local/share/opencode/auth.json"
        )
        script = "cat ~/.config/opencode/agent/review.md ~/.local/share/opencode/auth.json"
        assert project.inside("sh", "-c", script).stdout == 'Anew.\n{"of": "the host"}'
        project.corral("verify")
    assert not host.box.run(["ls", "-A", f"{host.box.home}/.config/opencode"]).stdout.count(".gitignore")


def test_a_policy_that_takes_nothing_along_gets_nothing(configured: Host) -> None:
    host = configured
    project = host.project("bare", POLICY + "profile_options: {opencode: {from_host: []}}\n")
    with serving(host.box, COMMANDS, key=KEY):
        seen = project.inside("sh", "-c", "ls -A ~/.config/opencode ~/.local/share/opencode", timeout=560)
    assert "auth.json" not in seen.stdout and "opencode.json" not in seen.stdout
    assert ".gitignore" in seen.stdout
