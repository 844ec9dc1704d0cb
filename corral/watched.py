"""Files in writable mounts that this host executes or obeys: which they are, and what a session did to them.

Nothing an agent could have left is followed: every file is opened step by step, without a single link.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from corral import gitplaces
from corral.looking import MAX_CONFIGS, Entry, Look, kind
from policy import gitconfig, profiles
from policy.mounts import is_within
from policy.records import dataclass
from policy.revision import shown

# Below a working tree: what shells, editors and agents of the host run or load when they come there. All
# below a name that ends in '/'; each profile adds its own.
FILES = (
    ".envrc",  # direnv
    "mise/config.toml",
    ".mise/config.toml",
    ".pre-commit-config.yaml",
    ".cargo/config",
    ".cargo/config.toml",
    ".npmrc",
    ".yarnrc.yml",
    ".vscode/tasks.json",
    ".vscode/launch.json",
    ".vscode/settings.json",
    ".vscode/extensions.json",
    ".vscode/mcp.json",
    ".devcontainer.json",
    ".mcp.json",
    ".claude/settings.json",
    ".claude/settings.local.json",
    ".cursor/mcp.json",
    ".cursor/hooks.json",
    ".gemini/settings.json",
    ".codex/config.toml",
    ".zed/tasks.json",
    ".zed/settings.json",
    ".nvim.lua",
    # Read from the directory that a program is started in.
    ".exrc",
    ".vimrc",
    ".gvimrc",
    ".nvimrc",
    ".dir-locals.el",
    ".Rprofile",
    ".pdbrc",
    ".irbrc",
    ".pryrc",
    ".gdbinit",
    ".lldbinit",
    ".yarnrc",
    # What other systems than Git obey.
    ".hg/hgrc",
    ".jj/repo/config.toml",
    ".claude/hooks/",
    ".devcontainer/",
    ".husky/",
    ".idea/",
)
# Names of which there may be many. What is a directory counts with all below it.
PATTERNS = (
    "*.code-workspace",
    "mise*.toml",
    ".mise*.toml",
    "lefthook*",
    ".lefthook*",
    ".config/mise*",
)
# Below a Git directory, and below that of a linked worktree.
# What is still to do of a rebase may be programs.
_TODO = "rebase-merge/git-rebase-todo"
GIT_FILES = ("info/attributes", "commondir", _TODO)
WORKTREE_FILES = ("commondir", "gitdir", "config.worktree", _TODO)
# Examples that Git puts there and never executes.
SAMPLE = ".sample"
DIFF_LINES = 30
# Of a configuration of Git's: each line is a key that counts.
CONFIG_LINES = 200
# Findings of which it is told what is different.
DETAILED = 200
# Characters of a line that is shown.
WIDEST = 300
# Lines of one text times lines of the other. Comparing takes more than that many steps, and an agent knows
# which texts take most; beyond, lines are only counted.
COMPARED = 1 << 20
# Files that may hold passwords: of such a line only the key is shown.
_WITH_PASSWORDS = frozenset({".npmrc", ".yarnrc.yml"})
_PASSWORD = re.compile(r"auth|token|passw|secret|key", re.IGNORECASE)
_VALUE = re.compile(r"[=:]")


@dataclass(frozen=True)
class Finding:
    """A path that is not what it was, with printable lines about it. ``before`` None: there was nothing.

    ``told_only`` is about what could not be looked at: there is nothing to put back.
    """

    path: str
    what: str
    before: Entry | None
    lines: tuple[str, ...] = ()
    told_only: bool = False


def project_files() -> tuple[str, ...]:
    """Return what is watched below each mount; a name that ends in '/' means all below it."""
    own = [part for name in profiles.names() for part in profiles.get(name).project_files]
    return tuple(dict.fromkeys((*FILES, *own)))


def hook_directories(trees: Sequence[str], environ: Mapping[str, str], look: Look | None = None) -> list[str]:
    """Return the directories of hooks of all repositories in mounted directories; some may be missing."""
    found = gitplaces.find(trees, environ, look or Look()).hooks
    # One that names another Git directory has its hooks there.
    return [path for path in found if not kind(str(PurePosixPath(path).parent / "commondir"))]


def closable(trees: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the directories of hooks that are there, also where ``core.hooksPath`` leads, sorted."""
    return gitplaces.find(trees, environ, Look()).closable


def snapshot(trees: Sequence[str], search: Iterable[str], environ: Mapping[str, str]) -> Look:
    """Return what is there now.

    Args:
        trees: directories that are mounted writable.
        search: the directories of the user's PATH.
        environ: the user's.
    """
    look = Look()
    programs = [os.path.normpath(part) for part in search if part.startswith("/")]
    # What is looked at by its own name comes first, so nothing an agent piles up keeps it from being seen.
    for tree in trees:
        look.begin(tree)
        look.read(f"{tree}/.git")
        for part in project_files():
            if not part.endswith("/"):
                look.read(f"{tree}/{part}")
    places = gitplaces.find(trees, environ, look)
    for directory in places.git:
        for part in GIT_FILES:
            look.read(f"{directory}/{part}")
    for tree in trees:
        look.begin(tree)
        for path in _watched(tree, programs, places, look):
            look.read(path)
    return look


