"""Docker's multiplexed stream: without a terminal, stdout and stderr come in frames. Pure."""

from __future__ import annotations

from policy.errors import EngineError

HEADER = 8
STDOUT, STDERR = 1, 2
_LARGEST = 1 << 31


class FrameDecoder:
    """Takes bytes as they arrive, gives (stream, payload) as soon as any payload is there."""

    def __init__(self) -> None:
        self._head = b""
        self._stream = STDOUT
        self._left = 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return what ``data`` adds: stream 1 is stdout, 2 is stderr.

        Raises:
            EngineError: it is not a frame.
        """
        found = []
        while data:
            if self._left:
                part, data = data[: self._left], data[self._left :]
                self._left -= len(part)
                found.append((self._stream, part))
                continue
            missing = HEADER - len(self._head)
            self._head += data[:missing]
            data = data[missing:]
            if len(self._head) == HEADER:
                self._begin()
        return found

    def _begin(self) -> None:
        stream, size = self._head[0], int.from_bytes(self._head[4:], "big")
        if stream not in {0, STDOUT, STDERR} or self._head[1:4] != b"\0\0\0" or size >= _LARGEST:
            raise EngineError("Docker sent something that is not a frame of the container's output")
        self._head, self._left = b"", size
        self._stream = STDERR if stream == STDERR else STDOUT
