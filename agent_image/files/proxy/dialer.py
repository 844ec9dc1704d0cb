"""Asks the enforcer, through its socket, for the addresses of a name. Whether it may be had is decided there.

One line of JSON each way, one question at a time on a connection; a few connections are kept.
"""

from __future__ import annotations

import asyncio
import json
import socket

from .waiting import Expired, within

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERSION = 1
LONGEST_LINE = 4096
MOST_ADDRESSES = 8
MOST_CONNECTIONS = 16
KEPT = 4
# The enforcer gives a name six seconds, and may have others to ask before.
ANSWER_WITHIN = 15.0
TELL_WITHIN = 2.0
PROTOCOLS = ("tls", "tcp")


class Unavailable(Exception):
    """There is no answer, or none that can be understood."""


class Granted:
    """Where a name may be reached now: IPv4 addresses in the order to try them."""

    def __init__(self, addresses: tuple[str, ...], protocol: str, sni: bool) -> None:
        self.addresses = addresses
        self.protocol = protocol
        self.sni = sni


class Refused:
    """Why a name may not be reached: ``kind`` as the enforcer says it, ``text`` for the log."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        self.text = text


def understand(body: Any) -> Granted | Refused:
    """Read the answer to a question for a name.

    Raises:
        Unavailable: it is not one.
    """
    if isinstance(body, dict) and body.get("ok") is False:
        kind, text = body.get("kind"), body.get("text")
        if isinstance(kind, str) and isinstance(text, str):
            return Refused(kind, text)
    if isinstance(body, dict) and body.get("ok") is True:
        addresses, protocol, sni = body.get("addresses"), body.get("protocol"), body.get("sni")
        if (
            isinstance(addresses, list)
            and 0 < len(addresses) <= MOST_ADDRESSES
            and all(_is_address(address) for address in addresses)
            and protocol in PROTOCOLS
            and isinstance(sni, bool)
        ):
            return Granted(tuple(addresses), protocol, sni)
    raise Unavailable("an answer of another shape")


def _is_address(value: object) -> bool:
    try:
        # inet_pton knows one spelling of an address; a name is none, and nothing is looked up.
        return isinstance(value, str) and bool(socket.inet_pton(socket.AF_INET, value))
    except (OSError, ValueError):
        return False


class _Line(asyncio.Protocol):
    """One connection to the enforcer: a question is sent, a line comes."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.lost = False
        self._came = bytearray()
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._came += data
        end = self._came.find(b"\n")
        waits = self._answer is not None and not self._answer.done()
        if not waits or len(self._came) > LONGEST_LINE or (0 <= end < len(self._came) - 1):
            # More than was asked for: whose answer the next line would be is not certain any more.
            self.close()
        elif end >= 0 and self._answer is not None:
            self._answer.set_result(bytes(self._came))
            self._came.clear()

    def connection_lost(self, error: Exception | None) -> None:
        self.close()

    def close(self) -> None:
        """End it, and whoever waits for it."""
        self.lost = True
        if self.transport is not None:
            self.transport.abort()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError("the enforcer closed the connection"))

    async def ask(self, question: bytes) -> bytes:
        """Send a line and return the one that comes. Raises OSError: the connection ended."""
        if self.lost or self.transport is None:
            raise ConnectionResetError("the connection ended")
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(question)
        return await self._answer


class Dialer:
    """Asks at ``path``, a unix socket that may not be there yet, and may be another one after a restart."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._kept: list[_Line] = []
        self._places = asyncio.Semaphore(MOST_CONNECTIONS)

    async def dial(self, name: str, port: int) -> Granted | Refused:
        """Return where a name may be reached, or why it may not be.

        Raises:
            Unavailable: nobody answers in time.
        """
        return understand(await self._asked({"op": "dial", "name": name, "port": port}, ANSWER_WITHIN))

    async def tell(self, name: str, port: int, reason: str) -> None:
        """Say that a connection to an allowed name was closed, and why.

        Raises:
            Unavailable: nobody listens.
        """
        await self._asked({"op": "refused", "name": name, "port": port, "reason": reason}, TELL_WITHIN)

    async def _asked(self, fields: dict[str, object], seconds: float) -> Any:
        question = json.dumps({"v": VERSION, **fields}).encode("ascii") + b"\n"
        try:
            with within(seconds):
                async with self._places:
                    return json.loads(await self._exchanged(question))
        except (Expired, OSError, ValueError, RecursionError) as error:
            raise Unavailable(str(error) or type(error).__name__) from error

    async def _exchanged(self, question: bytes) -> bytes:
        while self._kept:
            line = self._kept.pop()
            if not line.lost:
                try:
                    return await self._on(line, question)
                except OSError:
                    # It was closed before it was read: asking twice opens nothing more than once.
                    continue
        loop = asyncio.get_running_loop()
        _, line = await loop.create_unix_connection(_Line, self._path)
        return await self._on(line, question)

    async def _on(self, line: _Line, question: bytes) -> bytes:
        try:
            answer = await line.ask(question)
        except BaseException:
            line.close()
            raise
        if len(self._kept) < KEPT and not line.lost:
            self._kept.append(line)
        else:
            line.close()
        return answer

    def close(self) -> None:
        """End the connections that are kept."""
        while self._kept:
            self._kept.pop().close()
