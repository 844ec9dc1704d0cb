"""Guarding the host against files that an agent leaves in writable mounts for the host to execute.

Directories of Git hooks are mounted read-only. Other files have to stay writable (Git renames its
configuration into place, which a mount would refuse), so they are looked at before and after a session; what
changed is said, and can be put back.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from corral import oserrors, state, watched
from corral.held import open_place
from corral.looking import Look
from corral.watched import Finding
from policy import savedfile
from policy.container import Mount
from policy.errors import ArgumentError, CorralError
from policy.identity import SESSION_ID, StatePaths
from policy.loader import LoadedPolicy
from policy.revision import shown

RECORDS = "changed"
BEFORE = state.BEFORE
KEPT = 20
# Bytes of what there was before a session: our own file, as large as what an agent piled up makes it.
LARGEST = 1 << 32
# Paths in a report, and lines about what is different in them.
TOLD = 200
DETAILS = 250


def trees(loaded: LoadedPolicy) -> list[str]:
    """Return the directories that the sandbox can write, none when the policy does not want them watched."""
    if not loaded.policy.protect:
        return []
    return watched.writable((Path(mount.source), mount.read_only) for mount in loaded.mounts)


def read_only(loaded: LoadedPolicy, environ: Mapping[str, str]) -> tuple[Mount, ...]:
    """Return the mounts that close directories of hooks; a missing one is made, else an agent would.

    Args:
        loaded: names the mounts.
        environ: the user's, who may have told Git of another place for hooks.
    """
    for directory in watched.hook_directories(trees(loaded), environ):
        _make(directory)
    return closed(loaded, environ)


def closed(loaded: LoadedPolicy, environ: Mapping[str, str]) -> tuple[Mount, ...]:
    """Return the mounts that close the directories of hooks that there are."""
    # What contains another comes first.
    return tuple(
        Mount(directory, directory, read_only=True) for directory in watched.closable(trees(loaded), environ)
    )


def _make(directory: str) -> None:
    pure = PurePosixPath(directory)
    with contextlib.suppress(OSError):
        parent = open_place(str(pure.parent))
        try:
            os.mkdir(pure.name, 0o755, dir_fd=parent)
        finally:
            os.close(parent)


class Watch:
    """What was there before a session, until what it changed is told.

    Args:
        places: the directories that it can write.
        session: its id.
        paths: the sandbox's files.
        environ: the user's.
        before: what was in them; None: nobody has looked yet.
    """

    def __init__(
        self,
        places: Sequence[str],
        session: str,
        paths: StatePaths,
        environ: Mapping[str, str],
        before: Look | None = None,
    ) -> None:
        self._places, self._before = list(places), before
        self._session, self._paths, self._environ = session, paths, environ
        self.left = False

    @property
    def _search(self) -> list[str]:
        return self._environ.get("PATH", "").split(os.pathsep)

    def look(self) -> Look:
        """See what is there, once: before the session's program begins, but it may be while others work."""
        if self._before is None:
            self._before = watched.snapshot(self._places, self._search, self._environ)
        return self._before

    def save(self) -> None:
        """Keep it with the session's files: whoever ends the session, or finds it ended, tells.

        Raises:
            CorralError: the disk refuses.
        """
        body = {"places": self._places, "before": self.look().body()}
        file = self._paths.session(self._session) / BEFORE
        try:
            file.write_text(json.dumps(body), encoding="ascii")
        except OSError as error:
            raise CorralError(f"cannot write {file}: {error.strerror}", oserrors.hint(error)) from error

    def leave(self) -> None:
        """The session goes on without us: telling is for another one."""
        self.left = True

    def tell(self, warn: Callable[[Sequence[str]], None]) -> None:
        """Say what changed since somebody looked, if anybody has."""
        before, session, paths, search = self._before, self._session, self._paths, self._search
        if before is None:
            return
        try:
            findings = watched.compare(before, watched.snapshot(self._places, search, self._environ), search)
        except Exception as error:
            # Whatever an agent made of it: what there was before is kept.
            findings = [
                Finding(path, "as it was before the session", entry)
                for path, entry in sorted(before.found.items())
                if entry is not None and entry.content is not None
            ]
            warn(unknown(error, session))
            _remember(paths, session, findings)
        else:
            if findings:
                # First of all: an agent may have left no room for a record.
                warn(report(findings, session))
                _remember(paths, session, [finding for finding in findings if not finding.told_only])
        # Once; whoever is killed before this has it told again, rather than by nobody.
        state.told_session(paths, session)


def watch(loaded: LoadedPolicy, paths: StatePaths, session: str, environ: Mapping[str, str]) -> Watch:
    """Return what watches the files that this host executes, in the directories that a session can write."""
    return Watch(trees(loaded), session, paths, environ)


@contextlib.contextmanager
def reported(
    loaded: LoadedPolicy,
    paths: StatePaths,
    session: str,
    environ: Mapping[str, str],
    warn: Callable[[Sequence[str]], None],
    *,
    at_once: bool = True,
) -> Iterator[Watch]:
    """Say after the block what it did to files that this host executes, unless the session was left.

    ``at_once``: what there is before is looked at first of all; else the block does it (``Watch.look``).
    """
    made = watch(loaded, paths, session, environ)
    if at_once:
        made.look()
    try:
        yield made
    finally:
        if not made.left:
            made.tell(warn)


