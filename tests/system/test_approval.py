"""A policy is used when its user approved it: after a clone, after an agent rewrote it, with and without a terminal."""

from __future__ import annotations

import re
import time

import pytest

from .host import BASE_POLICY, Host

WIDE = "forbidden.corral.example"
WIDER = f"{BASE_POLICY}    - {WIDE}\n"
FETCH = ("curl", "-sS", "-o", "/dev/null", "-m", "5", f"https://{WIDE}/")
REWRITE = f"printf '    - {WIDE}\\n' >> corral.yaml; cat corral.yaml"

# The terminal echoes the end of what is typed.
RAN = re.compile(r"(?m)^(\^@)?ran\r?$")


def test_a_policy_from_a_clone_starts_nothing_until_it_is_approved(host: Host) -> None:
    project = host.project("clone")
    # A name that was never used here: what is approved outlives the project.
    name = f"fresh{time.time_ns()}"
    project.policy(f"name: {name}\n{BASE_POLICY}", approve=False)
    for command in (["build"], ["run", "--", "true"], ["shell"], ["verify"]):
        done = project.corral(*command, check=False)
        assert done.returncode == 2
        assert "nobody has approved this policy yet" in done.stderr
        assert f"+ write {project.path}" in done.stderr
    assert not [
        found
        for found in host.box.run(["docker", "ps", "-a", "--format", "{{.Names}}"]).stdout.split()
        if name in found
    ]
    sha = project.corral("policy", "hash").stdout.strip()
    assert project.corral("run", "--accept-policy", sha, "--", "echo", "ran").stdout == "ran\n"
    assert project.inside("echo", "again").stdout == "again\n"


@pytest.mark.representative
@pytest.mark.case(24)
def test_what_the_agent_adds_to_the_policy_is_applied_by_nobody_but_its_user(host: Host) -> None:
    host.internet.set_name(WIDE, [host.internet.addresses["forbidden"]])
    host.box.flush_dns()
    project = host.project("widened")
    waiting = project.start(
        "sh",
        "-c",
        f"{REWRITE}; touch up; while ! test -e go; do sleep 0.1; done; {' '.join(FETCH)}",
        marker="up",
    )
    # Neither a start beside it nor the session that wrote it gets the name.
    refused = project.inside(*FETCH, check=False)
    assert refused.returncode == 2
    assert f"+ reach {WIDE}:443" in refused.stderr
    assert "--accept-policy" in refused.stderr
    project.write("go", "")
    assert waiting.wait(timeout=60) != 0
    assert host.internet.packets(host.internet.addresses["forbidden"]) == 0
    # The control: with its user's word the name is there, and the same request arrives.
    sha = project.corral("policy", "hash").stdout.strip()
    done = project.corral("run", "--accept-policy", sha, "--", *FETCH, check=False)
    assert host.internet.packets(host.internet.addresses["forbidden"]) > 0, done.stderr


def test_a_terminal_is_asked_and_a_no_starts_nothing(host: Host) -> None:
    project = host.project("asked")
    project.policy(WIDER, approve=False)

    def answered(word: str) -> tuple[int, str]:
        done = project.box.run(
            ["script", "-qec", "corral run -- echo ran", "/dev/null"],
            cwd=project.path,
            check=False,
            timeout=60,
            input=f"{word}\n",
        )
        return done.returncode, done.stdout

    code, said = answered("n")
    assert code == 2
    assert f"+ reach {WIDE}:443" in said
    assert "allow that?" in said
    assert not RAN.search(said)
    assert project.corral("policy", "diff", check=False).returncode == 1
    code, said = answered("y")
    assert RAN.search(said) or code == 1, said  # the name may not answer; approved it is
    assert project.corral("policy", "diff").stdout == "the policy is approved as it is\n"
