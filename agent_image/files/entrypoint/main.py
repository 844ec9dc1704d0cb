"""Starts the agent, or refuses to: the first program of every sandbox container.

It already runs as the user and holds nothing it could give up; it looks whether that is true and whether the
mounts are what was looked at, has the network tried from inside (the gate), fetches the secrets, and becomes
the program. Python 3.9 or later, standard library only. Exit codes:
1 the container or its network is not what it must be; 126 the program cannot be executed; 127 there is no
such program.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from . import apart, channel, gate, mounts

# What type checkers know without an import: typing alone would cost a third of the start-up.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

STATUS = "/proc/self/status"
ID_MAPS = {"Uid": "/proc/self/uid_map", "Gid": "/proc/self/gid_map"}
CAPABILITY_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


def parse_status(text: str) -> dict[str, str]:
    """Return the fields of /proc/<pid>/status."""
    fields = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in fields}


def on_host(ids: str, id_map: str) -> str:
    """Return ids as the host knows them. A rootless engine calls the user who runs it 0.

    One that the map does not know becomes "?".
    """
    rows = [[int(word) for word in line.split()] for line in id_map.splitlines()]
    found = []
    for text in ids.split():
        number = int(text)
        outside = (
            str(outer + number - inner) for inner, outer, count in rows if inner <= number < inner + count
        )
        found.append(next(outside, "?"))
    return " ".join(found)


def not_root(status: dict[str, str]) -> str | None:
    """Return what is wrong when any of the real, effective, saved and file-system ids is the host's root."""
    for kind in ID_MAPS:
        ids = status.get(kind, "").split()
        if len(ids) != 4 or "0" in ids or not all(map(str.isdigit, ids)):
            return f"running as root ({kind}: {' '.join(ids) or 'unknown'})"
    return None


def no_capability(status: dict[str, str]) -> str | None:
    """Return what is wrong when any set holds a capability: the bounding set too, which exec draws from."""
    for name in CAPABILITY_SETS:
        value = status.get(name, "")
        # Anything that is not a row of zeros, nothing at all included, is not known to be empty.
        if not value or value.strip("0"):
            return f"the container holds capabilities ({name}: {value or 'unknown'})"
    return None


def no_new_privileges(status: dict[str, str]) -> str | None:
    """Return what is wrong when exec could still gain privileges."""
    value = status.get("NoNewPrivs", "")
    return None if value == "1" else f"the container may gain privileges (NoNewPrivs: {value or 'unknown'})"


# In this order, before the program: who we are, what we hold, what we could get.
CHECKS = (not_root, no_capability, no_new_privileges)


def refusal(status: dict[str, str]) -> str | None:
    """Return why the program must not be started, or None."""
    for check in CHECKS:
        problem = check(status)
        if problem:
            return problem
    return None


def read(path: str) -> str:
    """Return a file's text."""
    with open(path, encoding="ascii", errors="replace") as file:  # noqa: PTH123 - pathlib costs 10 ms
        return file.read()


def start(argv: list[str], execute: Callable[[str, list[str]], object] = os.execvp) -> tuple[int, str]:
    """Become ``argv``. Returns only when that failed: the exit code and the reason."""
    program = argv[0]
    # Python ignores these two; a program would inherit that and, in a pipe, never end.
    for name in ("SIGPIPE", "SIGXFSZ"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        execute(program, argv)
    except FileNotFoundError:
        if "/" in program and os.path.exists(program):  # noqa: PTH110
            return 126, f"{program} cannot be executed: its interpreter or loader is missing"
        return 127, f"there is no program {program!r} in the image"
    except NotADirectoryError:
        return 127, f"there is no program {program!r} in the image"
    except (OSError, ValueError) as error:
        return 126, f"{program!r} cannot be executed: {getattr(error, 'strerror', None) or error}"
    return 126, f"{program!r} was not executed"


def say(line: str) -> None:
    """Write one line to stderr, in UTF-8 whatever the locale; that nobody reads it changes nothing."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode("utf-8", "backslashreplace"))


def fail(code: int, message: str) -> NoReturn:
    """Say why and exit."""
    say(f"corral-entrypoint: ERROR: {message}")
    sys.exit(code)


def pass_gate(text: str) -> None:
    """Try what the value of CORRAL_GATE says, tell what came of it, and exit unless all of it is true."""
    try:
        without = apart.parse(text)
        policy = gate.parse_policy(text) if without is None else None
    except Exception as error:
        fail(1, f"{gate.VARIABLE} does not say what to check: {error!r}; sandboxes are started by corral run")
    if without is not None or policy is None:
        if without is None or not apart.run(without, lambda line: say(f"corral-firewall: {line}")):
            sys.exit(1)
        return
    try:
        with open(gate.HOSTS, encoding="ascii", errors="replace") as file:  # noqa: PTH123
            hosts = gate.parse_hosts(file.read())
    except OSError as error:
        fail(1, f"cannot read {gate.HOSTS}: {error.strerror}")
    passed = gate.run(policy, hosts, say=lambda line: say(f"corral-firewall: {line}"))
    if not passed:
        sys.exit(1)


def check_mounts(text: str) -> None:
    """Compare what is mounted with the value of CORRAL_MOUNTS, and exit unless it is the same."""
    try:
        expected = mounts.parse(text)
    except Exception as error:
        fail(1, f"{mounts.VARIABLE} does not say what is mounted: {error!r}; sandboxes are started by corral")
    different = mounts.changed(expected)
    if different:
        fail(1, f"not what was there when the policy was checked: {', '.join(different)}")


def take_secrets(path: str) -> None:
    """Put the secrets into the environment, and exit when they were promised and do not come."""
    if not path:
        return
    try:
        os.environ.update(channel.receive(path))
    except (OSError, ValueError) as error:
        fail(1, f"the secrets did not come: {getattr(error, 'strerror', None) or error}; start it again")


def main(argv: list[str] | None = None) -> NoReturn:
    """Check and become the program given as arguments."""
    argv = sys.argv[1:] if argv is None else argv
    # An impatient user is no reason for a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        status = parse_status(read(STATUS))
        status.update({kind: on_host(status.get(kind, ""), read(path)) for kind, path in ID_MAPS.items()})
    except OSError as error:
        fail(1, f"cannot read {error.filename}: {error.strerror}")
    problem = refusal(status)
    if problem:
        fail(1, problem)
    if not argv:
        fail(1, "no program given")
    secrets = os.environ.pop(channel.VARIABLE, "")
    check_mounts(os.environ.pop(mounts.VARIABLE, ""))
    pass_gate(os.environ.pop(gate.VARIABLE, ""))
    take_secrets(secrets)
    fail(*start(argv))
