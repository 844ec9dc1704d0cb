from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent_image.archive import executable
from agent_image.files.entrypoint import main as entrypoint
from tests.unit.agent_image.container import STATUS


def status(**fields: str) -> dict[str, str]:
    return {name: value for name, value in {**STATUS, **fields}.items() if value}


def test_status_of_this_kernel_is_understood() -> None:
    found = entrypoint.parse_status(Path("/proc/self/status").read_text())
    assert found["Uid"].split()[0] == str(os.getuid())
    assert set(entrypoint.CAPABILITY_SETS) | {"NoNewPrivs"} <= set(found)


def test_container_as_corral_makes_it_is_accepted() -> None:
    assert entrypoint.refusal(status()) is None


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"Uid": "0\t0\t0\t0"}, "root"),
        ({"Uid": "1000\t1000\t0\t1000"}, "root"),
        ({"Uid": ""}, "root"),
        ({"Gid": "0\t0\t0\t0"}, "root"),
        ({"CapBnd": "00000000a80425fb"}, "CapBnd"),
        ({"CapEff": "0000000000000001"}, "CapEff"),
        ({"CapPrm": "1000000000000000"}, "CapPrm"),
        ({"CapInh": "0000000000003000"}, "CapInh"),
        ({"CapAmb": "0000000000003000"}, "CapAmb"),
        ({"CapEff": ""}, "CapEff"),
        ({"NoNewPrivs": "0"}, "NoNewPrivs"),
        ({"NoNewPrivs": ""}, "NoNewPrivs"),
    ],
)
def test_any_other_container_is_refused(fields: dict[str, str], word: str) -> None:
    assert word in str(entrypoint.refusal(status(**fields)))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file"), 127),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory"), 127),
        (PermissionError(errno.EACCES, "Permission denied"), 126),
        (OSError(errno.ENOEXEC, "Exec format error"), 126),
        (OSError(errno.E2BIG, "Argument list too long"), 126),
    ],
)
def test_exit_code_and_message_of_what_cannot_be_started(error: OSError, code: int) -> None:
    def execute(program: str, argv: list[str]) -> None:
        assert (program, argv) == ("tool", ["tool", "-x"])
        raise error

    before = {name: signal.getsignal(name) for name in (signal.SIGPIPE, signal.SIGXFSZ)}
    try:
        found, message = entrypoint.start(["tool", "-x"], execute)
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
    assert found == code
    assert "tool" in message


HOSTS = "127.0.0.1 localhost\n192.0.2.254 corral-host\n192.0.2.10 api.example\n"
GATE = {
    "probe": {"address": "192.0.2.1", "port": 443},
    "resolver": "192.0.2.53",
    "names": [{"host": "api.example", "ports": [443], "liveness": True, "optional": False}],
    "services": [8081],
    "beside": False,
}
# A network of its own in which nothing listens but what is given, so that everything else is refused.
NETWORK = """\
ip link set lo up
ip address add 192.0.2.0/24 dev lo
mount --bind "$1" /etc/hosts
shift
exec "$@"
"""
LISTEN = """\
import os, socket, sys
sockets = []
for place in sys.argv[1].split():
    address, port = place.split(":")
    sockets.append(socket.create_server((address, int(port))))
    sockets[-1].set_inheritable(True)
os.execvp(sys.argv[2], sys.argv[2:])
"""
LIVE = "192.0.2.10:443 192.0.2.254:8081"


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory that any user may read, with the packed entrypoint and a hosts file."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        (directory / "entrypoint").write_bytes(executable("entrypoint"))
        (directory / "hosts").write_text(HOSTS)
        (directory / "network").write_text(NETWORK)
        (directory / "listen").write_text(LISTEN)
        yield directory


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(place: Path) -> Run:
    """Runs it the way a sandbox does: an ordinary user without any capability, behind a fence that holds."""
    if os.geteuid() != 0:
        pytest.skip("giving up capabilities needs root")

    def in_container(
        *argv: str,
        listening: str = LIVE,
        gate: str | None = json.dumps(GATE),
        mounts: str | None = "[]",
        **env: str,
    ) -> subprocess.CompletedProcess[str]:
        network = ["unshare", "--net", "--mount", "sh", "-e", str(place / "network"), str(place / "hosts")]
        listen = [sys.executable, "-IS", str(place / "listen"), listening]
        dropped = (
            "--reuid=4242 --regid=4242 --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs"
        )
        command = [
            *network,
            *listen,
            "setpriv",
            *dropped.split(),
            "/usr/bin/python3",
            "-IS",
            str(place / "entrypoint"),
        ]
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **env}
        if gate is not None:
            environment["CORRAL_GATE"] = gate
        if mounts is not None:
            environment["CORRAL_MOUNTS"] = mounts
        return subprocess.run(
            [*command, *argv], env=environment, capture_output=True, text=True, check=False, timeout=30
        )

    return in_container


