"""`corral-prepare UID GID [DIRECTORY...]`: makes an image that corral did not make fit for an agent.

No file changes ids or brings capabilities, no program becomes root by name, the agent's ids have one name,
its home is a plain directory, and what guards the start lies in root's own directories. Exit code 1 with the
reason when that cannot be.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

USER, HOME = "agent", "/home/agent"
BECOMING_ROOT = frozenset({"sudo", "doas", "pkexec"})
INTERPRETER = "/usr/bin/python3"
# What corral's own files lie in. A link there could lead into what the agent writes.
GUARDING = ("/", "/etc", "/usr", "/usr/bin", "/usr/local", "/usr/local/bin")
# Where an interpreter may really be: nowhere that is mounted, or kept in memory.
OF_THE_IMAGE = ("/usr/", "/opt/", "/bin/", "/lib/", "/lib64/", "/nix/")
LEAST = (3, 9)
SET_ID = stat.S_ISUID | stat.S_ISGID
OTHERS = stat.S_IWGRP | stat.S_IWOTH


class Unfit(Exception):
    """The image cannot be used; the text says why and what to do."""


def there(path: Path) -> bool:
    """Say whether anything, a dangling link included, has that name."""
    return os.path.lexists(path)


def entries(top: Path) -> Iterator[os.DirEntry[str]]:
    """Yield everything on the file system of ``top``, without following links."""
    device, waiting = top.lstat().st_dev, [str(top)]
    while waiting:
        with os.scandir(waiting.pop()) as found:
            for entry in found:
                yield entry
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode) and status.st_dev == device:
                        waiting.append(entry.path)


def disarm(top: Path) -> None:
    """Take set-id bits, and capabilities of files, from everything; remove programs to become root with."""
    for entry in entries(top):
        found, path = entry.stat(follow_symlinks=False), Path(entry.path)
        if entry.name in BECOMING_ROOT and not stat.S_ISDIR(found.st_mode):
            path.unlink()
        elif not stat.S_ISLNK(found.st_mode):
            if found.st_mode & SET_ID:
                path.chmod(stat.S_IMODE(found.st_mode) & ~SET_ID)
            with contextlib.suppress(OSError):
                os.removexattr(path, "security.capability", follow_symlinks=False)


def guard(top: Path, more: Sequence[str] = (), owner: int = 0) -> None:
    """Insist on plain directories around corral's own files, and make them root's alone.

    ``more`` are further ones, above others first.

    Raises:
        Unfit: one is a link, or something else.
    """
    for name in (*GUARDING, *more):
        path = top / name[1:]
        if not there(path):
            path.mkdir(0o755, parents=True)
        mode = path.lstat().st_mode
        if not stat.S_ISDIR(mode):
            raise Unfit(f"{name} is no directory, and corral's own files must lie in one")
        os.chown(path, owner, owner)
        path.chmod(stat.S_IMODE(mode) & ~OTHERS)


def interpreter(top: Path, running: str, version: tuple[int, ...] = sys.version_info[:2]) -> None:
    """Put the Python that the entrypoint names where it names it.

    Raises:
        Unfit: it is too old, or lies where a session mounts something.
    """
    if version < LEAST:
        raise Unfit("its Python is older than 3.9, which the entrypoint needs; install a newer one in it")
    real = os.path.realpath(running)
    if not real.startswith(OF_THE_IMAGE):
        raise Unfit(f"its Python is {real}, which is not among the image's programs; install one in /usr")
    named = top / INTERPRETER[1:]
    if not there(named):
        named.symlink_to(real)
    found = os.path.realpath(named)
    if not found.removeprefix(str(top).rstrip("/")).startswith(OF_THE_IMAGE):
        raise Unfit(f"{INTERPRETER} leads to {found}, which is not among the image's programs")


def without(lines: Sequence[str], number: int) -> list[str]:
    """Return the lines of passwd or group that have neither the agent's name nor its number."""
    kept = []
    for line in lines:
        fields = line.split(":")
        if fields[0] != USER and (len(fields) < 3 or fields[2] != str(number)):
            kept.append(line)
    return kept


def account(top: Path, uid: int, gid: int) -> None:
    """Give the agent's ids one name only, whoever had them, or the name, in the image.

    Raises:
        Unfit: passwd or group is no plain file.
    """
    shells = [name for name in ("/bin/bash", "/bin/sh") if (top / name[1:]).exists()]
    shell = next(iter(shells), "/bin/sh")
    for file, number, own in (
        ("/etc/passwd", uid, f"{USER}:*:{uid}:{gid}:{USER}:{HOME}:{shell}"),
        ("/etc/group", gid, f"{USER}:*:{gid}:"),
    ):
        path = top / file[1:]
        lines: list[str] = []
        if there(path):
            if not stat.S_ISREG(path.lstat().st_mode):
                raise Unfit(f"{file} is no plain file")
            lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
            path.unlink()
        text = "\n".join([*without(lines, number), own]) + "\n"
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        path.chmod(0o644)


def home(top: Path, uid: int, gid: int) -> None:
    """Make the agent's home a plain, empty directory of its own; a session mounts another one over it."""
    path = top / HOME[1:]
    for place in (path.parent, path):
        if there(place) and not stat.S_ISDIR(place.lstat().st_mode):
            place.unlink()
    if there(path):
        shutil.rmtree(path)
    path.mkdir(0o755, parents=True)
    os.chown(path, uid, gid)


def prepare(top: Path, uid: int, gid: int, running: str, directories: Sequence[str] = ()) -> None:
    """Do all of it below ``top``; ``directories`` are to be root's, too.

    Raises:
        Unfit: the image cannot be used.
    """
    guard(top, directories)
    interpreter(top, running)
    account(top, uid, gid)
    home(top, uid, gid)
    disarm(top)


def main() -> None:
    """Run as a program."""
    try:
        prepare(Path("/"), int(sys.argv[1]), int(sys.argv[2]), sys.executable, sys.argv[3:])
    except (Unfit, OSError) as problem:
        sys.stderr.write(f"corral: this image cannot be used: {problem}\n")
        sys.exit(1)
