"""What a server answers a ClientHello with: whether it asks for another one. Pure."""

from __future__ import annotations

from .records import ALERT, APPLICATION_DATA, HANDSHAKE, NotTls, RecordReader

SERVER_HELLO = 2
# RFC 8446, 4.1.3: the random of a ServerHello that is a HelloRetryRequest.
RETRY = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")
_RANDOM = slice(6, 38)

AGAIN, ON = "again", "on"


class ServerReader:
    """Takes what a server sends until it is certain whether the client is asked for another hello."""

    def __init__(self) -> None:
        self._records = RecordReader()
        self._message = bytearray()

    def feed(self, data: bytes) -> str | None:
        """Take the next bytes; return AGAIN or ON, or None while it is not certain.

        Raises:
            NotTls: no answer to a hello.
        """
        self._records.add(data)
        while True:
            record = self._records.next()
            if record is None:
                return None
            kind, content = record
            # A warning may come before the answer; the alert that ends it all is followed by the end.
            if kind == ALERT:
                continue
            if kind != HANDSHAKE:
                if kind == APPLICATION_DATA or self._message:
                    raise NotTls("no handshake")
                continue
            self._message += content
            if self._message and self._message[0] != SERVER_HELLO:
                raise NotTls("another message than a ServerHello")
            if len(self._message) >= _RANDOM.stop:
                return AGAIN if self._message[_RANDOM] == RETRY else ON
