"""Which revision of a policy its user has approved.

The record lies in the sandbox's state directory, which no policy can mount: an agent may rewrite corral.yaml,
and that changes nothing before somebody outside the fence has looked at it. A policy without a record, such
as one that came with a clone, allows all that it says anew.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral import oserrors, state
from policy.errors import ArgumentError, CorralError, PolicyError
from policy.identity import StatePaths
from policy.loader import LoadedPolicy
from policy.revision import Change, Machine, Revision, compare, revision, widens

FILE = "approved.json"
MAX_SIZE = 4 << 20
NEVER = "nobody has approved this policy yet; it allows:"
MORE = "the policy allows more than was approved:"
_SHA = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


@dataclass(frozen=True)
class Pending:
    """A policy and what of it is not approved: ``old`` is the approved revision, ``changes`` lead from it."""

    old: Revision | None
    new: Revision
    changes: tuple[Change, ...]

    @property
    def widens(self) -> bool:
        """Whether somebody has to agree."""
        return self.old is None or widens(self.changes)

    def body(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "approved": None if self.old is None else self.old.sha256,
            "policy": self.new.sha256,
            "widens": self.widens,
            "changes": [{"sign": one.sign, "text": one.text, "widens": one.widens} for one in self.changes],
        }

    def text(self) -> str:
        """Return what would be allowed in addition, a line each."""
        lines = [change.line() for change in self.changes if change.widens]
        return "\n".join([NEVER if self.old is None else MORE, *(f"  {line}" for line in lines)])


def machine() -> Machine:
    """Return this machine's memory."""
    return Machine(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def owner(loaded: LoadedPolicy) -> dict[str, str]:
    """Return whose approval it is: a sandbox's id is short, and its name is the agent's to write."""
    return {"project": str(loaded.project), "name": loaded.policy.name or loaded.project.name}


def read(paths: StatePaths, loaded: LoadedPolicy) -> Revision | None:
    """Return what was approved of a policy's sandbox; None without a record of it, or with a damaged one."""
    try:
        body = _record(paths.root / FILE)
        found = Revision.parse(str(body["revision"]))
    except (OSError, ValueError, KeyError, TypeError, PolicyError):
        return None
    return found if body.get("sha256") == found.sha256 and body.get("owner") == owner(loaded) else None


def _record(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        body = json.loads(stream.read(MAX_SIZE))
    if not isinstance(body, dict):
        raise ValueError("not a record")
    return body


def write(paths: StatePaths, approved: Revision, loaded: LoadedPolicy) -> None:
    """Record a revision as approved, whole or not at all; what the directory had under other names ends.

    Else a policy of an earlier name, written back by an agent, would still be approved.

    Raises:
        CorralError: the disk refuses, or the sandbox's state is another directory's.
    """
    state.remember_project(paths, loaded.project)
    file = paths.root / FILE
    _forget_others(file, str(loaded.project))
    body = {"sha256": approved.sha256, "owner": owner(loaded), "revision": approved.canonical()}
    text = json.dumps(body, indent=2) + "\n"
    try:
        descriptor, partial = tempfile.mkstemp(prefix=f".{FILE}.", dir=paths.root)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            Path(partial).replace(file)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CorralError(f"cannot write {file}: {error.strerror}", oserrors.hint(error)) from error


def _forget_others(own: Path, project: str) -> None:
    for file in own.parent.parent.glob(f"*/{FILE}"):
        try:
            if file != own and _record(file)["owner"]["project"] == project:
                file.unlink()
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError):
            continue
        except OSError as error:
            raise CorralError(f"cannot remove {file}: {error.strerror}", oserrors.hint(error)) from error


def pending(loaded: LoadedPolicy, paths: StatePaths) -> Pending:
    """Compare a policy with what was approved of it."""
    old, new = read(paths, loaded), revision(loaded)
    return Pending(old, new, compare(old, new, machine()))


def parse_sha(text: str) -> str:
    """Return the hex digest that a user typed.

    Raises:
        ArgumentError: it is none.
    """
    match = _SHA.fullmatch(text.strip().lower())
    if match is None:
        raise ArgumentError("this is not the hash of a policy", "corral policy diff prints it")
    return match[1]


def check_sha(found: Revision, accepted: str) -> None:
    """Compare a policy with the hash its user named.

    Raises:
        ArgumentError: it is no hash.
        PolicyError: it is another policy's.
    """
    if parse_sha(accepted) != found.sha256:
        raise PolicyError(
            f"the policy is not the one that was accepted: its hash is {found.sha256}",
            "look at it: corral policy diff",
        )


def approve(
    loaded: LoadedPolicy,
    paths: StatePaths,
    *,
    accepted: str | None,
    ask: Callable[[str], bool] | None,
    tell: Callable[[str], None],
    record: Callable[[Revision], None],
) -> None:
    """Return when the policy may be used; what was agreed to is recorded.

    Args:
        loaded: the policy.
        paths: the sandbox's.
        accepted: the hash its user named on the command line.
        ask: shows a question to somebody and returns the answer; None when nobody is there.
        tell: shows a line.
        record: keeps a revision as the approved one.

    Raises:
        PolicyError: it allows more than was approved, and nobody agreed.
    """
    found = pending(loaded, paths)
    if accepted is not None:
        check_sha(found.new, accepted)
    elif found.widens:
        text = found.text()
        if ask is None:
            raise PolicyError(
                text, f"read it, then agree to exactly this policy: --accept-policy {found.new.sha256}"
            )
        if not ask(f"{loaded.path}: {text}\nallow that?"):
            raise PolicyError("the policy was not approved", "change it, or agree to it")
    if found.new != found.old:
        if not found.widens:
            for line in narrowing(found.changes):
                tell(line)
        record(found.new)


def follow(before: LoadedPolicy, after: LoadedPolicy, paths: StatePaths) -> None:
    """Record an edit that the user asked corral for, if what was there before it was approved.

    Raises:
        CorralError: the disk refuses.
    """
    if not pending(before, paths).widens:
        write(paths, revision(after), after)


def narrowing(changes: Iterable[Change]) -> list[str]:
    """Return what is told about a policy that allows less than before."""
    return ["the policy allows less than before:", *(f"  {change.line()}" for change in changes)]