PASSED = [
    "corral-firewall: pinned api.example -> 192.0.2.10",
    "corral-firewall: OK: unlisted host blocked",
    "corral-firewall: OK: DNS closed",
    "corral-firewall: OK: allowlisted host api.example (192.0.2.10) reachable",
    "corral-firewall: OK: host service 8081 reachable",
    "corral-firewall: egress policy applied",
]


def test_program_takes_its_place_once_the_gate_has_passed(run: Run) -> None:
    done = run("/bin/sh", "-c", "echo $0; exit 7", "name")
    assert (done.returncode, done.stdout) == (7, "name\n")
    assert done.stderr.splitlines() == PASSED


def test_the_program_is_not_told_what_the_gate_was_told(run: Run) -> None:
    assert run("sh", "-c", "env", OTHER="kept").stdout.count("CORRAL_GATE") == 0
    assert "OTHER=kept" in run("sh", "-c", "env", OTHER="kept").stdout


@pytest.mark.parametrize(
    ("listening", "told"),
    [
        (f"{LIVE} 192.0.2.1:443", "unlisted host reachable — isolation broken"),
        (
            f"{LIVE} 192.0.2.53:53",
            "DNS reachable: 192.0.2.53 accepts connections over TCP — isolation broken",
        ),
        (
            f"{LIVE} 192.0.2.254:53",
            "DNS reachable: 192.0.2.254 accepts connections over TCP — isolation broken",
        ),
        ("192.0.2.254:8081", "allowlisted host api.example not reachable: 192.0.2.10 on port 443: refused; "),
        ("192.0.2.10:443", "host service 8081 not reachable: corral-host:8081 refused"),
    ],
    ids=["unlisted", "resolver", "gateway", "name", "service"],
)
def test_program_is_never_started_when_the_gate_does_not_pass(run: Run, listening: str, told: str) -> None:
    done = run("echo", "started", listening=listening)
    assert (done.returncode, done.stdout) == (1, "")
    (error,) = [line for line in done.stderr.splitlines() if "ERROR" in line]
    assert error.startswith(f"corral-firewall: ERROR: {told}")
    assert "egress policy applied" not in done.stderr


@pytest.mark.parametrize("gate", [None, "", "{}", "nonsense", json.dumps({**GATE, "probe": None})])
def test_a_gate_that_is_left_out_is_a_gate_that_is_closed(run: Run, gate: str | None) -> None:
    done = run("echo", "started", gate=gate)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("corral-entrypoint: ERROR: CORRAL_GATE does not say what to check")


def test_the_sentences_are_the_same_in_every_locale(run: Run) -> None:
    done = run("echo", "started", listening=f"{LIVE} 192.0.2.1:443", LC_ALL="C", LANG="C")
    assert "unlisted host reachable — isolation broken" in done.stderr


def test_program_is_looked_up_in_path(run: Run) -> None:
    assert run("true").returncode == 0


def test_missing_program_is_named(run: Run) -> None:
    done = run("no-such-program")
    assert done.returncode == 127
    last = done.stderr.splitlines()[-1]
    assert last == "corral-entrypoint: ERROR: there is no program 'no-such-program' in the image"


