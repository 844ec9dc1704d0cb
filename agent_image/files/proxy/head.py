"""The head of a request, read in whatever pieces it comes. Pure.

Only what decides is kept: method and target. Strict, because whoever reads a line differently than we do is a
way around us: a line ends with CR LF and with nothing else.
"""

from __future__ import annotations

import re

LIMIT = 8192

_END = b"\r\n\r\n"
# The token of RFC 9110; a target is anything visible, it is judged elsewhere.
_REQUEST = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([!-~]+) HTTP/1\.[01]")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[\t -~\x80-\xff]*")
_BEGINNING = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]")
# A line end that is not CR LF; a CR that ends what is there so far may still be followed by its LF.
_STRAY = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)")
_BODY = (b"content-length", b"transfer-encoding")


class BadHead(ValueError):
    """Not a request this proxy reads. The text says why, and never holds what was sent."""


class HeadReader:
    """Takes bytes until the head is whole; then ``method``, ``target`` and ``rest``, what came after it."""

    def __init__(self) -> None:
        self.method = ""
        self.target = ""
        self.rest = b""
        self._seen = bytearray()

    def feed(self, data: bytes) -> bool:
        """Take the next bytes, at least one; say whether the head is whole. Not to be called after that.

        Raises:
            BadHead: a rule is broken, as soon as that is certain, or it is longer than ``LIMIT``.
        """
        # What was looked at before, but for an end that may have been cut.
        known = max(0, len(self._seen) - len(_END) + 1)
        self._seen += data
        end = self._seen.find(_END, known)
        head = self._seen if end < 0 else self._seen[: end + len(_END)]
        if not _BEGINNING.match(head):
            raise BadHead("not a request of HTTP/1")
        if _STRAY.search(head, known):
            raise BadHead("a line that does not end with CR LF")
        if b"\0" in head[known:]:
            raise BadHead("a NUL")
        if len(head) > LIMIT or (end < 0 and len(head) == LIMIT):
            raise BadHead(f"a head of more than {LIMIT} bytes")
        if end < 0:
            return False
        self.rest = bytes(self._seen[len(head) :])
        self._parse(bytes(head[:end]).split(b"\r\n"))
        return True

    def _parse(self, lines: list[bytes]) -> None:
        request = _REQUEST.fullmatch(lines[0])
        if not request:
            raise BadHead("a request line that is not: METHOD target HTTP/1.1")
        self.method, self.target = request[1].decode("ascii"), request[2].decode("ascii")
        for line in lines[1:]:
            field = _FIELD.fullmatch(line)
            if not field:
                folded = line[:1] in (b" ", b"\t")
                raise BadHead("a folded header line" if folded else "a line that is no header field")
            if self.method == "CONNECT" and field[1].lower() in _BODY:
                raise BadHead("a CONNECT with a body")
