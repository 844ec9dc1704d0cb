"""TLS records, unpacked from whatever pieces they come in. Pure."""

from __future__ import annotations

HEADER = 5
CHANGE_CIPHER_SPEC, ALERT, HANDSHAKE, APPLICATION_DATA = 20, 21, 22, 23
_KINDS = (CHANGE_CIPHER_SPEC, ALERT, HANDSHAKE, APPLICATION_DATA)
# RFC 8446: 2^14 bytes in the clear; an encrypted record may hold 256 more, TLS 1.2 allowed 2048.
MOST_CLEAR = 1 << 14
MOST_SEALED = MOST_CLEAR + 2048


class NotTls(ValueError):
    """What came is no TLS record."""


class RecordReader:
    """Takes bytes and gives whole records, one at a time."""

    def __init__(self) -> None:
        self._held = bytearray()

    def add(self, data: bytes) -> None:
        """Take the next bytes."""
        self._held += data

    def next(self) -> tuple[int, bytes] | None:
        """Return (kind, content) of the next record, or None while it is not whole.

        Raises:
            NotTls: of no kind of TLS's, of another version than 3.x, or too long; as soon as that is certain.
        """
        head = self._held[:HEADER]
        if not head:
            return None
        if head[0] not in _KINDS or (len(head) > 1 and head[1] != 3) or (len(head) > 2 and head[2] > 4):
            raise NotTls("no record")
        if len(head) < HEADER:
            return None
        end = HEADER + int.from_bytes(head[3:], "big")
        if end - HEADER > (MOST_SEALED if head[0] == APPLICATION_DATA else MOST_CLEAR):
            raise NotTls("a record that is too long")
        if len(self._held) < end:
            return None
        content = bytes(self._held[HEADER:end])
        del self._held[:end]
        return head[0], content

    @property
    def left(self) -> bytes:
        """What was taken and not given."""
        return bytes(self._held)

    def __len__(self) -> int:
        """Return how many bytes were taken and not given."""
        return len(self._held)