def test_program_that_is_no_program_is_named(run: Run) -> None:
    done = run("/etc/passwd")
    assert done.returncode == 126
    assert "'/etc/passwd' cannot be executed: Permission denied" in done.stderr


def test_script_without_its_interpreter_is_not_called_missing(run: Run) -> None:
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "script"
        script.write_text("#!/no/such/interpreter\n")
        for path in (script, Path(directory)):
            path.chmod(0o755)
        done = run(str(script))
    assert done.returncode == 126
    assert "its interpreter" in done.stderr


def test_signals_that_python_ignores_work_again_in_the_program(run: Run) -> None:
    done = run("/bin/sh", "-c", "grep SigIgn /proc/self/status")
    ignored = int(done.stdout.split()[1], 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1))
    assert not ignored & (1 << (signal.SIGXFSZ - 1))


def test_nothing_given_is_an_error(run: Run) -> None:
    done = run()
    assert (done.returncode, done.stderr) == (1, "corral-entrypoint: ERROR: no program given\n")


def test_program_is_never_started_in_another_container(place: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-IS", str(place / "entrypoint"), "echo", "started"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("corral-entrypoint: ERROR: ")


def row(path: Path) -> list[object]:
    return [str(path), path.stat().st_dev, path.stat().st_ino]


def test_mounts_that_are_what_was_looked_at_pass_and_the_program_is_not_told(run: Run, place: Path) -> None:
    done = run("sh", "-c", "env", mounts=json.dumps([row(place), row(Path("/etc/hostname"))]))
    assert done.returncode == 0
    assert "CORRAL_MOUNTS" not in done.stdout


def test_a_program_never_starts_on_a_mount_that_is_something_else(run: Run, place: Path) -> None:
    for mounts in (
        [[*row(place)[:2], 1]],
        [[str(place), 1, row(place)[2]]],
        [row(place), ["/nowhere", 1, 2]],
    ):
        done = run("echo", "started", mounts=json.dumps(mounts))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(
            "corral-entrypoint: ERROR: not what was there when the policy was checked: /"
        )
        # Before the network is tried: nothing of it is needed.
        assert "corral-firewall" not in done.stderr


@pytest.mark.parametrize(
    "mounts", [None, "", "{}", "null", '[["/x", 1]]', '[["/x", "1", 2]]', "[[1, 1, 1]]", "[1]"]
)
def test_without_a_word_about_the_mounts_nothing_starts(run: Run, mounts: str | None) -> None:
    done = run("echo", "started", mounts=mounts)
    assert (done.returncode, done.stdout) == (1, "")
    assert "CORRAL_MOUNTS does not say what is mounted" in done.stderr


def test_secrets_come_into_the_environment_of_the_program_alone(run: Run, place: Path) -> None:
    path = place / "secrets.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen(1)

        def serve() -> None:
            visitor, _ = listener.accept()
            with visitor:
                visitor.sendall(json.dumps({"API_KEY": "s3cr3t", "LANG": "C"}).encode())

        thread = threading.Thread(target=serve)
        thread.start()
        done = run("sh", "-c", "env", CORRAL_SECRETS=str(path))
        thread.join(10)
    path.unlink()
    assert "API_KEY=s3cr3t" in done.stdout.splitlines()
    assert "CORRAL_SECRETS" not in done.stdout
    assert "s3cr3t" not in done.stderr


def test_secrets_that_do_not_come_start_nothing(run: Run, place: Path) -> None:
    done = run("echo", "started", CORRAL_SECRETS=str(place / "missing.sock"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith(
        "corral-entrypoint: ERROR: the secrets did not come: No such"
    )


def test_secrets_are_not_asked_for_before_the_gate_has_passed(run: Run, place: Path) -> None:
    done = run("echo", "started", listening="192.0.2.10:443", CORRAL_SECRETS=str(place / "missing.sock"))
    assert done.returncode == 1
    assert "secrets" not in done.stderr
