"""Checks of what the agent sees of the host's files, and of what it can do to files."""

from __future__ import annotations

import mmap
import os

from .expectations import below
from .outcome import Failed, Skipped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .expectations import Expectations
    from .system import Check, System

HOME = "/home/agent"
PROGRAM_WAIT = 30.0
ROOT_DIRS = ("/", "/usr", "/etc", "/opt", "/var")


def no_docker_socket(path: str) -> Check:
    """Return a check that nothing has the name of Docker's socket."""

    def check(_: Expectations, system: System) -> str:
        if system.there(path):
            raise Failed("it is there")
        return "not there"

    return check


def no_credential_dir(name: str) -> Check:
    """Return a check that nothing has that name in the agent's home or in the host user's."""

    def check(expected: Expectations, system: System) -> str:
        for home in sorted({HOME, expected.home}):
            if system.there(f"{home}/{name}"):
                raise Failed(f"{home}/{name} is there")
        return "not there"

    return check


def host_home_only_mounts(expected: Expectations, system: System) -> str:
    """Of the host user's home nothing is visible but the mounts and the directories that lead to them."""
    home, allowed = expected.home, [*expected.mounts, *expected.state, *expected.shadows]
    if home in expected.mounts or any(below(home, path) for path in allowed):
        raise Failed("the home itself is mounted")
    for point in system.mounts():
        if point == home or below(point, home):
            # What lies in the agent's own home is none of the host's, but must be known one by one.
            if not any(point == path or (path != HOME and below(point, path)) for path in allowed):
                raise Failed(f"{point} is mounted")
        elif point != "/" and below(home, point):
            raise Failed(f"{point} is mounted, and the home lies in it")
    if home == HOME:
        return "no mounts but the policy's (the agent's own home has the same path)"
    waiting = [home]
    while waiting:
        directory = waiting.pop()
        for name in system.listing(directory):
            path = f"{directory}/{name}"
            if path in allowed:
                continue
            if not any(below(mount, path) for mount in allowed):
                raise Failed(f"{path} is visible")
            waiting.append(path)
    return "mount components only"


def env_file_not_mounted(expected: Expectations, system: System) -> str:
    """The file that the secrets come from is not in the container."""
    if not expected.env_file:
        raise Skipped("the policy has no env_file")
    if system.there(expected.env_file):
        raise Failed(f"{expected.env_file} is visible")
    return "not visible"


def rw_writable(path: str) -> Check:
    """Return a check that the agent can write there, and that what it writes is the host user's."""

    def check(expected: Expectations, system: System) -> str:
        try:
            owner = system.on_host("uid", system.write(path))
        except OSError as problem:
            raise Failed(f"cannot be written: {problem.strerror}") from problem
        if owner != expected.uid:
            raise Failed(f"what is written belongs to uid {owner}, not {expected.uid}")
        return "written, and removed again"

    return check


def ro_unwritable(path: str) -> Check:
    """Return a check that the kernel refuses to change anything at or below the path."""

    def check(expected: Expectations, system: System) -> str:
        if not system.there(path):
            raise Failed("it is not there")
        if _can(system.write, path):
            raise Failed("can be written")
        if not system.flags(path) & os.ST_RDONLY:
            raise Failed("cannot be written, but is not mounted read-only either")
        # A bind mount brings the mounts below it along; not every engine makes those read-only too.
        for point, options in system.mounts().items():
            if below(point, path) and point not in expected.mounts_rw and "ro" not in options:
                raise Failed(f"{point}, mounted below it, is not read-only")
        return "mounted read-only, and a write was refused"

    return check


def state_writable(path: str) -> Check:
    """Return a check that a state directory belongs to the agent, who can write there."""
    writable = rw_writable(path)

    def check(expected: Expectations, system: System) -> str:
        owner = system.on_host("uid", system.owner(path))
        if owner != expected.uid:
            raise Failed(f"belongs to uid {owner}, not {expected.uid}")
        return writable(expected, system)

    return check


def read_only_root(_: Expectations, system: System) -> str:
    """Nothing of the image can be changed: the root is mounted read-only, and the kernel refuses to write."""
    for path in ROOT_DIRS:
        if _can(system.write, path):
            raise Failed(f"{path} can be written")
        if not system.flags(path) & os.ST_RDONLY:
            raise Failed(f"{path} is not mounted read-only")
    return f"a write was refused in {', '.join(ROOT_DIRS)}"


def _can(attempt: Callable[[str], object], path: str) -> bool:
    try:
        attempt(path)
    except OSError:
        return False
    return True


def exec_dir(path: str) -> Check:
    """Return a check that the kernel executes code from a directory; a harness maps its libraries there."""

    def check(_: Expectations, system: System) -> str:
        name = system.real(path) / f".corral-verify-{os.urandom(6).hex()}"
        handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o700)
        try:
            name.unlink()
            os.write(handle, bytes(mmap.PAGESIZE))
            mmap.mmap(handle, mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
        except PermissionError as problem:
            raise Failed("the kernel refuses to execute anything there") from problem
        finally:
            os.close(handle)
        return "code was mapped"

    return check


def runs(path: str) -> Check:
    """Return a check that a program starts and tells its version."""

    def check(_: Expectations, system: System) -> str:
        code = system.execute((str(system.real(path)), "--version"), PROGRAM_WAIT)
        if code != 0:
            raise Failed(f"--version ended with {code}")
        return "--version ended with 0"

    return check
