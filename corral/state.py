"""The files of a sandbox on the host: its state that outlives a session, and one directory per session.

The agent writes below the state directories, so nothing there is followed: every step is taken relative to an
open directory, without symbolic links.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from corral import oserrors, trees
from policy import holding
from policy.container import HOME, Mount
from policy.errors import CorralError, PolicyError
from policy.identity import SANDBOX_ID, Sandbox, StatePaths
from policy.profiles import ManagedDir, Profile

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
EMPTY = "empty"
# In a session's directory, which no container sees: how what this host executes was when it began. As long as
# it is there, nobody has told what the session changed.
BEFORE = "before.json"
PROJECT = "project"


def prepare(
    paths: StatePaths,
    profile: Profile,
    project: Path = Path(HOME),
    carried: Mapping[str, Mapping[str, bytes]] = MappingProxyType({}),
) -> list[str]:
    """Make the state directories (0700), put seed files where there are none, and what the profile manages.

    Args:
        paths: the sandbox's.
        profile: what it needs.
        project: where the harness starts, absolute.
        carried: by the path of a managed directory, more files of it: content by relative path.

    Returns:
        The managed directories in which something was changed.

    Raises:
        CorralError: a path is not a directory of ours, or the disk refuses.
    """
    _own_directory(paths.root)
    _own_directory(paths.workspace)
    with _opened(paths.home) as home:
        for directory in profile.state_dirs:
            with _descend(home, PurePosixPath(directory).parts, paths.home):
                pass
        for seed in profile.seeds:
            path = PurePosixPath(seed.path)
            with _descend(home, path.parent.parts, paths.home) as parent:
                _write_new(parent, path.name, seed.mode, seed.text(str(project)))
        for part in profile.shadow:
            _mount_point(home, paths.home, part, directory=False, only_below=profile.state_dirs)
    wanted = {
        managed.path: _files(managed, carried.get(managed.path, {})) for managed in profile.managed_dirs
    }
    changed = [path for path, files in wanted.items() if _manage(paths.managed / path, files)]
    empty = paths.root / EMPTY
    with contextlib.suppress(FileExistsError):
        os.close(os.open(empty, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o444))
    return changed


def write_once(paths: StatePaths, part: str, content: str, mode: int = 0o600) -> bool:
    """Put a file into the state that outlives a session, unless it is there; say whether it was not.

    Raises:
        CorralError: a path is not a directory of ours, or the disk refuses.
    """
    path = PurePosixPath(part)
    with _opened(paths.home) as home, _descend(home, path.parent.parts, paths.home) as parent:
        return _write_new(parent, path.name, mode, content)


def remember_project(paths: StatePaths, project: Path) -> None:
    """Note which directory a sandbox belongs to, for the day its policy does not tell any more.

    Raises:
        CorralError: the disk refuses, or it is another directory's.
    """
    _own_directory(paths.root)
    file, content = paths.root / PROJECT, os.fsencode(project)
    partial = file.with_name(PROJECT + ".new")
    try:
        known = file.read_bytes() if file.is_file() else b""
        if known and known != content:
            # An id has 32 bits of a hash: a name can be sought whose id is another project's.
            raise CorralError(
                f"{paths.root} belongs to the sandbox of {os.fsdecode(known)}",
                "give the policy another name; when that directory was moved here: corral uninstall --purge",
            )
        if not known:
            partial.write_bytes(content)
            partial.replace(file)
    except OSError as error:
        raise CorralError(f"cannot write {file}: {error.strerror}", oserrors.hint(error)) from error


def project_of(paths: StatePaths) -> Path:
    """Return the directory that a sandbox belongs to.

    Raises:
        OSError: it was not noted, or cannot be read.
    """
    return Path(os.fsdecode((paths.root / PROJECT).read_bytes()))


def refuse_another(data: Path, sandbox: Sandbox, project: Path) -> None:
    """Refuse a sandbox that is another directory's, or has the numbers of one that is.

    An id has 32 bits of a hash, and units, relays and bridges go by these alone: an agent that may write its
    policy can seek a name that has another project's, and ``corral down`` would end that one.

    Args:
        data: directory of all sandboxes' state.
        sandbox: as a policy makes it.
        project: where that policy is, without symbolic links.

    Raises:
        PolicyError: it is.
    """
    for root in data.glob(f"*-{sandbox.token}"):
        with contextlib.suppress(OSError):
            known = project_of(StatePaths(root))
            if known != project:
                raise PolicyError(
                    f"the sandbox's name gives it the id of {root.name}, which belongs to {known}",
                    "give the policy another name",
                )


def sandboxes_of(data: Path, project: Path) -> list[str]:
    """Return the ids of the sandboxes of a project directory that have state on this host, sorted.

    Args:
        data: directory of all sandboxes' state.
        project: absolute, without symbolic links.
    """
    found = []
    with contextlib.suppress(OSError):
        for directory in sorted(data.iterdir()):
            with contextlib.suppress(OSError):
                if SANDBOX_ID.fullmatch(directory.name) and (directory / PROJECT).read_bytes() == os.fsencode(
                    project
                ):
                    found.append(directory.name)
    return found


def create_session(paths: StatePaths, session: str, mounts: Iterable[Mount]) -> Path:
    """Make the directory of a session with the agent's home in it, and return it.

    Args:
        paths: the sandbox's.
        session: its id.
        mounts: of the container. Docker would make a mount point that is missing in the home, as root.

    Raises:
        CorralError: it exists, or the disk refuses.
    """
    directory = paths.session(session)
    _own_directory(directory.parent)
    try:
        # The container's user reads its hosts file through the mount, not through this path.
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise CorralError(
            f"cannot make {directory}: {error.strerror}",
            oserrors.hint(error) or "corral down, then try again",
        ) from error
    with _opened(paths.session_home(session)) as home:
        for mount in mounts:
            if mount.target.startswith(HOME + "/"):
                inside = mount.target.removeprefix(HOME + "/")
                folder = Path(mount.source).is_dir()
                _mount_point(home, paths.session_home(session), inside, directory=folder)
    return directory


def hold_session(paths: StatePaths, session: str, *, keep: bool) -> int:
    """Say, until what is returned is closed, that somebody looks after a session; ``keep``: for good.

    Raises:
        CorralError: the disk refuses.
    """
    directory = paths.session(session)
    try:
        held = holding.take(directory)
        if keep:
            (directory / holding.KEPT).touch(mode=0o600)
    except OSError as error:
        raise CorralError(f"cannot use {directory}: {error.strerror}", oserrors.hint(error)) from error
    return held


def mark_left(paths: StatePaths, session: str) -> None:
    """Note that a session goes on without who started it, who may want to read it after its end."""
    # Without the note it is removed when it has ended, as any other that nobody looks after.
    with contextlib.suppress(OSError):
        (paths.session(session) / holding.LEFT).touch(mode=0o600)


def remove_session(paths: StatePaths, session: str) -> None:
    """Remove the directory of a session; what cannot be removed stays for the next ``down``."""
    trees.remove(paths.session(session))


def empty_session(paths: StatePaths, session: str, late: Callable[[], bool]) -> bool:
    """Remove all of a session but what is still to be told of it: who is killed meanwhile tells nobody.

    When ``late`` says so it ends with what is left; say whether nothing is.
    """
    directory = paths.session(session)
    rest = {BEFORE, holding.ATTENDED} if (directory / BEFORE).exists() else {holding.ATTENDED}
    with contextlib.suppress(OSError):
        for entry in directory.iterdir():
            if entry.name not in rest:
                trees.remove(entry, late)
        if BEFORE not in rest and {entry.name for entry in directory.iterdir()} <= rest:
            trees.remove(directory)
        else:
            # Whoever looks after it later sees by the lock that nobody does.
            return {entry.name for entry in directory.iterdir()} <= rest
    return True


def told_session(paths: StatePaths, session: str) -> None:
    """Note that it was told what a session changed; of one that was emptied nothing stays."""
    directory = paths.session(session)
    with contextlib.suppress(OSError):
        (directory / BEFORE).unlink(missing_ok=True)
        if {entry.name for entry in directory.iterdir()} <= {holding.ATTENDED}:
            trees.remove(directory)


def sessions_of(paths: StatePaths) -> list[str]:
    """Return the ids of the sessions that have files, sorted."""
    with contextlib.suppress(OSError):
        return sorted(entry.name for entry in (paths.root / "sessions").iterdir())
    return []


def remove_sessions(paths: StatePaths, keep: Sequence[str] = ()) -> int:
    """Remove the directories of all sessions but some; return how many there were."""
    count = 0
    with contextlib.suppress(FileNotFoundError):
        for directory in (paths.root / "sessions").iterdir():
            if directory.name not in keep:
                trees.remove(directory)
                count += 1
    return count


def _mount_point(
    top: int, shown: Path, part: str, *, directory: bool, only_below: Iterable[str] | None = None
) -> None:
    """Make a directory or an empty file to mount on, where there is nothing."""
    path = PurePosixPath(part)
    if only_below is not None and not any(path.is_relative_to(above) for above in only_below):
        return
    with _descend(top, path.parts if directory else path.parent.parts, shown) as parent:
        if not directory:
            with contextlib.suppress(FileExistsError):
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                os.close(os.open(path.name, flags, 0o600, dir_fd=parent))


def _files(managed: ManagedDir, more: Mapping[str, bytes]) -> dict[str, bytes]:
    return {**{name: text.encode() for name, text in managed.files.items()}, **more}


def _manage(directory: Path, files: Mapping[str, bytes]) -> bool:
    """Bring a directory, which no container can write, to exactly these files; say whether it was not."""
    _own_directory(directory)
    folders = {str(above) for name in files for above in PurePosixPath(name).parents} - {"."}
    changed = False
    try:
        for entry in sorted(directory.rglob("*"), reverse=True):
            name = str(entry.relative_to(directory))
            folder = entry.is_dir() and not entry.is_symlink()
            if name not in (folders if folder else files):
                changed = True
                entry.rmdir() if folder else entry.unlink()
        for name, content in files.items():
            file = directory / name
            if not file.is_file() or file.read_bytes() != content:
                changed = True
                file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                # Beside the directory: any name in it may be one of the user's.
                partial = directory.with_name(f"{directory.name}.new")
                partial.write_bytes(content)
                partial.replace(file)
    except OSError as error:
        raise CorralError(f"cannot write {directory}: {error.strerror}", oserrors.hint(error)) from error
    return changed


def _own_directory(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CorralError(
            f"cannot make the directory {path}: {error.strerror}", oserrors.hint(error)
        ) from error
    if path.stat().st_uid != os.geteuid():
        raise CorralError(f"{path} belongs to uid {path.stat().st_uid}, not to you")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    _own_directory(path)
    try:
        descriptor = os.open(path, DIRECTORY)
    except OSError as error:
        raise CorralError(
            f"cannot use the state directory {path}: {error.strerror}", oserrors.hint(error)
        ) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _descend(top: int, parts: Sequence[str], shown: Path) -> Iterator[int]:
    """Open a directory below ``top``, making what is missing; a symbolic link on the way is an error."""
    current = os.dup(top)
    try:
        for part in parts:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o700, dir_fd=current)
            below = os.open(part, DIRECTORY, dir_fd=current)
            os.close(current)
            current = below
        yield current
    except OSError as error:
        where = shown.joinpath(*parts)
        raise CorralError(
            f"cannot use the state directory {where}: {error.strerror}",
            oserrors.hint(error)
            or f"it must be a plain directory of yours; look at it, then move it away: {where}",
        ) from error
    finally:
        os.close(current)


def _write_new(parent: int, name: str, mode: int, content: str) -> bool:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, mode, dir_fd=parent)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        return True
    except OSError:
        # Half a file would stay for good: seeds are written only where nothing is.
        os.unlink(name, dir_fd=parent)
        raise
