"""The command line in the box: exit codes, refusals, terminals, and what the installation leaves on the host."""

from __future__ import annotations

import json
import stat

import pytest

from .host import BASE_POLICY, Host

pytestmark = pytest.mark.representative


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            BASE_POLICY + "mounts:\n  rw:\n    - ~\n",
            "corral: policy error: refusing to mount your home directory (/home/dev)",
        ),
        (BASE_POLICY + "    - 203.0.113.10\n", "203.0.113.10"),
        (BASE_POLICY + "colour: red\n", "colour"),
    ],
    ids=["home", "address", "unknown-key"],
)
@pytest.mark.parametrize("command", ["run", "build", "verify", "shell"])
def test_an_invalid_policy_is_exit_2_and_creates_nothing(
    host: Host, policy: str, message: str, command: str
) -> None:
    project = host.project("invalid", policy)

    def world() -> list[str]:
        # Images of one second come in any order.
        listed = "docker ps -aq; docker network ls -q; docker images -q; ls ~/.local/share/corral 2>/dev/null || true"
        return sorted(host.shell(listed).stdout.splitlines())

    before = world()
    done = project.corral(command, check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "corral.yaml" in done.stderr or "home directory" in done.stderr
    assert world() == before


def test_the_agents_exit_code_is_passed_through(host: Host) -> None:
    project = host.project("codes")
    for code in (0, 1, 2, 7, 130):
        assert project.inside("sh", "-c", f"exit {code}", check=False).returncode == code
    assert project.inside("no-such-program", check=False).returncode == 127
    assert project.containers() == []


def test_pipes_pass_through_without_a_terminal(host: Host) -> None:
    project = host.project("pipes")
    text = "".join(f"line {number}\n" for number in range(5000))
    done = project.inside("sh", "-c", "tr a-z A-Z; echo to-stderr >&2", input=text)
    assert done.stdout == text.upper()
    assert "to-stderr" in done.stderr
    assert "to-stderr" not in done.stdout


def test_a_terminal_is_a_real_one(host: Host) -> None:
    project = host.project("terminal")
    command = "stty rows 41 cols 123; corral run -- sh -c 'stty size; test -t 0 && test -t 1 && echo terminal; exit 5'"
    done = project.box.run(
        ["script", "-qec", command, "/dev/null"], cwd=project.path, check=False, timeout=60
    )
    assert "41 123" in done.stdout
    assert "terminal" in done.stdout
    assert done.returncode == 5


def test_files_belong_to_the_user_and_the_home_shows_only_the_project(host: Host) -> None:
    project = host.project("files")
    done = project.inside(
        "sh", "-c", f"id -u; id -un; echo made > new; ls -A {host.box.home}; ls -A {host.box.home}/Projects"
    )
    assert done.stdout.split() == ["1000", "agent", "Projects", "files"]
    assert host.box.run(["stat", "-c", "%U:%G", f"{project.path}/new"]).stdout.strip() == "dev:dev"


def test_shell_reads_its_commands_from_a_pipe(host: Host) -> None:
    project = host.project("shell")
    done = project.corral("shell", input="id -un\nexit 3\n", check=False)
    assert done.stdout.strip() == "agent"
    assert done.returncode == 3


def test_verify_passes_and_prints_one_line_a_check(host: Host) -> None:
    server = host.box.popen(["python3", "-m", "http.server", "8081", "--bind", "127.0.0.1"])
    try:
        project = host.project("verify", BASE_POLICY + "host_services:\n  - {name: llama, port: 8081}\n")
        done = project.corral("verify")
    finally:
        host.box.kill(server)
    lines = done.stdout.splitlines()
    names = {line.split()[1] for line in lines[:-1]}
    assert {
        "non-root", "uid-matches-host", "no-sudo", "no-capabilities", "host-home-only-mounts", "mounts-equal-policy",
        "no-docker-socket:/var/run/docker.sock", "no-docker-socket:/run/docker.sock", f"rw-writable:{project.path}",
        "unlisted-host-blocked", "dns-closed", "embedded-dns-closed", "ipv6-disabled", "no-ipv6-address",
        "host-service:8081", "live-rules", "skeleton-in-path", "backstop",
    } <= names  # fmt: skip
    others = [line for line in lines[:-1] if not line.startswith("ok ")]
    # The box may be without controllers (see BASE_POLICY).
    assert [line.split(":")[0] for line in others] in (
        ["skip env-file-not-mounted"],
        ["skip env-file-not-mounted", "skip limits"],
    ), done.stdout
    assert lines[-1] == f"{len(lines) - 1 - len(others)} passed, {len(others)} skipped, 0 failed"


@pytest.mark.parametrize(
    ("tamper", "told"),
    [("add", "203.0.113.66"), ("del", "203.0.113.10")],
    ids=["element-added", "element-missing"],
)
def test_verify_names_an_element_that_differs(host: Host, tamper: str, told: str) -> None:
    project = host.project("tamper")
    process = project.start("sh", "-c", "touch up; sleep 120", marker="up")
    address = project.sandbox["sessions"][0]["address"]
    # Over and over: whatever the service mends, the next moment it differs again.
    element = f"{address},tcp:443,{told}"
    loop = f"while true; do ipset -exist {tamper} corral-pins {element} 2>/dev/null; done"
    vandal = host.box.popen(["sh", "-c", loop], user="root")
    try:
        done = project.corral("verify", check=False)
    finally:
        host.box.kill(vandal)
    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert any("live-rules" in line for line in failed), done.stdout
    assert all(told in line for line in failed), done.stdout
    host.box.kill(process)


def test_status_shows_permitted_ranges_and_names(host: Host) -> None:
    project = host.project("status")
    process = project.start("sh", "-c", "touch up; sleep 60", marker="up")
    plain = project.corral("status").stdout
    assert "203.0.113.0/24" in plain
    assert "allowed1.corral.example" in plain
    shown = project.box.run(
        ["script", "-qec", "corral status", "/dev/null"], cwd=project.path, env={"TERM": "xterm"}
    ).stdout
    red = [line for line in shown.splitlines() if "\x1b[31m" in line or "\x1b[1;31m" in line]
    assert any("203.0.113.0/24" in line for line in red)
    assert json.loads(project.corral("status", "--json").stdout)["permit_ranges"] == ["203.0.113.0/24"]
    host.box.kill(process)


def test_down_removes_containers_and_network_and_is_content_with_nothing(host: Host) -> None:
    project = host.project("down")
    project.start("sh", "-c", "touch up; sleep 60", marker="up")
    network = project.sandbox["network"]
    project.corral("down")
    assert project.containers() == []
    assert network not in host.box.run(["docker", "network", "ls", "--format", "{{.Name}}"]).stdout.split()
    assert project.corral("down").returncode == 0


def test_the_container_holds_no_capability_and_no_secret_in_its_command_line(host: Host) -> None:
    project = host.project("secrets", BASE_POLICY + "secrets:\n  env_file: ~/.config/corral/secrets.env\n")
    host.box.write("/home/dev/.config/corral/secrets.env", "API_KEY=s3cr3t-value-42\n", mode=0o600)
    process = project.start("sh", "-c", 'test "${#API_KEY}" = 15 && touch up; sleep 60', marker="up")
    container = project.containers()[0]
    inspect = json.loads(host.box.run(["docker", "inspect", container]).stdout)[0]
    assert inspect["HostConfig"]["CapDrop"] == ["ALL"]
    assert not inspect["HostConfig"]["CapAdd"]
    assert inspect["HostConfig"]["SecurityOpt"] == ["no-new-privileges"]
    assert "s3cr3t" not in json.dumps(inspect["Config"]["Labels"]) + json.dumps(inspect["Config"]["Cmd"])
    lines = host.root("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout
    assert "s3cr3t" not in lines
    host.box.kill(process)


def test_nothing_the_running_writer_uses_can_be_written_by_another_than_root(host: Host) -> None:
    pid = host.root("systemctl", "show", "-P", "MainPID", "corral-netfilter").stdout.strip()
    argv = host.root("sh", "-c", f"tr '\\0' '\\n' < /proc/{pid}/cmdline").stdout.split("\n")[:-1]
    executable = host.root("readlink", f"/proc/{pid}/exe").stdout.strip()
    mapped = host.root(
        "sh", "-c", f"awk '$6 ~ /^\\// {{print $6}}' /proc/{pid}/maps | sort -u"
    ).stdout.split()
    launcher = argv[-2]
    path = host.root(
        argv[0], "-I", "-S", "-c",
        "import re,sys; exec('\\n'.join(open(sys.argv[1]).read().splitlines()[:2])); print('\\n'.join(sys.path))",
        launcher,
    ).stdout.split()  # fmt: skip
    assert any(part.startswith("/opt/corral/") for part in path)
    assert not any("/home/" in part or "dist-packages" in part for part in path)
    units = ["corral-netfilter.service", "corral-netfilter.socket", "corral-skeleton.service"]
    places = [executable, *(word for word in argv if word.startswith("/")), *mapped, *path]
    places += [f"/etc/systemd/system/{unit}" for unit in units]
    code = (
        "import os,sys,stat,json\n"
        "bad=[]\n"
        "def look(p):\n"
        "  try: s=os.stat(p)\n"
        "  except FileNotFoundError: return\n"
        "  if s.st_uid or (s.st_mode & 0o022 and not s.st_mode & stat.S_ISVTX): bad.append(p)\n"
        "for place in json.load(sys.stdin):\n"
        "  p=os.path.realpath(place)\n"
        "  while p!='/':\n    look(p); p=os.path.dirname(p)\n"
        "  for d,_,names in os.walk(os.path.realpath(place)):\n    [look(os.path.join(d,n)) for n in names+['.']]\n"
        "print(json.dumps(bad))"
    )
    assert stat.S_ISVTX
    found = host.root("python3", "-c", code, input=json.dumps(places)).stdout
    assert json.loads(found) == []
    status = host.root("cat", f"/proc/{pid}/status").stdout
    assert "CapEff:\t0000000000003000" in status
    assert status.split("Uid:")[1].split()[0] != "0"


def test_a_second_installation_changes_nothing_that_runs(host: Host) -> None:
    project = host.project("again")
    process = project.start("sh", "-c", "touch up; sleep 120", marker="up")
    before = host.root("sh", "-c", "ls /opt/corral; ls /etc/systemd/system/corral*").stdout
    host.box.run(["corral", "install"], timeout=180)
    host.wait_enforcer()
    assert host.root("sh", "-c", "ls /opt/corral; ls /etc/systemd/system/corral*").stdout == before
    host.box.wait_for(lambda: project.sandbox["sessions"][0]["state"] == "running", timeout=20)
    assert process.poll() is None
    host.box.kill(process)
