"""`corral verify` as a whole: peers, order of commands, explanations, and an environment that is against it."""

from __future__ import annotations

import json
import re

import pytest

from .host import BASE_POLICY, EVERY_ENGINE, PYTHON, Host, Project
from .tamperbench import PEER_POLICY, peer, serving

HOSTILE = 'open("/tmp/hostile", "a").write(__file__ + "\\n")\n'


def rows(project: Project, check: bool = True) -> list[dict[str, str | None]]:
    done = project.corral("verify", "--json", check=check, timeout=400)
    return list(json.loads(done.stdout)["checks"])


def failures(found: list[dict[str, str | None]]) -> list[tuple[str | None, str | None, str | None]]:
    return [(row["check"], row["session"], row["detail"]) for row in found if row["status"] == "fail"]


@EVERY_ENGINE
@pytest.mark.representative
def test_every_other_running_sandbox_container_is_tried(host: Host) -> None:
    neighbour = peer(host, "neighbour")
    project = peer(host, "peers")
    addresses = {}
    for each in (neighbour, project):
        (session,) = each.sandbox["sessions"]
        addresses[session["name"]] = session["address"]
        # A listener is really there: the host's root reaches it.
        host.netadmin("curl", "-sS", "-m", "5", "-o", "/dev/null", f"http://{session['address']}:8080/")
    found = rows(project)
    assert failures(found) == []
    own = project.sandbox["sessions"][0]
    (other,) = set(addresses) - {own["name"]}
    tried = {(row["session"], row["check"]) for row in found if str(row["check"]).startswith("peer-")}
    assert tried == {
        (None, f"peer-unreachable:{own['name']}"),
        (None, f"peer-unreachable:{other}"),
        (own["session"], f"peer-unreachable:{other}"),
    }
    # Both of its own sandbox and of another one, from a container of each; nothing connects.
    script = f"for a in {' '.join(addresses.values())}; do curl -sS -m 3 http://$a:8080/ && echo reached; done; true"
    for each in (neighbour, project):
        done = each.inside("sh", "-c", script)
        assert "reached" not in done.stdout
        # Refused by the rules, or dropped between two ports of one bridge.
        assert len(re.findall(r"curl: \((?:7|28)\)", done.stderr)) == 2, done.stderr


