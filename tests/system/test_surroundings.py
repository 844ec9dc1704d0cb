"""Commands wherever and however they are called: environments, directories, names, and two users of one engine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

import pytest

from .host import BASE_POLICY, Host, Project, until
from .test_leaving import Eve

ENVIRONMENTS = {
    "one column": "env COLUMNS=1",
    "no terminal type": "env -u TERM",
    "no home": "env -u HOME",
    "nothing": 'env -i PATH="$PATH" XDG_RUNTIME_DIR="$XDG_RUNTIME_DIR"',
}


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_a_session_works_in_an_odd_environment(host: Host, environment: str) -> None:
    project = host.project("odd-session")
    script = f'{ENVIRONMENTS[environment]} "$(command -v corral)" run -- sh -c \'echo "$HOME $TERM"; exit 7\''
    done = host.shell(f"cd {project.path}; {script}", check=False, timeout=300)
    assert (done.returncode, done.stdout.split()[:1]) == (7, ["/home/agent"]), done.stderr
    within = host.shell(
        f"cd {project.path}; script -qec {shlex.quote(script)} /dev/null", check=False, timeout=120
    )
    assert within.returncode == 7, within.stdout


def place(host: Host, directory: str) -> Project:
    """Make a project in a directory of any name, and approve its policy."""
    made = Project(host.box, directory)
    host.shell(f"mkdir -p {shlex.quote(directory)}")
    made.policy(BASE_POLICY)
    host.projects.append(made)
    return made


@pytest.mark.parametrize(
    "name",
    [
        "with space",
        " leading",
        "ünïcode 日本",
        "-dash",
        "quote'\"$x`y`",
        "per%cent",
        "back\\slash",
        "comma,colon:equals=",
        "x" * 255,
    ],
    ids=[
        "space",
        "leading",
        "unicode",
        "dash",
        "quotes",
        "percent",
        "backslash",
        "comma",
        "long",
    ],
)
def test_a_project_may_be_anywhere(host: Host, name: str) -> None:
    project = place(host, f"{host.box.home}/Projects/{name}")
    done = project.corral("run", "--", "sh", "-c", "pwd; echo made >new", check=False, timeout=300)
    assert (done.returncode, done.stdout) == (0, f"{project.path}\n"), done.stderr
    assert project.read("new") == "made\n"
    for command in ("ps", "df", "status", "render", "inspect --json", "down"):
        done = project.corral(*command.split(), check=False)
        assert "Traceback" not in done.stderr and "internal error" not in done.stderr, command
        assert done.returncode == (1 if command.startswith("inspect") else 0), (command, done.stderr)


@pytest.mark.parametrize("name", ["two\nlines", "a\u202eb", "bell\a"], ids=["newline", "direction", "bell"])
def test_a_path_with_what_does_not_print_is_refused(host: Host, name: str) -> None:
    directory = f"{host.box.home}/Projects/{name}"
    host.shell(f"mkdir -p {shlex.quote(directory)}")
    project = Project(host.box, directory)
    project.policy(BASE_POLICY)
    try:
        for command in ("run", "build", "verify"):
            done = project.corral(command, check=False)
            assert (done.returncode, "control character" in done.stderr) == (2, True), done.stderr
    finally:
        host.box.run(["rm", "-rf", directory])


def test_a_link_to_a_project_is_the_project(host: Host) -> None:
    project = host.project("real")
    link = f"{host.box.home}/Projects/linked"
    host.box.run(["ln", "-sfn", project.path, link])
    try:
        through = Project(host.box, link)
        assert through.corral("run", "--", "pwd", timeout=300).stdout == f"{project.path}\n"
        assert through.corral("policy", "hash").stdout == project.corral("policy", "hash").stdout
    finally:
        host.box.run(["rm", "-f", link])


def test_a_project_may_be_on_a_file_system_of_its_own(host: Host) -> None:
    directory = f"{host.box.home}/Projects/memory"
    host.shell(
        f"mkdir -p {directory}; mount -t tmpfs -o size=4m,uid=1000,gid=1000 memory {directory}", user="root"
    )
    try:
        project = place(host, directory)
        done = project.corral(
            "run", "--", "sh", "-c", "echo made >new; df --output=fstype . | tail -1", timeout=300
        )
        assert done.stdout.strip() == "tmpfs"
        assert project.read("new") == "made\n"
        project.corral("down")
    finally:
        host.root("umount", "-l", directory, check=False)


def test_names_that_are_too_long_are_refused_with_exit_2(host: Host) -> None:
    project = host.project("names")
    for words in (
        ("run", "--name", "x" * 300, "--", "true"),
        ("deny", "x" * 300 + ".example"),
        ("down", "x" * 300),
        ("policy", "check", "x" * 300),
        ("verify", "--explain", "x" * 300),
    ):
        done = project.corral(*words, check=False)
        assert done.returncode == 2 and "Traceback" not in done.stderr, (words, done.stderr)
        assert done.stderr and len(done.stderr) < 1500, words
    # The policy's own name may be longer, see test_a_name_of_three_hundred_characters_is_a_sandbox.
    project.policy(f"name: {'x' * 513}\n{BASE_POLICY}", approve=False)
    done = project.corral("run", "--", "true", check=False)
    assert done.returncode == 2 and "corral.yaml:1" in done.stderr and "512" in done.stderr, done.stderr
    assert project.containers() == []


@pytest.fixture
def eve(host: Host) -> Iterator[Eve]:
    made = Eve(host.box)
    made.arrive()
    try:
        yield made
    finally:
        made.leave()


def test_a_user_sees_and_ends_nothing_of_another(host: Host, eve: Eve) -> None:
    project = host.project("hers")
    process = project.start("sh", "-c", "touch up; sleep 600", marker="up")
    row = project.sandbox
    sandbox, session = row["sandbox"], row["sessions"][0]["session"]
    (container,) = project.containers()
    images = host.box.run(["docker", "images", "-q", "corral/hers-*"]).stdout
    eve.run("corral", "install", "--yes", timeout=300)
    until(lambda: eve.run("corral", "status", "--json", check=False).returncode == 0, 30, "her service runs")
    assert json.loads(eve.run("corral", "status", "--json").stdout)["sandboxes"] == []
    assert json.loads(eve.run("corral", "ps", "--json").stdout)["sessions"] == []
    assert json.loads(eve.run("corral", "df", "--json").stdout)["sandboxes"][1:] == []
    for words in (
        ("attach", session, "--sandbox", sandbox),
        ("logs", session, "--sandbox", sandbox),
        ("inspect", session, "--sandbox", sandbox),
        ("deny", "allowed1.corral.example", "--sandbox", sandbox),
    ):
        done = eve.run("corral", *words, check=False, cwd=eve.path)
        assert done.returncode == 1, (words, done.stdout)
        assert project.path not in done.stdout + done.stderr, words
    found = json.loads(eve.run("corral", "prune", "--running", "--images", "--json", "--yes").stdout)
    assert not any("hers" in thing["name"] for thing in found["removed"]), found
    for words in (("down", sandbox), ("down", sandbox, "--purge", "--yes")):
        eve.run("corral", *words, check=False, cwd=eve.path)
    assert project.containers() == [container]
    assert host.box.run(["docker", "images", "-q", "corral/hers-*"]).stdout == images
    networks = host.box.run(["docker", "network", "ls", "--format", "{{.Name}}"]).stdout.split()
    assert row["network"] in networks
    assert process.poll() is None
    host.box.run(["docker", "exec", container, "true"])
