"""Keys that leave a session and let it run: a sequence such as ``ctrl-],ctrl-q``, found among what is typed.

Programs may have the terminal report keys in other ways than one byte each (xterm's modifyOtherKeys, kitty's
protocol), so each key is known in all its spellings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from policy.errors import ArgumentError

VARIABLE = "CORRAL_DETACH_KEYS"
OFF = "none"
MOST = 8
EXAMPLE = "write keys as a, ctrl-a, ctrl-] or ctrl-@, separated by commas; none switches it off"
_CTRL = re.compile(r"ctrl-([a-z@\[\\\]^_])")
# What a key that is let go is reported as, and one such as Ctrl by itself, where a program asked for that; it
# says nothing.
_SILENT = re.compile(rb"\x1b\[(?:[0-9:;]*:3|574(?:4[1-9]|5[0-4])[0-9:;]*)u")
# What is added to the number of what is held together with a key: locks of capitals and of numbers.
_LOCKS = (0, 64, 128, 192)


def _spellings(key: str) -> tuple[bytes, ...]:
    match = _CTRL.fullmatch(key)
    if match is None:
        code = ord(key)
        return (key.encode(), f"\x1b[{code}u".encode(), *_enhanced(code, 1))
    code = ord(match[1])
    return (bytes([code & 0x1F]), *_enhanced(code, 5), f"\x1b[27;5;{code}~".encode())


def _enhanced(code: int, held: int) -> Iterator[bytes]:
    for lock in _LOCKS:
        for event in ("", ":1"):
            yield f"\x1b[{code};{held + lock}{event}u".encode()


def parse(text: str) -> tuple[tuple[bytes, ...], ...]:
    """Return the spellings of each key of a sequence; nothing when it is switched off.

    Raises:
        ArgumentError: it is no sequence.
    """
    if text.strip().lower() == OFF:
        return ()
    keys = text.split(",")
    if len(keys) > MOST:
        raise ArgumentError(f"more than {MOST} detach keys", EXAMPLE)
    for key in keys:
        if not (_CTRL.fullmatch(key) or (len(key) == 1 and key.isascii() and key.isprintable())):
            raise ArgumentError(f"{key[:40]!r} is no key to detach with", EXAMPLE)
    return tuple(_spellings(key) for key in keys)


def chosen(given: str | None, environ: Mapping[str, str], profile: str) -> str:
    """Return which sequence counts: the option's, the environment's, the profile's own."""
    return given or environ.get(VARIABLE) or profile


class Matcher:
    """Looks for the sequence in what is typed.

    Args:
        sequence: as ``parse`` returns it.
    """

    def __init__(self, sequence: tuple[tuple[bytes, ...], ...]) -> None:
        self._sequence = sequence
        self.held = b""
        self._next = 0

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """Take what was typed; return what the program gets of it, and whether the sequence is complete.

        Keys that may be the beginning of the sequence are held back until it is sure that they are not.
        """
        if not self._sequence:
            return data, False
        passed = b""
        while data:
            key = next((k for k in self._sequence[self._next] if data.startswith(k)), None)
            released = _SILENT.match(data)
            if key is not None:
                self.held += key
                self._next += 1
                data = data[len(key) :]
                if self._next == len(self._sequence):
                    return passed, True
            elif self._next and released is not None:
                self.held += released.group()
                data = data[released.end() :]
            elif self._next:
                # Not it. What was held is the program's; the same byte may begin anew.
                passed, self.held, self._next = passed + self.held, b"", 0
            else:
                # Up to where it may begin. An escape sequence is one key, whatever bytes it is made of.
                size = _key_size(data)
                passed, data = passed + data[:size], data[size:]
        return passed, False


_ESCAPED = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|[^\[O])", re.DOTALL)


def _key_size(data: bytes) -> int:
    match = _ESCAPED.match(data)
    return match.end() if match else 1
