"""The session that a user is shown first, line by line, at a real terminal."""

from __future__ import annotations

import json
import re

import pytest

from .host import BASE_POLICY, Host
from .tamperbench import serving

pytestmark = pytest.mark.representative

# Types lines into a program at a terminal, each when the prompt is there; prints what was answered and the exit code.
TYPIST = """\
import fcntl, json, os, pty, re, select, struct, sys, termios, time
lines, argv = json.loads(sys.argv[1]), sys.argv[2:]
pid, terminal = pty.fork()
if pid == 0:
    os.execvp(argv[0], argv)
# Wide enough that no line is broken by the shell.
fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 400, 0, 0))
def until_prompt():
    data, end = b"", time.monotonic() + 180
    while True:
        plain = re.sub(rb"\\x1b\\[[0-9;?]*[A-Za-z]|\\x1b\\][^\\x07]*\\x07|\\r", b"", data)
        if re.search(rb"(^|\\n)agent@main:[^\\n]*\\$ $", plain):
            return plain.rpartition(b"\\n")[0].decode()
        assert time.monotonic() < end, data
        if select.select([terminal], [], [], 1)[0]:
            data += os.read(terminal, 65536)
said = [until_prompt()]
for line in lines:
    os.write(terminal, line.encode() + b"\\n")
    said.append(until_prompt().partition("\\n")[2])
os.write(terminal, b"exit\\n")
try:
    while os.read(terminal, 65536):
        pass
except OSError:
    pass
print(json.dumps({"said": said, "code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}))
"""


def typed(host: Host, directory: str, *lines: str) -> tuple[list[str], list[str], int]:
    """What a shell in the sandbox says before its first prompt and to each line, and its exit code."""
    done = host.box.run(
        ["python3", "-c", TYPIST, json.dumps(lines), "corral", "shell"],
        cwd=directory,
        env={"TERM": "xterm"},
        timeout=300,
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    first, *rest = answer["said"]
    return first.splitlines(), rest, answer["code"]


def test_the_demo_session_line_by_line(host: Host) -> None:
    host.internet.set_name("allowed1.corral.example", ["203.0.113.10", "203.0.113.11"])
    host.internet.set_name("control.corral.example", ["203.0.113.40"])
    host.box.flush_dns()
    project = host.project("demo", BASE_POLICY + "host_services:\n  - {name: llama, port: 8081}\n")
    # The name is there for the host, so that its absence in the sandbox means something.
    assert host.box.run(["getent", "hosts", "control.corral.example"]).stdout
    with serving(host, 8081):
        project.corral("build", timeout=400)
        mark = host.internet.mark()
        first, answers, code = typed(
            host,
            project.path,
            "id",
            f"ls -A {host.box.home}",
            "ls ~/.ssh",
            "curl -sS -m 4 https://example.com",
            "getent hosts allowed1.corral.example",
            "getent hosts control.corral.example; echo exit=$?",
            'env | grep -ciE "key|token|secret"',
            "curl -sS -m 4 -o /dev/null -w '%{http_code}\\n' http://corral-host:8081/",
        )
        asked = {query.name for query in host.internet.queries(mark)}
        verified = project.corral("verify")
    told = [line for line in first if line.startswith("corral-firewall: ")]
    assert re.fullmatch(
        r"corral-firewall: pinned allowed1\.corral\.example -> 203\.0\.113\.1[01] 203\.0\.113\.1[01]", told[0]
    )
    assert told[1] == "corral-firewall: pinned allowed2.corral.example -> 203.0.113.20"
    assert told[2:4] == ["corral-firewall: OK: unlisted host blocked", "corral-firewall: OK: DNS closed"]
    assert re.fullmatch(
        r"corral-firewall: OK: allowlisted host allowed1\.corral\.example \(203\.0\.113\.1[01]\) reachable",
        told[4],
    )
    assert told[5:] == [
        "corral-firewall: OK: allowlisted host allowed2.corral.example (203.0.113.20) reachable",
        "corral-firewall: OK: host service 8081 reachable",
        "corral-firewall: egress policy applied",
    ]
    ids, home, ssh, curl, allowed, unlisted, secrets, service = answers
    assert ids == "uid=1000(agent) gid=1000(agent) groups=1000(agent)"
    assert home == "Projects"
    assert ssh == "ls: cannot access '/home/agent/.ssh': No such file or directory"
    assert curl == "curl: (6) Could not resolve host: example.com"
    assert {tuple(line.split()) for line in allowed.splitlines()} == {
        ("203.0.113.10", "allowed1.corral.example"),
        ("203.0.113.11", "allowed1.corral.example"),
    }
    assert unlisted == "exit=2"
    assert secrets == "0"
    assert service == "200"
    assert code == 0
    # Nobody outside was asked for a name the policy does not have.
    assert asked <= {"allowed1.corral.example", "allowed2.corral.example"}
    lines = verified.stdout.splitlines()
    assert {line.split()[0] for line in lines[:-1]} <= {"ok", "skip"}, verified.stdout
    counted = sum(line.startswith("ok ") for line in lines)
    assert lines[-1] == f"{counted} passed, {len(lines) - 1 - counted} skipped, 0 failed"
    assert counted > 35


def test_a_secret_is_seen_when_the_policy_has_one(host: Host) -> None:
    """The positive control of the count of 0."""
    host.box.write("/home/dev/.config/corral/demo.env", "API_KEY=value\n", mode=0o600)
    project = host.project("demo-control", BASE_POLICY + "secrets:\n  env_file: ~/.config/corral/demo.env\n")
    done = project.inside("sh", "-c", 'env | grep -ciE "key|token|secret"', timeout=400)
    assert done.stdout.strip() == "1"
