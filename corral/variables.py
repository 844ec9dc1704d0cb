"""Variables that ``corral run -e`` gives to a session: by the channel of the secrets, never by Docker."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from policy.errors import ArgumentError
from policy.secrets import MAX_VALUE, changes_behaviour

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Bytes of all together: the kernel gives arguments and environment of a program not much more.
MOST = 1 << 20


def chosen(given: Sequence[str], environ: Mapping[str, str], fixed: Iterable[str]) -> dict[str, str]:
    """Return the variables that options say, the last of each name; no message names a value.

    Args:
        given: each NAME=VALUE, or NAME for what the variable is in ``environ``.
        environ: the user's environment.
        fixed: what the profile and corral set themselves.

    Raises:
        ArgumentError: one is malformed, not set, too long, or changes what programs do.
    """
    taken = frozenset(fixed)
    found: dict[str, str] = {}
    for number, text in enumerate(given, 1):
        name, equals, value = text.partition("=")
        # What is no name may be a piece of a secret.
        if not _NAME.fullmatch(name):
            raise ArgumentError(
                f"-e number {number} begins with no variable name", "write -e NAME=VALUE, or -e NAME"
            )
        what = changes_behaviour(name)
        if what is not None:
            raise ArgumentError(
                f"-e {name}: sets {what}", f"leave it out; a command may set it: -- env {name}=VALUE PROGRAM"
            )
        if name in taken:
            raise ArgumentError(f"-e {name}: is set by the profile", f"leave out {name}")
        if not equals:
            if name not in environ:
                raise ArgumentError(f"-e {name}: not set in your environment", f"-e {name}=VALUE")
            value = environ[name]
        found[name] = _checked(name, value)
    if sum(len(name) + len(value.encode()) for name, value in found.items()) > MOST:
        raise ArgumentError(f"-e: more than {MOST} bytes in all", "put them into a file that is mounted")
    return found


def _checked(name: str, value: str) -> str:
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ArgumentError(f"-e {name}: its value is not UTF-8", "save it as UTF-8") from None
    if "\0" in value:
        raise ArgumentError(f"-e {name}: a zero byte in its value", "encode it, for example as base64")
    if size > MAX_VALUE:
        raise ArgumentError(f"-e {name}: longer than {MAX_VALUE} bytes", "put it into a file that is mounted")
    return value
