"""The job of docs/ci.md, as it stands there, without a terminal."""

from __future__ import annotations

import json
import re

from tests.lab.product import PROJECT

from .host import BASE_POLICY, Host

POLICY = BASE_POLICY + "secrets:\n  env_file: ~/.config/corral/ci.env\n"
KEY = "hunter2-hunter2"


def job() -> str:
    found = re.search(r"^```sh\n(.*?)^```$", (PROJECT / "docs" / "ci.md").read_text(), re.M | re.S)
    assert found
    return found[1]


def test_the_job_of_the_page_runs_and_stops_at_a_wider_policy(host: Host) -> None:
    project = host.project("ci")
    project.policy(POLICY, approve=False)
    project.corral("policy", "hash", check=False)
    host.box.write("/home/dev/.config/corral/ci.env", "API_KEY=x\n", mode=0o600)
    sha = project.corral("policy", "hash").stdout.strip()
    host.box.run(["rm", "/home/dev/.config/corral/ci.env"])
    environment = {"POLICY": sha, "API_KEY": KEY, "TERM": ""}
    done = host.box.run(["sh", "-c", job()], cwd=project.path, env=environment, timeout=400, input="")
    assert project.read("result.txt") == "done\n"
    assert json.loads(project.read("verify.json"))
    assert KEY not in done.stdout + done.stderr + project.read("verify.json")
    assert project.containers() == []
    # A pull request that allows more, and the same hash.
    project.policy(POLICY.replace("  allow:\n", "  allow:\n    - allowed3.corral.example\n"), approve=False)
    host.box.run(["rm", f"{project.path}/result.txt"])
    done = host.box.run(
        ["sh", "-c", job()], cwd=project.path, env=environment, timeout=400, input="", check=False
    )
    assert done.returncode == 2
    assert not project.exists("result.txt")
