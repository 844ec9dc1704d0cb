from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from agent_image.files import entrypoint
from tests.unit.agent_image.container import STATUS

SCRIPT = Path(entrypoint.__file__)


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


def run(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run it the way a sandbox does: an ordinary user without any capability."""
    if os.geteuid() != 0:
        pytest.skip("giving up capabilities needs root")
    dropped = "--reuid=4242 --regid=4242 --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs"
    command = ["setpriv", *dropped.split(), sys.executable, "-IS", "-", *argv]
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        command, input=SCRIPT.read_text(), capture_output=True, text=True, check=False, timeout=30, **options
    )


def test_program_takes_its_place() -> None:
    done = run("/bin/sh", "-c", "echo $0; exit 7", "name")
    assert (done.returncode, done.stdout, done.stderr) == (7, "name\n", "")


def test_program_is_looked_up_in_path() -> None:
    assert run("true", env={"PATH": "/usr/bin:/bin"}).returncode == 0


def test_missing_program_is_named() -> None:
    done = run("no-such-program", env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 127
    assert done.stderr == "corral-entrypoint: ERROR: there is no program 'no-such-program' in the image\n"


def test_program_that_is_no_program_is_named() -> None:
    done = run("/etc/passwd")
    assert done.returncode == 126
    assert "'/etc/passwd' cannot be executed: Permission denied" in done.stderr


def test_script_without_its_interpreter_is_not_called_missing() -> None:
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "script"
        script.write_text("#!/no/such/interpreter\n")
        for path in (script, Path(directory)):
            path.chmod(0o755)
        done = run(str(script))
    assert done.returncode == 126
    assert "its interpreter" in done.stderr


def test_signals_that_python_ignores_work_again_in_the_program() -> None:
    done = run("/bin/sh", "-c", "grep SigIgn /proc/self/status")
    ignored = int(done.stdout.split()[1], 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1))
    assert not ignored & (1 << (signal.SIGXFSZ - 1))


def test_nothing_given_is_an_error() -> None:
    done = run()
    assert (done.returncode, done.stderr) == (1, "corral-entrypoint: ERROR: no program given\n")


def test_program_is_never_started_in_another_container() -> None:
    done = subprocess.run(
        [sys.executable, "-IS", str(SCRIPT), "echo", "started"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("corral-entrypoint: ERROR: ")
