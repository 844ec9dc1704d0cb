"""What was noted about a session when it was made, beside its files, where no container sees it."""

from __future__ import annotations

import json
from dataclasses import asdict

from corral import oserrors
from policy import savedfile
from policy.errors import CorralError
from policy.identity import StatePaths
from policy.records import dataclass

FILE = "session.json"
# What may go on without the corral that started it.
LEAVABLE = frozenset({"run", "shell"})


@dataclass(frozen=True)
class Note:
    """What a session was made of: hash of the approved policy, id of the image. ``name`` is the user's.

    ``keep``: its container stays when it has ended.
    """

    name: str = ""
    policy: str = ""
    image: str = ""
    keep: bool = False
    purpose: str = ""


def write_note(paths: StatePaths, session: str, note: Note) -> None:
    """Keep a note beside the session's files, where no container sees it.

    Raises:
        CorralError: the disk refuses.
    """
    file = paths.session(session) / FILE
    try:
        file.write_text(json.dumps(asdict(note)) + "\n", encoding="utf-8")
    except OSError as error:
        raise CorralError(f"cannot write {file}: {error.strerror}", oserrors.hint(error)) from error


def read_note(paths: StatePaths, session: str) -> Note:
    """Return what was noted; what cannot be read is empty."""
    try:
        body = savedfile.value(paths.session(session) / FILE)
        words = {key: str(body[key]) for key in ("name", "policy", "image")}
        return Note(**words, keep=body.get("keep") is True, purpose=str(body.get("purpose", "")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Note()
