"""What a build prints: kept whole in a file, shown line by line, cut down to what helps when it fails."""

from __future__ import annotations

import base64
import contextlib
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from urllib.parse import quote, unquote, urlsplit

Progress = Callable[[str], None]

SHOWN_LINES = 12
SHOWN_LENGTH = 160
READ_LINES = 200
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# BuildKit ends with the whole step once more, first as it stands in the Dockerfile, then in one line.
_EXCERPT = re.compile(r"Dockerfile:[0-9]+")

_AUTHORITY = "give your network's own certificate authority in build.ca_certificates"

# (a piece of what the tools print, what it means for the user)
_HINTS = (
    ("No system certificates available", "give the mirror's certificate in build.ca_certificates"),
    ("certificate verif", _AUTHORITY),
    ("CERTIFICATE_VERIFY_FAILED", _AUTHORITY),
    ("SELF_SIGNED_CERT_IN_CHAIN", _AUTHORITY),
    ("UNABLE_TO_GET_ISSUER_CERT", _AUTHORITY),
    ("407 Proxy Authentication", "the proxy wants a login: put it into build.proxy"),
    ("Temporary failure resolving", "the build has no DNS: set build.proxy, or build.apt_mirror"),
    ("Could not connect to", "the package mirror cannot be reached: set build.proxy or build.apt_mirror"),
    ("NewConnectionError", "the Python package index cannot be reached: set build.proxy or build.pip_index"),
    ("No matching distribution", "the Python package index has no such wheel: set build.pip_index"),
    ("DO NOT MATCH THE HASHES", "the package index serves something else than corral was released with"),
    ("EAI_AGAIN", "the npm registry cannot be reached: set build.proxy or build.npm_registry"),
    ("ECONNREFUSED", "the npm registry cannot be reached: set build.proxy or build.npm_registry"),
    ("code E404", "the npm registry does not have that version: set build.npm_registry"),
    (
        "computed checksum did NOT match",
        "the npm registry serves something else than corral was released with",
    ),
    ("Unable to locate package", "the base image's release has no such package; look at build.base_image"),
    ("pull access denied", "the base image is nowhere to be had; look at build.base_image"),
    ("manifest unknown", "the base image is nowhere to be had; look at build.base_image"),
)


class BuildLog:
    """A context manager around one build.

    Args:
        path: the file that keeps every line; replaced, readable by the user only.
        proxies: addresses whose logins are never shown or kept.
        progress: gets each line.
    """

    def __init__(self, path: Path, proxies: Iterable[str], progress: Progress) -> None:
        self.path = path
        self._hide = _hider(proxies)
        self._progress = progress
        self._last: deque[str] = deque(maxlen=READ_LINES)
        self._partial = ""

    def __enter__(self) -> BuildLog:
        self.path.touch(mode=0o600)
        self.path.chmod(0o600)
        self._file = self.path.open("w", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.line(self._partial)
        self._file.close()

    def text(self, text: str) -> None:
        """Take a piece of output that may begin and end inside a line."""
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            self.line(line)

    def line(self, line: str) -> None:
        """Take one line. Of one that was drawn again and again, the last state counts."""
        shown = self._hide(_COLOUR.sub("", line).rstrip().rpartition("\r")[2])
        if shown:
            self._file.write(shown + "\n")
            self._last.append(shown)
            self._progress(shown)

    def failed(self, why: str) -> str:
        """Return the message of a failure: why, then the last lines that say something."""
        lines = [line for line in self._last if line.strip("-")]
        for index, line in enumerate(lines):
            if _EXCERPT.fullmatch(line):
                lines = lines[:index]
                break
        cut = [
            line if len(line) <= SHOWN_LENGTH else line[:SHOWN_LENGTH] + "…" for line in lines[-SHOWN_LINES:]
        ]
        return "\n".join(["building the image failed: " + self._hide(why), *(f"  | {line}" for line in cut)])

    def hint(self) -> str:
        """Return the fix that the output suggests, and where all of it is."""
        return hint_for(self._last, f"the whole output is in {self.path}")


def hint_for(lines: Sequence[str], otherwise: str) -> str:
    """Return the fix that the last lines of a build suggest, followed by ``otherwise``."""
    for piece, fix in _HINTS:
        if any(piece.lower() in line.lower() for line in lines):
            return f"{fix}; {otherwise}"
    return otherwise


def _hider(proxies: Iterable[str]) -> Callable[[str], str]:
    """Return a function that blots out the logins of proxies, which tools like to print when they fail."""
    secrets: set[str] = set()
    for address in proxies:
        with contextlib.suppress(ValueError):
            login, at, _ = urlsplit(address).netloc.rpartition("@")
            if at:
                secrets |= _forms(login)
    if not secrets:
        return lambda text: text
    longest_first = sorted(secrets, key=len, reverse=True)
    # Whatever the case: %2f is %2F.
    known = re.compile("|".join(map(re.escape, longest_first)), re.IGNORECASE)
    return lambda text: known.sub("***", text)


def _forms(login: str) -> set[str]:
    """Return a login and what is secret of it: as given, decoded, encoded anew, and as in a header."""
    user, _, password = login.partition(":")
    decoded = f"{unquote(user)}:{unquote(password)}"
    forms = {login, unquote(login), base64.b64encode(decoded.encode()).decode()}
    for secret in (login, password or user):
        forms |= {secret, unquote(secret), quote(unquote(secret), safe=""), quote(unquote(secret), safe=":")}
    return forms - {""}
