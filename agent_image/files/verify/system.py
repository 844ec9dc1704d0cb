"""Everything a check touches: files, the process's status, mounts, sockets, programs."""

from __future__ import annotations

import json
import os
import resource
import socket
import stat
import subprocess
import sys
from pathlib import Path

from . import attempts, mounting, network

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


PROGRAM = "/usr/local/bin/corral-verify"
TRY_WAIT = 10.0
# What programs get instead of an environment that somebody else may have made.
ENVIRONMENT = {
    "HOME": "/home/agent",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}


class Mount:
    """One line of /proc/self/mountinfo.

    device: major:minor of the file system. root: what of it is mounted. point: where. options: the mount's
    own. kind: of the file system.
    """

    def __init__(self, line: str) -> None:
        # At spaces only: others are escaped, but those of other alphabets are not.
        fields = line.split(" ")
        self.device, self.root, self.point = fields[2], _unescape(fields[3]), _unescape(fields[4])
        self.options = set(fields[5].split(","))
        self.kind = fields[fields.index("-", 6) + 1]

    @property
    def ro(self) -> bool:
        """Whether nothing can be written by way of this mount."""
        return "ro" in self.options


class System:
    """The container's kernel. Tests give another root, or replace single methods.

    Paths are the container's. What the kernel refuses is raised as OSError.
    """

    def __init__(self, root: str = "", program: str = PROGRAM) -> None:
        self.root = root
        self.program = program

    def real(self, path: str) -> Path:
        """Return where ``path`` is for this process."""
        return Path(self.root + path)

    def shown(self, path: str) -> str:
        """Return the container's path of a real one."""
        return path[len(self.root) :] or "/"

    def read(self, path: str) -> str:
        """Return a file's text."""
        return self.real(path).read_text(encoding="utf-8", errors="replace")

    def there(self, path: str) -> bool:
        """Say whether anything, a dangling link included, has that name."""
        return os.path.lexists(self.real(path))

    def listing(self, path: str) -> list[str]:
        """Return the names in a directory, sorted; none when there is no such directory."""
        try:
            return sorted(entry.name for entry in self.real(path).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def status(self) -> dict[str, str]:
        """Return the fields of /proc/self/status."""
        fields = (line.partition(":") for line in self.read("/proc/self/status").splitlines())
        return {name: value.strip() for name, _, value in fields}

    def on_host(self, kind: str, number: int) -> int:
        """Return a uid or gid ("uid", "gid") as the host knows it; a rootless engine calls its user 0.

        Raises ValueError when the container's map does not know it.
        """
        for line in self.read(f"/proc/self/{kind}_map").splitlines():
            inner, outer, count = map(int, line.split())
            if inner <= number < inner + count:
                return outer + number - inner
        raise ValueError(f"{kind} {number} is nobody's on the host")

    def mounts(self) -> dict[str, set[str]]:
        """Return mount point -> the mount's options."""
        return {mount.point: mount.options for mount in self.mount_table()}

    def mount_table(self) -> list[Mount]:
        """Return every mount, in the kernel's order: of two at one place the later one covers the other."""
        # Not splitlines: a mount point may hold other characters that end a line.
        return [Mount(line) for line in self.read("/proc/self/mountinfo").split("\n") if line]

    def is_socket(self, path: str) -> bool:
        """Say whether that is a socket; what cannot be looked at cannot be connected to."""
        try:
            return stat.S_ISSOCK(self.real(path).lstat().st_mode)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return False

    def device(self, path: str) -> tuple[int, int] | None:
        """Return major and minor number of a character device, None for anything else."""
        try:
            found = self.real(path).lstat()
        except OSError:
            return None
        if not stat.S_ISCHR(found.st_mode):
            return None
        return os.major(found.st_rdev), os.minor(found.st_rdev)

    def flags(self, path: str) -> int:
        """Return the flags (os.ST_RDONLY, …) of the mount that ``path`` is on."""
        return os.statvfs(self.real(path)).f_flag

    def owner(self, path: str) -> int:
        """Return the uid that ``path`` itself belongs to."""
        return self.real(path).lstat().st_uid

    def mode(self, path: str) -> int:
        """Return the mode bits of ``path`` itself."""
        return stat.S_IMODE(self.real(path).lstat().st_mode)

    def write(self, path: str) -> int:
        """Write to a directory (a file that is gone again) or open a file for writing; return whose it is."""
        real = self.real(path)
        if not real.is_dir():
            handle = os.open(real, os.O_WRONLY | os.O_APPEND)
        else:
            name = real / f".corral-verify-{os.urandom(6).hex()}"
            handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                name.unlink()
                os.write(handle, b"corral")
            except OSError:
                os.close(handle)
                raise
        try:
            return os.fstat(handle).st_uid
        finally:
            os.close(handle)

    def attempt(self, way: str, path: str) -> str:
        """Try one of ``attempts.TRIES``; return what could not be put back."""
        return attempts.TRIES[way](self.real(path))

    def mount_over(self, path: str = "") -> dict[str, bool]:
        """Return which ways to mount something over a path are open (see ``mounting.attempt``).

        Raises OSError or ValueError when that cannot be tried.
        """
        argv = [sys.executable, "-IS", "-c", mounting.CODE.format(self.program), path]
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TRY_WAIT,
            check=False,
            env=ENVIRONMENT,
            cwd="/",
        )
        found = json.loads(done.stdout or b"null")
        if done.returncode != 0 or not isinstance(found, dict):
            raise ValueError(f"trying to mount ended with {done.returncode}")
        return found

    def tcp(self, address: str, port: int, payload: bytes = b"", linger: float = 0.0) -> network.Reply:
        """Connect; with a payload, send it and wait for an answer; else see that it lasts so many seconds."""
        return network.tcp(address, port, payload, linger)

    def converse(
        self, address: str, port: int, first: bytes, then: bytes = b"", wait: float = network.WAIT
    ) -> tuple[network.Reply, network.Reply | None]:
        """Say something to an HTTP server, and more when it answers 200 (see ``network.converse``)."""
        return network.converse(address, port, first, then, wait)

    def udp(self, address: str, port: int, payload: bytes, wait: float = network.WAIT) -> network.Reply:
        """Send one datagram and wait for an answer."""
        return network.udp(address, port, payload, wait)

    def open_raw(self, family: int, protocol: int) -> None:
        """Open a raw socket."""
        socket.socket(family, socket.SOCK_RAW, protocol).close()

    def ask_netfilter(self) -> int:
        """Return the errno of reading the packet filter, 0 when it was answered."""
        return network.netfilter_errno()

    def open_files(self) -> tuple[int, int]:
        """Return the soft and the hard limit on open files."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    def execute(self, argv: Sequence[str], wait: float) -> int:
        """Run a program quietly; return its exit code. Raises subprocess.TimeoutExpired."""
        null = subprocess.DEVNULL
        done = subprocess.run(
            list(argv), stdin=null, stdout=null, stderr=null, timeout=wait, check=False, env=ENVIRONMENT
        )
        return done.returncode


if TYPE_CHECKING:
    from .expectations import Expectations

    # A check returns its detail, raises Failed or Skipped; any other exception is a failure too.
    Check = Callable[[Expectations, System], str]


def _unescape(text: str) -> str:
    """Undo mountinfo's octal escapes."""
    for escape, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(escape, character)
    return text