def told_later(
    paths: StatePaths, session: str, environ: Mapping[str, str], warn: Callable[[Sequence[str]], None]
) -> None:
    """Say what a session changed that was left to itself, and has ended; once."""
    file = paths.session(session) / BEFORE
    try:
        body = savedfile.parse(savedfile.text(file, LARGEST))
        places = [str(place) for place in body["places"]]
        made = Watch(places, session, paths, environ, Look.of(body["before"]))
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        warn(unknown(error, session)[:1])
        return
    made.tell(warn)


def unknown(error: Exception, session: str) -> list[str]:
    """Return what the user reads when nobody can say what changed."""
    return [
        "what the session changed of the files that this host executes could not be found out "
        f"({shown(f'{type(error).__name__}: {error}')}); look at them before you use the directory",
        f"  to put back what there was of them before: corral revert {session}",
    ]


def report(findings: Iterable[Finding], session: str) -> list[str]:
    """Return what the user reads."""
    lines = ["the session changed what this host executes; look at it before you use the directory:"]
    found = list(findings)
    left = DETAILS
    for finding in found[:TOLD]:
        lines.append(f"  {shown(finding.path)}: {finding.what}")
        lines += [f"    {line}" for line in finding.lines[:left]]
        left = max(left - len(finding.lines), 0)
    if sum(len(finding.lines) for finding in found[:TOLD]) > DETAILS:
        lines.append("  what is different in the others is not shown here")
    if len(found) > TOLD:
        lines.append(f"  ... and {len(found) - TOLD} more")
    if all(finding.told_only for finding in found):
        return lines
    return [*lines, f"  to put all of it back as it was: corral revert {session}"]


def _remember(paths: StatePaths, session: str, findings: Iterable[Finding]) -> None:
    rows = []
    for finding in findings:
        before = finding.before
        content = None if before is None or before.content is None else before.content
        rows.append(
            {
                "path": finding.path,
                "mode": None if before is None else before.mode,
                "content": None if content is None else base64.b64encode(content).decode(),
            }
        )
    directory = paths.root / RECORDS
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = directory / f"{session}.json"
        partial = file.with_suffix(".new")
        partial.write_text(json.dumps(rows), encoding="utf-8")
        partial.replace(file)
        for old in sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink()
    except OSError as error:
        raise CorralError(f"cannot write {directory}: {error.strerror}", oserrors.hint(error)) from error


def record_of(data: Path, start: Path, session: str) -> Path:
    """Return the record of a session of this directory's sandboxes, whatever became of their policy.

    Args:
        data: where all sandboxes have their files.
        start: a directory, resolved; its parents are looked at too.
        session: its id.

    Raises:
        ArgumentError: no such session, or it changed nothing.
    """
    if SESSION_ID.fullmatch(session):
        for directory in (start, *start.parents):
            for ident in state.sandboxes_of(data, directory):
                file = data / ident / RECORDS / f"{session}.json"
                if file.is_file():
                    return file
    raise ArgumentError(
        f"nothing is known that a session {session[:80]!r} changed here",
        "corral run told its id when it ended; see it in that directory",
    )


def revert(file: Path) -> list[str]:
    """Put back what a session changed by its record, and return a line about each file.

    Raises:
        CorralError: the record cannot be read, or a file could not be put back; the others were.
    """
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorralError(f"cannot read {file}") from error
    done, failed = [], []
    for row in rows:
        path = str(row["path"])
        try:
            done.append(f"{shown(path)}: {_put_back(path, row['mode'], row['content'])}")
        except OSError as error:
            failed.append(f"{shown(path)}: {error.strerror or error}")
    if failed:
        raise CorralError("\n".join(["not put back:", *failed]), "look at these by hand")
    file.unlink()
    return done


def _put_back(path: str, mode: int | None, content: str | None) -> str:
    pure = PurePosixPath(path)
    if mode is not None and stat.S_ISDIR(mode):
        return "a directory again" if _back_to_directory(pure) else "was a directory, look at it by hand"
    parent = open_place(str(pure.parent))
    try:
        if mode is None:
            _take_away(pure.name, parent)
            return "removed"
        if content is None:
            raise OSError(0, "too large to have been kept")
        data = base64.b64decode(content)
        partial = f".{pure.name}.{secrets.token_hex(4)}"
        if stat.S_ISLNK(mode):
            os.symlink(data, partial, dir_fd=parent)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(partial, flags, 0o600, dir_fd=parent), "wb") as stream:
                stream.write(data)
                os.fchmod(stream.fileno(), stat.S_IMODE(mode))
        os.rename(partial, pure.name, src_dir_fd=parent, dst_dir_fd=parent)
        return "as before"
    finally:
        os.close(parent)


def _back_to_directory(pure: PurePosixPath) -> bool:
    parent = open_place(str(pure.parent))
    try:
        found = os.stat(pure.name, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            return True
        os.unlink(pure.name, dir_fd=parent)
        os.mkdir(pure.name, 0o755, dir_fd=parent)
    except FileNotFoundError:
        os.mkdir(pure.name, 0o755, dir_fd=parent)
    finally:
        os.close(parent)
    return True


def _take_away(name: str, parent: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            raise OSError(0, "a directory now")
        os.unlink(name, dir_fd=parent)
