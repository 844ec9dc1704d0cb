"""Each command of corral, and where a test types it at a terminal: those that only read, and the others.

tests/unit/test_command_places.py fails when a command is in neither list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NAME, ZONE, DENIED = "reads.corral.example", "zone.reads.corral.example", "203.0.113.66"
SAID = "a-word-of-the-session-that-was-kept"


@dataclass(frozen=True)
class Call:
    """One way to call a command.

    ``codes``: what it may end with. ``shows``: what its table must have, or there is nothing to break.
    ``changed``: in the project whose policy allows more than was approved. ``slow``: takes seconds.
    """

    words: str
    codes: tuple[int, ...] = (0,)
    shows: tuple[str, ...] = ()
    changed: bool = False
    slow: bool = False


READING: dict[str, tuple[Call, ...]] = {
    "corral": (
        Call("--help", shows=("completion",)),
        Call("--version"),
        Call("", (0, 2)),
        Call("no-such-command", (2,)),
    ),
    "policy": (Call("policy --help", shows=("accept",)),),
    "status": (Call("status", shows=(NAME, "now")), Call("status --json", shows=(NAME,))),
    "ps": (
        Call("ps", shows=("now", "kept")),
        Call("ps --here", shows=("now", "kept")),
        Call("ps --json", shows=('"now"', '"kept"')),
    ),
    "df": (Call("df", shows=("reading-",)), Call("df --json", shows=("reading-",))),
    "denied": (
        Call("denied", shows=(DENIED,)),
        Call("denied --all", shows=(DENIED,)),
        Call("denied --json", shows=(DENIED,)),
    ),
    "policy hash": (Call("policy hash"),),
    "policy diff": (
        Call("policy diff"),
        Call("policy diff", (1,), ("+ reach not-approved.reads.corral.example",), changed=True),
        Call("policy diff --json", (1,), ("not-approved.reads.corral.example",), changed=True),
    ),
    "policy check": (
        Call(f"policy check {NAME}:443", shows=(NAME,)),
        Call(f"policy check {NAME}:444", (1,)),
        Call(f"policy check {DENIED} --json", (1,), (DENIED,)),
    ),
    "render": (Call("render", shows=(NAME,)), Call("render --check"), Call("render --json", shows=(NAME,))),
    "inspect": (
        Call("inspect kept", shows=("exit code 3", SAID)),
        Call("inspect now"),
        Call("inspect kept --json", shows=(SAID,)),
        Call("inspect nobody", (1,)),
    ),
    "logs": (
        Call("logs kept", shows=(SAID,)),
        Call("logs kept --follow", shows=(SAID,)),
        Call("logs kept --json", shows=(SAID,)),
        Call("logs now --tail 3"),
        Call("logs --proxy", shows=("listening",)),
    ),
    "schema": (Call("schema", shows=("egress",)),),
    "version": (Call("version", shows=("writer",)), Call("version --json", shows=("writer",))),
    "metrics": (Call("metrics", shows=("corral_",)),),
    "completion": tuple(Call(f"completion {shell}", shows=("corral",)) for shell in ("bash", "zsh", "fish")),
    # Says what is wrong with the box, which is no matter here.
    "doctor": (
        Call("doctor", (0, 1), ("checks:",), slow=True),
        Call("doctor COR-020", (0, 1), ("COR-020",)),
        Call("doctor --json", (0, 1), slow=True),
    ),
    "verify": (
        Call("verify", shows=("0 failed",), slow=True),
        Call("verify --json", slow=True),
        Call("verify --explain no-sudo", shows=("no-sudo",)),
    ),
    "prune": (Call("prune --dry-run", shows=("kept",)), Call("prune --dry-run --json", shows=("kept",))),
    "install": (Call("install --dry-run"),),
    "uninstall": (Call("uninstall --dry-run"), Call("uninstall --dry-run --json")),
}

_README = "tests/system/test_readme.py::test_the_readme_typed_literally_from_the_clone_to_the_last_word"
_HERE = "tests/system/test_reading.py::test_what_changes_files_and_approval_works_at_a_terminal"
# Command -> the test that types it at a terminal.
ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(
        ("init", "build", "run", "shell", "down", "refresh", "allow", "deny", "up", "attach", "enable"),
        _README,
    ),
    "disable": _README,
    "revert": _HERE,
    "policy accept": _HERE,
}

# Runs jobs one after the other, each at a terminal of its own or with pipes; prints what each said.
RUNNER = r"""
import fcntl, json, os, pty, select, shutil, struct, subprocess, sys, termios, time
jobs, corral = json.load(sys.stdin), shutil.which("corral")
def at_terminal(argv, cwd, environ, columns):
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            os.chdir(cwd)
            # Of this size before the program looks; pty.fork has made it ours.
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            os.execve(argv[0], argv, environ)
        finally:
            os._exit(127)
    said, end = b"", time.monotonic() + 120
    while time.monotonic() < end:
        if select.select([terminal], [], [], 1)[0]:
            try:
                data = os.read(terminal, 65536)
            except OSError:
                data = b""
            if not data:
                break
            said += data
    else:
        os.kill(pid, 9)
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said.decode("utf-8", "replace"), ""
def piped(argv, cwd, environ):
    done = subprocess.run(argv, cwd=cwd, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    return done.returncode, *(stream.decode("utf-8", "replace") for stream in (done.stdout, done.stderr))
told = []
for job in jobs:
    environ = dict(os.environ)
    if job["only"] is not None:
        environ = {name: environ[name] for name in job["only"] if name in environ}
    for name in job["unset"]:
        environ.pop(name, None)
    environ.update(job["set"])
    argv = [corral, *job["words"]]
    columns = job["columns"]
    ended = piped(argv, job["cwd"], environ) if columns is None else at_terminal(argv, job["cwd"], environ, columns)
    told.append(dict(zip(("code", "out", "err"), ended)))
print(json.dumps(told))
"""


def job(
    call: Call,
    directory: str,
    *,
    columns: int | None = None,
    only: tuple[str, ...] | None = None,
    unset: tuple[str, ...] = (),
    **environ: str,
) -> dict[str, Any]:
    """Return what RUNNER runs: at a terminal of so many columns, or with pipes.

    ``only``: the variables that stay of the environment; ``unset``: those that do not; the others are set.
    """
    return {
        "words": call.words.split(),
        "cwd": directory,
        "columns": columns,
        "only": only,
        "unset": unset,
        "set": environ,
    }
