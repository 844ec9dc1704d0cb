"""The ClientHello a client begins with: which name it says. Pure.

Strict where it costs nothing: whatever two readers could understand differently is refused. An encrypted
ClientHello is inside an outer one like any other; the outer name is all that anybody on the way can read.
"""

from __future__ import annotations

from .records import HANDSHAKE, NotTls, RecordReader

# A hello with keys against quantum computers is some 2 KiB, one with much to resume 16.
LIMIT = 1 << 16
# With its records' headers; only somebody who cuts it into single bytes needs more.
RAW_LIMIT = 1 << 17

CLIENT_HELLO = 1
SERVER_NAME, EARLY_DATA = 0, 42
HOST_NAME = 0

NOT_TLS, BAD_HELLO = "not-tls", "bad-hello"


class BadHello(ValueError):
    """What came is refused; ``reason`` is NOT_TLS or BAD_HELLO, the text says which rule it breaks."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Hello:
    """``name`` as it was said, latin-1, or None; ``early``: whether data may follow at once (0-RTT)."""

    def __init__(self, name: str | None, early: bool) -> None:
        self.name = name
        self.early = early


class HelloReader:
    """Takes bytes until a ClientHello is whole; then ``raw`` is what to pass on, ``rest`` what came behind.

    ``skipped``: kinds of records that may come before it, and are in ``raw`` too.
    """

    def __init__(self, skipped: tuple[int, ...] = ()) -> None:
        self.raw = bytearray()
        self.rest = b""
        self._skipped = skipped
        self._records = RecordReader()
        self._message = bytearray()

    def feed(self, data: bytes) -> Hello | None:
        """Take the next bytes; return the hello once it is whole. Not to be called after that.

        Raises:
            BadHello: a rule is broken, as soon as that is certain.
        """
        self.raw += data
        self._records.add(data)
        while True:
            record = self._record()
            if record is None:
                return None
            kind, content = record
            if len(self.raw) - len(self._records) > RAW_LIMIT:
                raise BadHello(BAD_HELLO, "a hello in too many records")
            if kind in self._skipped and not self._message:
                continue
            if kind != HANDSHAKE and self._message:
                raise BadHello(BAD_HELLO, "another record inside the hello")
            if kind != HANDSHAKE:
                raise BadHello(NOT_TLS, "a first record that is no handshake")
            hello = self._handshake(content)
            if hello:
                self.rest = self._records.left
                del self.raw[len(self.raw) - len(self.rest) :]
                return hello

    def _record(self) -> tuple[int, bytes] | None:
        try:
            return self._records.next()
        except NotTls as error:
            raise BadHello(BAD_HELLO if self._message else NOT_TLS, str(error)) from error

    def _handshake(self, content: bytes) -> Hello | None:
        if not content:
            raise BadHello(BAD_HELLO, "an empty handshake record")
        self._message += content
        if self._message[0] != CLIENT_HELLO:
            raise BadHello(BAD_HELLO, "a handshake that does not begin with a ClientHello")
        if len(self._message) < 4:
            return None
        size = int.from_bytes(self._message[1:4], "big")
        if size > LIMIT:
            raise BadHello(BAD_HELLO, f"a hello of more than {LIMIT} bytes")
        if len(self._message) < 4 + size:
            return None
        if len(self._message) > 4 + size:
            raise BadHello(BAD_HELLO, "something behind the hello in its record")
        return parse(bytes(self._message[4:]))


class _Fields:
    """Reads a structure of TLS from its beginning to its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise BadHello(BAD_HELLO, "a field that is longer than what it is in")
        found = self._data[self._at : end]
        self._at = end
        return found

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> bytes:
        """Return what a length of ``size`` bytes stands before."""
        return self.take(self.number(size))

    @property
    def left(self) -> int:
        return len(self._data) - self._at


def parse(body: bytes) -> Hello:
    """Parse the body of a ClientHello, without the four bytes before it.

    Raises:
        BadHello: a length that does not add up, something behind the end, an extension twice, no or several
            names where there is to be one.
    """
    fields = _Fields(body)
    if fields.number(2) >> 8 != 3:
        raise BadHello(BAD_HELLO, "a version that is not 3.x")
    fields.take(32)
    if len(fields.vector(1)) > 32:
        raise BadHello(BAD_HELLO, "a session id of more than 32 bytes")
    suites = fields.vector(2)
    if not suites or len(suites) % 2:
        raise BadHello(BAD_HELLO, "a list of cipher suites that is none")
    if not fields.vector(1):
        raise BadHello(BAD_HELLO, "no compression method")
    # Before there were extensions, a hello ended here.
    extensions = _extensions(fields.vector(2)) if fields.left else {}
    if fields.left:
        raise BadHello(BAD_HELLO, "something behind the extensions")
    name = _name(extensions[SERVER_NAME]) if SERVER_NAME in extensions else None
    return Hello(name, EARLY_DATA in extensions)


def _extensions(data: bytes) -> dict[int, bytes]:
    fields = _Fields(data)
    found: dict[int, bytes] = {}
    while fields.left:
        kind = fields.number(2)
        content = fields.vector(2)
        if kind in found:
            raise BadHello(BAD_HELLO, "an extension twice")
        found[kind] = content
    return found


def _name(data: bytes) -> str:
    outer = _Fields(data)
    listed = _Fields(outer.vector(2))
    if outer.left:
        raise BadHello(BAD_HELLO, "something behind the list of names")
    if listed.number(1) != HOST_NAME:
        raise BadHello(BAD_HELLO, "a server name of another kind")
    name = listed.vector(2)
    if listed.left:
        raise BadHello(BAD_HELLO, "several server names")
    # Judged like any name from the wire; latin-1 loses nothing.
    return name.decode("latin-1")
