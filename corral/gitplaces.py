"""Where the Git of this host looks in writable mounts: repositories, their hooks and their configuration."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path

from corral import gitindex
from corral.looking import MAX_DEPTH, Look, behind_link, bytes_of, kind, real, text_of
from policy import gitconfig
from policy.mounts import is_within
from policy.records import dataclass

MAX_MODULES = 256
MAX_INCLUDES = 64
HUSKY = ".husky"
Entries = Sequence[tuple[str, str]]


@dataclass
class Places:
    """What was found, by path; ``hooks`` may be missing, ``closable`` are directories that are there."""

    git: list[str] = field(default_factory=list)
    hooks: list[str] = field(default_factory=list)
    closable: list[str] = field(default_factory=list)


def find(trees: Sequence[str], environ: Mapping[str, str], look: Look) -> Places:
    """Return what there is in mounted directories; ``look`` keeps what was read and what was too much.

    Args:
        trees: directories that are mounted writable.
        environ: the user's, for HOME and the places of the user's own configuration.
        look: reads.
    """
    places = Places()
    home = environ.get("HOME", "")
    common = _of_the_user(trees, environ, look)
    for tree in trees:
        look.begin(tree)
        _hooks(common, [tree], trees, home, look, places)
        # (Git directory, its working tree as far as that is not said in it)
        todo = deque((path, tree if path == f"{tree}/.git" else path) for path in git_directories(tree, look))
        todo += _repository(tree, trees, look)
        seen: set[str] = set()
        while todo:
            directory, base = todo.popleft()
            if directory in seen:
                continue
            if len(seen) >= MAX_MODULES:
                look.miss(tree, f"more than {MAX_MODULES} Git directories; not all could be looked at")
                break
            seen.add(directory)
            places.git.append(directory)
            places.hooks.append(f"{directory}/hooks")
            configs = [f"{directory}/config", f"{directory}/config.worktree"]
            worktrees = [path for path, folder in look.names(f"{directory}/worktrees") if folder]
            configs += [f"{path}/config.worktree" for path in worktrees]
            texts = _with_included(configs, trees, home, look)
            bases = _working_trees(directory, base, worktrees, texts, look)
            _hooks([*texts.values(), *common], bases, trees, home, look, places)
            todo += [(path, base) for path in _common(directory, trees, look)]
            for inner in _inner(directory, worktrees, bases, texts.values(), look):
                for place in _inside(inner, trees):
                    todo += _repository(place, trees, look)
    places.git = list(dict.fromkeys(places.git))
    places.hooks = list(dict.fromkeys(places.hooks))
    # What is something else than a directory, or led to by a link, is for the report.
    places.closable = sorted(path for path in {*places.hooks, *places.closable} if kind(path) == stat.S_IFDIR)
    return places


def git_directories(tree: str, look: Look) -> list[str]:
    """Return the Git directories that lie in a mounted directory: its own, and those of its submodules."""
    found = []
    for own in (tree, f"{tree}/.git"):
        if is_git(own):
            found += [own, *_modules(f"{own}/modules", look)]
    return found


def is_git(path: str) -> bool:
    """Return whether Git takes a directory for a repository."""
    parts = ("objects", "commondir")
    return (
        kind(path) == stat.S_IFDIR and kind(f"{path}/HEAD") != 0 and any(kind(f"{path}/{p}") for p in parts)
    )


def _repository(tree: str, trees: Sequence[str], look: Look) -> list[tuple[str, str]]:
    """Return the Git directory of a working tree, as far as it lies in the mounts, with that tree."""
    own = f"{tree}/.git"
    entry = look.read(own)
    if entry is None or stat.S_ISDIR(entry.mode):
        return [(own, tree)] if is_git(own) else []
    word, _, path = entry.text.partition(":")
    if stat.S_ISLNK(entry.mode):
        path = own
    elif word != "gitdir" or not path.strip():
        return []
    return [(place, tree) for place in _inside(_joined(tree, path.strip(), ""), trees) if is_git(place)]


def _common(directory: str, trees: Sequence[str], look: Look) -> list[str]:
    """Return where Git finds the rest of a Git directory that names another one."""
    entry = look.read(f"{directory}/commondir")
    if entry is None or not entry.text.strip():
        return []
    places = _inside(_joined(directory, entry.text.strip(), ""), trees)
    return [place for place in places if kind(place) == stat.S_IFDIR]


def _inner(
    directory: str, worktrees: Iterable[str], bases: Sequence[str], texts: Iterable[Entries], look: Look
) -> list[str]:
    """Return the working trees inside of those of a repository, into each of which Git goes for a status."""
    shared = [path for path, folder in look.names(directory, "sharedindex.*") if not folder]
    sha256 = any(value.lower() == "sha256" for text in texts for _, value in text)
    names: dict[bytes, None] = {}
    for index in (f"{directory}/index", *shared, *(f"{path}/index" for path in worktrees)):
        what = kind(index)
        if what not in (0, stat.S_IFREG):
            look.miss(index, "is no file, so nobody knows which submodules there are")
        for name in _gitlinks(index, sha256=sha256, look=look) if what == stat.S_IFREG else ():
            if name:
                names[name] = None
            elif shared:
                look.miss(index, "cannot be read, so nobody knows which submodules there are")
    if len(names) > MAX_MODULES:
        look.miss(directory, f"more than {MAX_MODULES} submodules; not all could be looked at")
    found = [os.fsdecode(name) for name in list(names)[:MAX_MODULES]]
    return [_joined(base, name, "") for base in bases for name in found]


def _gitlinks(index: str, *, sha256: bool, look: Look) -> list[bytes]:
    data = bytes_of(index, look.indexes_left)
    if data is not None and len(data) <= look.indexes_left:
        look.indexes_left -= len(data)
        found, known = [], False
        for size in gitindex.HASHES if sha256 else gitindex.HASHES[:1]:
            try:
                found += gitindex.gitlinks(data, size)
                known = True
            except ValueError:
                continue
        if known or not data:
            return found
    look.miss(index, "cannot be read, so nobody knows which submodules there are")
    return []


def _modules(top: str, look: Look) -> list[str]:
    found: list[str] = []
    todo = deque([(top, 1)])
    while todo:
        directory, level = todo.popleft()
        for path, folder in look.names(directory):
            if not folder:
                continue
            if level > MAX_DEPTH:
                look.miss(path, f"more than {MAX_DEPTH} levels deep; not looked at")
            elif not is_git(path):
                todo.append((path, level + 1))
            elif len(found) >= MAX_MODULES:
                look.miss(top, f"more than {MAX_MODULES} Git directories; not all could be looked at")
                return found
            else:
                found.append(path)
                # Of what it has only its own submodules are of interest.
                if kind(f"{path}/modules") == stat.S_IFDIR:
                    todo.append((f"{path}/modules", level + 2))
    return found


def _of_the_user(trees: Sequence[str], environ: Mapping[str, str], look: Look) -> list[Entries]:
    """Return what is in the user's and the system's own configuration, and of what they include."""
    home = environ.get("HOME", "")
    own = environ.get("GIT_CONFIG_GLOBAL", "")
    files = [own] if own else [f"{environ.get('XDG_CONFIG_HOME') or f'{home}/.config'}/git/config"]
    files += [] if own else [f"{home}/.gitconfig"]
    files.append(environ.get("GIT_CONFIG_SYSTEM") or "/etc/gitconfig")
    texts: dict[str, Entries] = {}
    todo = deque(files)
    while todo and len(texts) < MAX_INCLUDES:
        path = todo.popleft()
        if path in texts or not path.startswith("/"):
            continue
        texts[path] = _parsed(path, text_of(path, follow=True) or "", look)
        todo.extend(_included(path, texts[path], home))
    for path in texts:
        for place in _inside(path, trees):
            look.configs.add(place)
            look.read(place)
    return list(texts.values())


def _with_included(configs: Iterable[str], trees: Sequence[str], home: str, look: Look) -> dict[str, Entries]:
    """Return what is in each configuration of a repository and in what it includes inside of the mounts."""
    texts: dict[str, Entries] = {}
    todo = deque(configs)
    included = 0
    while todo:
        path = todo.popleft()
        if path in texts:
            continue
        look.configs.add(path)
        entry = look.read(path)
        texts[path] = _parsed(path, entry.text if entry and stat.S_ISREG(entry.mode) else "", look)
        for target in _included(path, texts[path], home):
            for place in _inside(target, trees):
                included += 1
                if included > MAX_INCLUDES:
                    look.miss(f"{path}/include", f"more than {MAX_INCLUDES} files are included")
                    return texts
                todo.append(place)
    return texts


def _parsed(path: str, text: str, look: Look) -> Entries:
    if len(text) > look.configs_left:
        look.miss(path, "more configuration of Git's than is read; not all could be looked at")
        return ()
    look.configs_left -= len(text)
    return tuple(gitconfig.entries(text))


def _included(path: str, text: Entries, home: str) -> list[str]:
    return [
        _joined(os.path.dirname(path), value, home)  # noqa: PTH120 - text in, text out
        for key, value in text
        if gitconfig.includes(key)
    ]


def _joined(base: str, value: str, home: str) -> str:
    if home and (value == "~" or value.startswith("~/")):
        value = home + value[1:]
    return os.path.normpath(os.path.join(base, value.replace("\0", "")))  # noqa: PTH118 - text in, text out


def _inside(path: str, trees: Sequence[str]) -> list[str]:
    """Return the path, and what it leads to, as far as they lie in the mounts."""
    found = dict.fromkeys((path, real(path)))
    return [place for place in found if any(is_within(place, tree) and place != tree for tree in trees)]


def _working_trees(
    directory: str, base: str, worktrees: Iterable[str], texts: Mapping[str, Entries], look: Look
) -> list[str]:
    """Return the directories that a relative path in a repository's configuration is relative to."""
    found = [base]
    if Path(directory).name == ".git":
        found.append(str(Path(directory).parent))
    for path, text in texts.items():
        values = [value for key, value in text if key == "core.worktree"]
        found += [_joined(os.path.dirname(path), value, "") for value in values]  # noqa: PTH120 - as above
    for path in worktrees:
        entry = look.read(f"{path}/gitdir")
        if entry is not None and stat.S_ISREG(entry.mode) and entry.text.strip():
            found.append(str(Path(_joined(path, entry.text.strip(), "")).parent))
    return list(dict.fromkeys(found))


def _hooks(
    texts: Iterable[Entries],
    bases: Sequence[str],
    trees: Sequence[str],
    home: str,
    look: Look,
    places: Places,
) -> None:
    """Add where ``core.hooksPath`` leads inside of the mounts."""
    values = [value for text in texts for key, value in text if key == "core.hookspath"]
    for value in dict.fromkeys(values):
        for base in bases:
            path = _joined(base, value, home)
            if not any(is_within(path, tree) and path != tree for tree in trees):
                continue
            if behind_link(path):
                look.miss(path, "core.hooksPath leads through a link; it is not read-only inside")
            for place in _inside(path, trees):
                if kind(place) == stat.S_IFDIR:
                    places.closable.append(_whole(place, base))


def _whole(path: str, base: str) -> str:
    """Return all of husky's directory for a part of it: its hooks call what lies beside them."""
    husky = f"{base}/{HUSKY}"
    return husky if is_within(path, husky) and kind(husky) == stat.S_IFDIR else path