def _watched(tree: str, programs: Iterable[str], places: gitplaces.Places, look: Look) -> Iterator[str]:
    for directory in dict.fromkeys((*places.hooks, *places.closable)):
        if is_within(directory, tree):
            yield directory
            yield from (path for path in look.below(directory) if not path.endswith(SAMPLE))
    for directory in places.git:
        if is_within(directory, tree):
            for path, _ in look.names(f"{directory}/worktrees"):
                yield from (f"{path}/{part}" for part in WORKTREE_FILES)
    for directory in programs:
        if is_within(directory, tree):
            yield from (path for path, folder in look.names(directory) if not folder)
    for part in project_files():
        if part.endswith("/"):
            yield f"{tree}/{part[:-1]}"
            yield from look.below(f"{tree}/{part[:-1]}")
    for pattern in PATTERNS:
        parent, _, name = f"{tree}/{pattern}".rpartition("/")
        for path, folder in look.names(parent, name):
            yield path
            if folder:
                yield from look.below(path)


def compare(before: Look, after: Look, search: Iterable[str]) -> list[Finding]:
    """Return what a session changed, by path, and what could not be looked at whole.

    Of a Git configuration only keys count that are not harmless.
    """
    programs = {os.path.normpath(part) for part in search if part.startswith("/")}
    found = [
        Finding(path, why, None, told_only=True) for path, why in sorted({**before.cut, **after.cut}.items())
    ]
    own = project_files()
    left = 2 * MAX_CONFIGS
    # In the order of looking: a report ends somewhere, and what is known by name comes first, so nothing an
    # agent piles up hides it.
    for path in dict.fromkeys((*after.found, *before.found)):
        old, new = before.found.get(path), after.found.get(path)
        if (old is None and new is None) or (old is not None and old.same(new)):
            continue
        # What is only in one of them was perhaps not seen in the other.
        if (old is None and before.uncertain(path)) or (new is None and after.uncertain(path)):
            continue
        name = PurePosixPath(path)
        config = path in before.configs or (old is None and path in after.configs)
        config = config and not any(f"/{path}".endswith(f"/{part}") for part in own)
        config = config and all(_kept(entry) for entry in (old, new))
        if config:
            # What is too much to be understood is told as any other file is.
            left -= len(_text(old)) + len(_text(new))
        if config and left >= 0:
            lines = gitconfig.differences(_text(old), _text(new))
            if lines:
                what = "keys that may make Git run something"
                found.append(Finding(path, what, old, tuple(_shown(lines, CONFIG_LINES))))
        elif str(name.parent) in programs:
            if new is not None and new.executable:
                found.append(Finding(path, "a program in a directory of your PATH", old))
        elif old is not None or (new is not None and not stat.S_ISDIR(new.mode)):
            lines = list(_diff(name.name, old, new)) if len(found) < DETAILED else []
            found.append(Finding(path, _what(old, new), old, tuple(lines)))
    return found


def _kept(entry: Entry | None) -> bool:
    return entry is None or (stat.S_ISREG(entry.mode) and entry.content is not None)


def _what(old: Entry | None, new: Entry | None) -> str:
    if new is None:
        return "removed"
    if stat.S_ISLNK(new.mode):
        return "is a link now"
    what = "new" if old is None else "changed"
    return f"{what}, and too large to be compared" if new.unread else what


def _text(entry: Entry | None) -> str:
    return "" if entry is None else entry.text


def _diff(name: str, old: Entry | None, new: Entry | None) -> Iterator[str]:
    lines = list(_differences(_text(old).splitlines(), _text(new).splitlines()))
    yield from _shown(map(_hidden, lines) if name in _WITH_PASSWORDS else lines, DIFF_LINES)


def _differences(old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    if len(old) * len(new) <= COMPARED:
        import difflib

        yield from list(difflib.unified_diff(old, new, lineterm="", n=0))[2:]
        return
    gone, come = Counter(old), Counter(new)
    gone, come = gone - come, come - gone
    if not gone and not come:
        yield "the same lines in another order"
    for sign, lines, many in (("-", old, gone), ("+", new, come)):
        for line in lines:
            if many[line] > 0:
                many[line] -= 1
                yield sign + line


def _hidden(line: str) -> str:
    """Return a line without what follows the first word that tells of a password."""
    word = _PASSWORD.search(line)
    value = _VALUE.search(line, word.end()) if word else None
    return f"{line[: value.end()]} (not shown)" if value else line


def _shown(lines: Iterable[str], most: int) -> Iterator[str]:
    """Yield lines as they are printed; of many, or of long ones, the beginning."""
    more = 0
    for count, line in enumerate(lines):
        if count < most:
            yield shown(line if len(line) <= WIDEST else f"{line[:WIDEST]}…")
        else:
            more += 1
    if more:
        yield f"... and {more} lines more"


def writable(mounts: Iterable[tuple[Path, bool]]) -> list[str]:
    """Return the directories among (path, read-only) that an agent can write."""
    return [str(path) for path, read_only in mounts if not read_only and path.is_dir()]
