"""What a program made of a terminal: enough to bring another terminal to the same state, and one back. Pure.

Only modes are followed, not what is on the screen: a program that fills the screen draws it again when its
size changes, and of one that prints lines the last ones are shown again.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Any

CURSOR = 25
# Modes (CSI ? n h) that a terminal has on at the beginning; all others are off.
ON = frozenset({7, CURSOR})
ALTERNATE = frozenset({47, 1047, 1049})
# Followed: keys, wrapping, cursor, mouse, focus, paste, colours and size reports. 2026 holds back drawing.
_MOUSE = frozenset({1000, 1002, 1003, 1005, 1006, 1007, 1015, 1016})
FOLLOWED = ON | ALTERNATE | _MOUSE | {1, 12, 66, 1004, 2004, 2027, 2031, 2048}
# Of the lines of a program that does not fill the screen, this much is shown again.
REPLAYED = 32768

_CSI = rb"\x1b\[[0-?]*[ -/]*[@-~]"
# Without an escape in its body: what begins again and again and never ends must not be read again and again.
_STRING = rb"\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"
_SEQUENCE = re.compile(_CSI + rb"|" + _STRING + rb"|\x1b[ -/]*[0-OQ-WYZ\\\x60-~]", re.DOTALL)
_INCOMPLETE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|[ -/]*|[\]PX^_][^\x07\x1b]*\x1b?)\Z", re.DOTALL)
_MODES = re.compile(rb"\x1b\[\?([0-9;]+)([hl])")
_PUSH = re.compile(rb"\x1b\[>([0-9]*)u")
_POP = re.compile(rb"\x1b\[<([0-9]*)u")
_OTHER_KEYS = re.compile(rb"\x1b\[>4(?:;([0-9]*))?m")
_COLOURS = re.compile(rb"\x1b\[[0-9;:]*m")
# C1 controls too, which are two bytes in UTF-8.
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]")
# An unended string is not waited for longer than this.
LONGEST = 65536


# Of a line that has not ended.
TAIL = 4096


class Screen:
    """Follows a program's output.

    ``changed`` is called when a mode changed that lasts; ``tail`` is the line that has not ended.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.tail = b""
        self.changed: Callable[[], None] = lambda: None
        self._reset()

    def body(self) -> dict[str, Any]:
        """Return what it is now, as JSON has it."""
        return {
            "modes": {str(number): on for number, on in self.modes.items()},
            "keyboards": self.keyboards,
            "other_keys": self.other_keys,
            "keypad": self.keypad,
            "tail": base64.b64encode(self.tail).decode(),
        }

    @classmethod
    def of(cls, body: Any) -> Screen:
        """Return what ``body`` returned.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is something else.
        """
        made = cls()
        made.modes = {int(number): on is True for number, on in body["modes"].items()}
        made.modes = {number: on for number, on in made.modes.items() if number in FOLLOWED}
        made.keyboards = [int(flags) % 10000 for flags in body["keyboards"]][:16]
        made.other_keys, made.keypad = int(body["other_keys"]) % 10000, body["keypad"] is True
        made.tail = base64.b64decode(body["tail"], validate=True)[-TAIL:]
        return made

    def _lasting(self) -> tuple[object, ...]:
        # The cursor is switched off and on with every picture.
        modes = {number: on for number, on in self.modes.items() if number != CURSOR}
        return modes, tuple(self.keyboards), self.other_keys, self.keypad

    def _reset(self) -> None:
        self.modes: dict[int, bool] = {}
        self.keyboards: list[int] = []
        self.other_keys = 0
        self.keypad = False

    def feed(self, data: bytes) -> None:
        """Take the next piece of output."""
        before = self._lasting()
        line = data.rpartition(b"\n")
        self.tail = (line[2] if line[1] else self.tail + line[2])[-TAIL:]
        data = self._rest + data
        tail = _INCOMPLETE.search(data[-LONGEST:])
        self._rest = tail.group() if tail else b""
        for match in _SEQUENCE.finditer(data[: len(data) - len(self._rest)]):
            self._take(match.group())
        if self._lasting() != before:
            self.changed()

    def _take(self, sequence: bytes) -> None:
        if match := _MODES.fullmatch(sequence):
            for number in filter(None, match[1].split(b";")):
                if len(number) < 6 and int(number) in FOLLOWED:
                    self.modes[int(number)] = match[2] == b"h"
        elif match := _PUSH.fullmatch(sequence):
            self.keyboards = [*self.keyboards[-15:], _number(match[1], 0)]
        elif match := _POP.fullmatch(sequence):
            self.keyboards = self.keyboards[: max(len(self.keyboards) - _number(match[1], 1), 0)]
        elif match := _OTHER_KEYS.fullmatch(sequence):
            self.other_keys = _number(match[1] or b"", 0)
        elif sequence in (b"\x1b=", b"\x1b>"):
            self.keypad = sequence == b"\x1b="
        elif sequence == b"\x1bc":
            self._reset()

    @property
    def full(self) -> bool:
        """Whether the program draws on a screen of its own."""
        return any(self.modes.get(number) for number in ALTERNATE)

    def _changed(self) -> list[tuple[int, bool]]:
        found = [(number, on) for number, on in sorted(self.modes.items()) if on != (number in ON)]
        # The screen first: some terminals keep modes for each.
        return sorted(found, key=lambda row: row[0] not in ALTERNATE)

    def enter(self) -> bytes:
        """Return what brings a fresh terminal to the state the program made."""
        parts = [f"\x1b[?{number}{'h' if on else 'l'}" for number, on in self._changed()]
        parts += [f"\x1b[>{flags}u" for flags in self.keyboards]
        parts += [f"\x1b[>4;{self.other_keys}m"] if self.other_keys else []
        parts += ["\x1b="] if self.keypad else []
        return "".join(parts).encode()

    def leave(self) -> bytes:
        """Return what brings the terminal back."""
        parts = [f"\x1b[<{len(self.keyboards)}u"] if self.keyboards else []
        parts += ["\x1b[>4m"] if self.other_keys else []
        parts += ["\x1b>"] if self.keypad else []
        parts += [f"\x1b[?{number}{'l' if on else 'h'}" for number, on in reversed(self._changed())]
        return ("\x1b[0m" + "".join(parts)).encode()


def _number(text: bytes, default: int) -> int:
    return int(text[:4]) if text else default


def harmless(data: bytes, *, colour: bool = True) -> bytes:
    """Return output without what makes a terminal do more than show text: no mode, no query, no title.

    A terminal answers queries as if the answer were typed, and who reads a log types into a shell.
    """

    while True:
        made = _once(data, colour)
        # What is left when something was taken out may be a sequence of its own.
        if made == data:
            return made
        data = made


def _once(data: bytes, colour: bool) -> bytes:
    # Only text in UTF-8: half a character must not become a control when the byte after it goes.
    data = data.decode("utf-8", "replace").encode()
    parts, at = [], 0
    for match in _SEQUENCE.finditer(data):
        kept = match.group() if colour and _COLOURS.fullmatch(match.group()) else b""
        parts += [_text(data[at : match.start()]), kept]
        at = match.end()
    return b"".join([*parts, _text(data[at:])])


def _text(data: bytes) -> bytes:
    return _CONTROL.sub(b"", data)


def lines_again(data: bytes) -> bytes:
    """Return the last lines of the output of a program that does not fill the screen."""
    tail = data[-REPLAYED:]
    if len(tail) < len(data):
        tail = tail.partition(b"\n")[2]
    return harmless(tail)
