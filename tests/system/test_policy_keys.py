"""Keys of a policy that act when a session starts: hooks of the user's, and the harness's own switch."""

from __future__ import annotations

import json

import pytest

from .host import BASE_POLICY, Host

HOOK = """\
#!/bin/sh
env > /home/dev/hook.env
pwd > /home/dev/hook.pwd
id -u >> /home/dev/hook.pwd
printf '%s\\n' "$@" > /home/dev/hook.args
test ! -e /home/dev/hook.fails || { echo no room >&2; exit 3; }
"""


def test_a_hook_runs_on_this_host_before_each_session_and_its_failure_starts_nothing(host: Host) -> None:
    host.shell("rm -f hook.*")
    host.box.write("/home/dev/hook.sh", HOOK, mode=0o755)
    project = host.project("hooked", f"hooks:\n  pre_launch: [/home/dev/hook.sh, 'two words']\n{BASE_POLICY}")
    assert project.inside("test", "!", "-e", "/home/dev/hook.sh").returncode == 0
    environ = dict(line.partition("=")[::2] for line in host.box.read("/home/dev/hook.env").splitlines())
    assert environ["CORRAL_PROJECT"] == project.path
    assert environ["CORRAL_SANDBOX"].startswith("hooked-")
    assert len(environ["CORRAL_SESSION_ID"]) == 8
    assert host.box.read("/home/dev/hook.args") == "two words\n"
    assert host.box.read("/home/dev/hook.pwd").splitlines() == ["/home/dev", "1000"]
    host.shell("touch hook.fails")
    done = project.inside("touch", "started", check=False)
    assert done.returncode == 1
    assert "no room" in done.stderr
    assert not project.exists("started")
    assert not project.containers()
    # Another program in its place has to be approved.
    project.policy(project.read("corral.yaml").replace("two words", "other words"), approve=False)
    refused = project.inside("true", check=False)
    assert (refused.returncode, "hooks.pre_launch" in refused.stderr) == (2, True)


@pytest.mark.parametrize(("approvals", "bash"), [("ask", "ask"), ("off", "allow")])
def test_approvals_are_what_the_harness_reads_and_no_fence(host: Host, approvals: str, bash: str) -> None:
    project = host.project(f"approvals-{approvals}", f"approvals: {approvals}\n{BASE_POLICY}")
    done = project.inside("opencode", "debug", "config", timeout=400)
    assert f"approvals: {approvals} is the harness's own switch; the fence is the same" in done.stderr
    assert json.loads(done.stdout)["permission"]["bash"] == bash