@pytest.mark.representative
def test_explanations_need_neither_docker_nor_a_project(host: Host) -> None:
    nowhere = {"DOCKER_HOST": "unix:///nowhere.sock", "XDG_RUNTIME_DIR": "/nowhere"}
    words = ["corral", "verify", "--explain"]
    done = host.box.run([*words, "root-owned:/etc/hosts"], cwd="/", env=nowhere)
    assert done.stdout.startswith("root-owned:PATH\n")
    assert "fix:" in done.stdout
    shown = host.box.run([*words, "backstop@0a1b2c3d", "--json"], cwd="/", env=nowhere).stdout
    assert json.loads(shown)["name"] == "backstop"
    done = host.box.run([*words, "back-stop"], cwd="/", env=nowhere, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean: backstop" in done.stderr


def test_build_verify_and_run_each_render_anew_in_any_order(host: Host) -> None:
    project = host.project("order")
    commands = {
        "build": lambda: project.corral("build", timeout=400),
        "verify": lambda: project.corral("verify", timeout=400),
        "run": lambda: project.inside("true", timeout=400),
    }
    state = ""
    for number, name in enumerate(("verify", "build", "run", "verify", "run", "build", "verify")):
        marker = f"model-{number}"
        project.policy(
            BASE_POLICY + f"profile_options: {{opencode: {{config: {{model: corral/{marker}}}}}}}\n"
        )
        commands[name]()
        if not state:
            state = f"/home/dev/.local/share/corral/{project.sandbox['sandbox']}"
        config = "etc/opencode/opencode.json"
        assert marker in host.box.read(f"{state}/build/root/{config}"), name
        image = host.box.run(["docker", "images", "-q", f"corral/{state.rpartition('/')[2]}"]).stdout.split()[
            0
        ]
        command = ["docker", "run", "--rm", "--network", "none", "--entrypoint", "cat", image, f"/{config}"]
        assert marker in host.box.run(command).stdout, name
    # What somebody puts into the build directory is used by no command, and told by each.
    host.box.write(f"{state}/build/Dockerfile", "FROM scratch\n")
    for words in (["build"], ["verify"], ["run", "--", "true"]):
        done = project.corral(*words, check=False)
        assert done.returncode == 1
        assert "was tampered with" in done.stderr
        assert "changed: Dockerfile" in done.stderr
    host.box.run(["rm", "-r", f"{state}/build"])
    project.inside("true", timeout=400)


@EVERY_ENGINE
@pytest.mark.representative
def test_nothing_in_the_environment_or_the_directory_changes_what_the_checker_is(host: Host) -> None:
    project = host.project("hostile")
    project.inside("true", timeout=400)
    for name in (
        "sitecustomize.py",
        "usercustomize.py",
        "json.py",
        "os.py",
        "verify/__init__.py",
        "verify/main.py",
    ):
        project.write(name, HOSTILE)
    for name in ("python3", "env", "sh"):
        host.box.write(f"{project.path}/{name}", "#!/bin/bash\necho $0 >>/tmp/hostile\n", mode=0o755)
    image = host.box.run(["docker", "images", "-q", f"corral/{project.sandbox['sandbox']}"]).stdout.split()[0]
    settings = {
        "PATH": f"{project.path}:/usr/bin:/bin",
        "PYTHONPATH": project.path,
        "PYTHONSTARTUP": f"{project.path}/json.py",
        "PYTHONUSERBASE": project.path,
        "PYTHONINSPECT": "1",
        "PYTHONWARNINGS": "error",
        "PYTHONHASHSEED": "1",
        "BASH_ENV": f"{project.path}/sh",
        "ENV": f"{project.path}/sh",
    }
    command = ["docker", "run", "--rm", "--network", "none", "-u", host.engine.agent, "--entrypoint", "bash"]
    command += ["-v", f"{project.path}:{project.path}", "-w", project.path]
    for setting in settings.items():
        command += ["-e", "=".join(setting)]

    def said(program: str) -> list[str]:
        script = f": >/tmp/hostile; {program} </dev/null 2>&1 | tail -1; echo; cat /tmp/hostile"
        return host.box.run([*command, image, "-c", f"unset BASH_ENV; {script}"]).stdout.split("\n")

    result, *traces = said("/usr/local/bin/corral-verify '{\"colour\": 1}'")
    assert json.loads(result)["check"] == "expectations"
    assert not any(traces)
    # The same directory and environment do change a Python that does not guard itself.
    assert any("sitecustomize.py" in line for line in said("/usr/bin/python3 -c pass"))
    # And with all of it in the project, as a session and a verification have it:
    project.start("sh", "-c", "touch up; sleep 120", marker="up")
    assert failures(rows(project)) == []


@pytest.mark.parametrize("signal", ["STOP", "KILL"])
def test_an_agent_that_hinders_the_checker_is_told_of_in_bounded_time(host: Host, signal: str) -> None:
    project = host.project("hinder")
    script = f"touch up; while true; do pkill -{signal} -f [b]in/corral-verify; done"
    project.start("bash", "-c", script, marker="up")
    impatient = (
        "import sys; from corral import verify; verify.PATIENCE = 15; "
        "from corral.cli import main; sys.exit(main(['verify', '--json']))"
    )
    done = host.box.run([PYTHON, "-c", impatient], cwd=project.path, check=False, timeout=300)
    found = json.loads(done.stdout)["checks"]
    session = project.sandbox["sessions"][0]["session"]
    assert done.returncode == 1
    assert {(row["check"], row["session"]) for row in found if row["status"] == "fail"} == {
        ("checker", session)
    }
    # The container without an agent in it has its say all the same.
    assert sum(row["status"] == "ok" and row["session"] is None for row in found) > 30


@EVERY_ENGINE
def test_a_policy_with_everything_passes_in_a_running_session(host: Host) -> None:
    notes = f"{host.box.home}/notes-verify"
    host.box.run(["mkdir", "-p", notes])
    policy = PEER_POLICY + f"mounts: {{ro: [{notes}]}}\nhost_services:\n  - {{name: llama, port: 8081}}\n"
    project = host.project("everything", policy)
    with serving(host, 8081):
        project.start("sh", "-c", "touch up; sleep 120", marker="up")
        found = rows(project)
    assert failures(found) == []
    session = project.sandbox["sessions"][0]["session"]
    inside = {row["check"] for row in found if row["session"] is None} - {"gate", "session-ready"}
    inside -= {"skeleton-in-path", "backstop"}
    of_session = {row["check"] for row in found if row["session"] == session}
    assert of_session == {name for name in inside if not str(name).startswith("peer-")} | {"session-policy"}


ASKED = ("proxy-answers", "proxy-denies", "proxy-permits", "proxy-checks-sni", "proxy-is-the-only-way")
THROUGH_THE_PROXY = """\
profile: opencode
limits:
  best_effort: true
egress:
  mode: proxy
  profile_defaults: false
  allow:
    - allowed1.corral.example
    - "*.zone.corral.example"
"""
BY_HAND = "forbidden.corral.example"
STREAMS = (
    "touch up; while [ ! -e go ]; do sleep 0.1; done; "
    f"curl -skN --max-time 300 'https://{BY_HAND}/stream?interval=0.1&count=3000' >got; echo $? >code"
)


@EVERY_ENGINE
@pytest.mark.representative
def test_a_proxy_is_verified_beside_a_session_that_uses_it_and_nothing_is_taken_from_that(host: Host) -> None:
    project = host.project("asked", THROUGH_THE_PROXY)
    found = rows(project)
    assert failures(found) == []
    told = {str(row["check"]): row["status"] for row in found}
    assert {name: told[name] for name in (*ASKED, "proxy-elements") if told[name] != "ok"} == {}
    project.start("sh", "-c", STREAMS, marker="up")
    in_session = rows(project)
    assert failures(in_session) == []
    assert {row["check"] for row in in_session if row["session"]} >= set(ASKED)
    # What was allowed by hand is in no policy that `corral verify` starts a container with.
    project.corral("allow", BY_HAND, "--for", "1h")
    project.write("go", "")

    def size() -> int:
        return len(project.read("got")) if project.exists("got") else 0

    host.box.wait_for(lambda: size() > 0, timeout=30)
    beside = rows(project, check=False)
    assert failures(beside) == []
    before = size()
    host.box.wait_for(lambda: size() > before, timeout=30)
    assert not project.exists("code")
    # It was looked at meanwhile: what is open for that name is closed to the session itself.
    only = [str(row["detail"]) for row in beside if row["check"] == "proxy-is-the-only-way"]
    assert len(only) == 2
    assert all(host.internet.addresses["forbidden"] in detail for detail in only)
