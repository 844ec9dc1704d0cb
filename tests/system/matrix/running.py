"""The probes in a sandbox, in a container as `docker run` makes it, and in one that is given everything."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.system.host import BASE_POLICY, Host, Project
from tests.system.test_secrets import ENV_FILE, PLACES, SECRET, hits

HERE = Path(__file__).parent / "probe"
DOMAIN = "matrix.corral.example"
METADATA = ("169.254.169.254", "168.63.129.16", "100.100.100.200")
METADATA_SIX = "fd00:ec2::254"
PINGED = "203.0.113.99"
ALL_NODES = "ff02::1"
MARK = "corral-matrix-of-the-host"
HOST_FILE = f"/srv/{MARK}"
PORT, LOOPBACK_PORT = 8123, 8124
POLICY = BASE_POLICY + f"secrets:\n  env_file: {ENV_FILE}\n"
# On the host: what an agent must not reach. argv: an abstract name, a port everywhere, a port of the loopback.
SERVICES = """\
import socket, sys
hidden = socket.socket(socket.AF_UNIX); hidden.bind("\\0" + sys.argv[1]); hidden.listen(64)
everywhere = socket.create_server(("0.0.0.0", int(sys.argv[2])), backlog=64)
inside = socket.create_server(("127.0.0.1", int(sys.argv[3])), backlog=64)
print("ready", flush=True)
sys.stdin.read()
"""
# What the box itself filters: asked of root outside its filter, in its namespaces.
BY_ROOT = ("seccomp", "perf", "kexec", "file-handles")
EVERYTHING = (
    "--privileged",
    *("--network=host", "--pid=host", "--ipc=host", "--uts=host", "--cgroupns=host"),
    *("-v", "/run:/host/run:rslave", "-v", "/usr/bin:/host/bin"),
)
# For what is only seen in its configuration.
LOOSE = ("-p", f"127.0.0.1:{PORT + 10}:80", "--restart=always", "-e", f"API_KEY={SECRET}")


@dataclass(frozen=True)
class Answers:
    """What one probe said in each of the three."""

    sandbox: str
    plain: str
    everything: str


def run(host: Host) -> dict[str, Answers]:
    """Make every probe; by its name what it said."""
    host.box.write(ENV_FILE, f"API_KEY='{SECRET}'\n", mode=0o600)
    project = host.project("matrix", POLICY)
    project.inside("true", timeout=560)
    for file in HERE.glob("*.py"):
        project.write(f"probe/{file.name}", file.read_text())
    _a_program_with_the_bit(host, project)
    with _host_services(host) as pid:
        given = _given(host, project, pid)
        sandbox = _counted(host, lambda: _in_sandbox(project, given))
        loose = {**given, "prepare": True}
        plain = _counted(host, lambda: _in_container(host, project, loose))
        everything = _counted(host, lambda: _in_container(host, project, loose, *EVERYTHING))
        everything |= _as_root(host, project, given)
    answers = {name: Answers(sandbox[name], plain[name], everything[name]) for name in sandbox}
    return answers | _configured(host, project)


def _a_program_with_the_bit(host: Host, project: Project) -> None:
    script = 'cp /usr/bin/test "$1/as-root" && chmod 4755 "$1/as-root"'
    _docker(host, project, "sh", "-c", script, "sh", project.path)


def _image(host: Host) -> str:
    return host.box.run(["docker", "images", "-q", "corral/*"]).stdout.split()[0]


def _docker(host: Host, project: Project, *argv: str, options: tuple[str, ...] = ()) -> str:
    words = ["docker", "run", "--rm", "-u", "0:0", "-v", f"{project.path}:{project.path}", "-w", project.path]
    words += [*options, "--entrypoint", argv[0], _image(host), *argv[1:]]
    return host.box.run(words, timeout=300).stdout


@contextmanager
def _host_services(host: Host) -> Iterator[int]:
    """Yield the number that a process of the host has there."""
    host.root("touch", HOST_FILE)
    process: subprocess.Popen[Any] = host.box.popen(
        ["python3", "-c", SERVICES, MARK, str(PORT), str(LOOPBACK_PORT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield int(host.box.run(["pgrep", "-f", f"^python3 -c .*{MARK}"]).stdout.split()[0])
    finally:
        host.box.kill(process)
        host.root("rm", "-f", HOST_FILE)


def _given(host: Host, project: Project, pid: int) -> dict[str, Any]:
    network = project.sandbox["network"]
    shape = "{{(index .IPAM.Config 0).Gateway}}"
    gateways = [
        host.box.run(["docker", "network", "inspect", "-f", shape, name]).stdout.strip()
        for name in (network, "bridge")
    ]
    spaces = ("cgroup", "ipc", "mnt", "net", "pid", "uts", "user")
    links = host.root("readlink", *(f"/proc/1/ns/{name}" for name in spaces)).stdout.split()
    return {
        "uid": 1000,
        "pid": pid,
        "mark": MARK,
        "host_file": HOST_FILE,
        "namespaces": dict(zip(spaces, links, strict=True)),
        "project": project.path,
        "user_home": host.box.home,
        "set_id": f"{project.path}/as-root",
        "abstract": MARK,
        "metadata": METADATA,
        "metadata_six": METADATA_SIX,
        "forbidden": host.internet.addresses["forbidden"],
        "forbidden_six": host.internet.addresses["forbidden6"],
        "pinged": PINGED,
        "domain": DOMAIN,
        "resolvers": ["127.0.0.11", host.internet.addresses["resolver"], *gateways, host.box.address],
        "host_addresses": [*gateways, host.box.address],
        "host_port": PORT,
        "loopback_port": LOOPBACK_PORT,
    }


def _in_sandbox(project: Project, given: Mapping[str, Any]) -> dict[str, str]:
    return dict(json.loads(project.inside("python3", "-m", "probe", json.dumps(given), timeout=300).stdout))


def _in_container(host: Host, project: Project, given: Mapping[str, Any], *options: str) -> dict[str, str]:
    told = ("-e", f"API_KEY={SECRET}", *options)
    return dict(json.loads(_docker(host, project, "python3", "-m", "probe", json.dumps(given), options=told)))


def _as_root(host: Host, project: Project, given: Mapping[str, Any]) -> dict[str, str]:
    words = ["python3", "-m", "probe", json.dumps({**given, "only": BY_ROOT})]
    return dict(json.loads(host.box.run(words, user="root", cwd=project.path).stdout))


def _counted(host: Host, run: Any) -> dict[str, str]:
    """Run the probes, and say of what they sent whether it arrived at the far end."""
    host.internet.reset_counters()
    mark = host.internet.mark()
    answers: dict[str, str] = run()
    internet = host.internet
    arrived = {
        "metadata": sum(internet.packets(address) for address in METADATA),
        "metadata-six": internet.packets(METADATA_SIX),
        "forbidden": internet.packets(internet.addresses["forbidden"]),
        "forbidden-six": internet.packets(internet.addresses["forbidden6"]),
        "all-nodes": internet.packets(ALL_NODES),
        "ping": internet.packets(PINGED),
        "names": len([query for query in internet.queries(mark) if query.name.endswith(DOMAIN)]),
    }
    for name, count in arrived.items():
        what = "questions" if name == "names" else "packets"
        answers[name] += f"; {what} arrive" if count else f"; 0 {what}"
    return answers


def _configured(host: Host, project: Project) -> dict[str, Answers]:
    """What only the host sees: how the containers are configured, and where a secret lies."""
    project.start("sh", "-c", "touch up; sleep 300", marker="up")
    (sandbox,) = project.containers()
    words = ["docker", "run", "-d", *LOOSE, "--entrypoint", "sleep", _image(host), "300"]
    loose = host.box.run(words).stdout.strip()
    try:
        found = [_configuration(host, name) for name in (sandbox, loose)]
        return {name: Answers(answer, found[1][name], "") for name, answer in found[0].items()}
    finally:
        host.box.run(["docker", "rm", "-f", loose])


def _configuration(host: Host, container: str) -> dict[str, str]:
    (inspect,) = json.loads(host.box.run(["docker", "inspect", container]).stdout)
    config = inspect["HostConfig"]
    ports = [port for port, to in (inspect["NetworkSettings"]["Ports"] or {}).items() if to]
    names = {"container": container, "ident": inspect["Id"], "pid": str(inspect["State"]["Pid"])}
    places = {
        "inspect": f"docker inspect {container}",
        "arguments": PLACES["arguments"],
        "first process": PLACES["first process"],
        "Docker's files": f"grep -ras -e '' /var/lib/docker/containers/{inspect['Id']}",
    }
    secret = [place for place, count in hits(host, places, **names).items() if count]
    return {
        "published": ", ".join(ports) or "none",
        "restart": config["RestartPolicy"]["Name"] or "no",
        "processes-limit": "limited" if (config["PidsLimit"] or 0) > 0 else "unlimited",
        "bridge": "docker0" if "bridge" in inspect["NetworkSettings"]["Networks"] else "its own",
        "secret-outside": ", ".join(secret) or "nowhere",
    }
