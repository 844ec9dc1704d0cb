"""A secret is in the environment of the program that was started, and nowhere else that anybody can look."""

from __future__ import annotations

import base64
import json
import urllib.parse
from functools import reduce

import pytest

from .host import BASE_POLICY, Host, Project

SECRET = "s3cr3t/välue+with=signs&more 7c1f9d"
ENV_FILE = "/home/dev/.config/corral/grep.env"
POLICY = BASE_POLICY + f"secrets:\n  env_file: {ENV_FILE}\n"


def spellings() -> list[str]:
    """The secret as it is, as a URL and JSON have it, and the part of its base64 that its place does not change."""
    raw = SECRET.encode()
    coded = [base64.b64encode(b"x" * shift + raw).decode()[4:-4] for shift in range(3)]
    plain = [SECRET, urllib.parse.quote(SECRET), urllib.parse.quote_plus(SECRET), json.dumps(SECRET)[1:-1]]
    return [*dict.fromkeys([*plain, *coded])]


# Where it is looked for: everything Docker says and keeps, every process that is not the sandbox's, every log.
PLACES = {
    "inspect": "docker ps -aq | xargs -r docker inspect; docker images -q | xargs -r docker inspect",
    "exec env": "docker exec {container} env",
    "history": "docker images -q 'corral/*' | xargs -rn1 docker history --no-trunc",
    "arguments": "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'",
    "environments": (
        "for p in /proc/[0-9]*; do grep -q '{ident}' $p/cgroup 2>/dev/null || cat $p/environ 2>/dev/null; done | tr '\\0' '\\n'"
    ),
    "first process": "cat /proc/{pid}/environ | tr '\\0' '\\n'",
    "journal": "journalctl --no-pager -o json --since '1 hour ago'",
    "container log": "docker logs {container} 2>&1",
    "Docker's files": "grep -ras -e '' /var/lib/docker/containers /var/lib/docker/image 2>/dev/null",
    "image layers": "docker save $(docker images -q 'corral/*' | head -1) | tar -xO",
    "build cache": "cat /home/dev/.local/share/corral/*/build.log; grep -ras -e '' /home/dev/.local/share/corral/*/build",
    "session files": "grep -ras -e '' /home/dev/.local/share/corral/*/sessions",
    "enforcer's files": "grep -ras -e '' /run/user/1000/corral /run/corral 2>/dev/null; true",
}


def hits(host: Host, places: dict[str, str], **names: str) -> dict[str, int]:
    host.box.write("/home/dev/spellings", "\n".join(spellings()) + "\n")
    found = {}
    for place, template in places.items():
        command = reduce(lambda text, name: text.replace("{" + name + "}", names[name]), names, template)
        script = (
            f"{{ {command}; }} 2>/dev/null | grep -acFf /home/dev/spellings; test ${{PIPESTATUS[1]}} -le 1"
        )
        found[place] = int(host.shell(f"set +e; {script}", user="root", timeout=120).stdout.split()[0])
    return found


@pytest.fixture
def project(host: Host) -> Project:
    host.box.write(ENV_FILE, f"API_KEY='{SECRET}'\n", mode=0o600)
    return host.project("grep", POLICY)


@pytest.mark.representative
def test_a_secret_is_found_nowhere_but_in_the_program(host: Host, project: Project) -> None:
    project.start("sh", "-c", 'test -n "$API_KEY" && touch up; echo "$$" > pid; sleep 120', marker="up")
    (container,) = project.containers()
    ident = host.root("docker", "inspect", "-f", "{{.Id}}", container).stdout.strip()
    pid = host.root("docker", "inspect", "-f", "{{.State.Pid}}", container).stdout.strip()
    names = {"container": container, "ident": ident, "pid": pid}
    # The control: the program has it, and this is how it would be found.
    inside = f"for p in /proc/[0-9]*; do grep -q '{ident}' $p/cgroup 2>/dev/null && cat $p/environ; done | tr '\\0' '\\n'"
    assert hits(host, {"sandbox": inside}, **names)["sandbox"] > 0
    found = hits(host, PLACES, **names)
    assert found == dict.fromkeys(PLACES, 0)


def test_every_kind_of_session_gets_it_and_a_second_reader_nothing(host: Host, project: Project) -> None:
    look = 'printf %s "$API_KEY" | base64 -w0; echo; env | grep -c CORRAL_SECRETS; ls -A ~ | grep -c corral-secrets'
    for command in (["run", "--", "sh", "-c", look], ["run", "--", "bash", "-c", look]):
        done = project.corral(*command, check=False)
        assert done.stdout.split() == [base64.b64encode(SECRET.encode()).decode(), "0", "0"]
    shell = project.box.run(["corral", "shell"], cwd=project.path, check=False, timeout=60, input=f"{look}\n")
    assert base64.b64encode(SECRET.encode()).decode() in shell.stdout
    reader = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/home/agent/.corral-secrets')"
    assert "No such file" in project.inside("python3", "-c", reader, check=False).stderr
    assert project.corral("verify", check=False).returncode == 0
