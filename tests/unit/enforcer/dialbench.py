"""A proxy's side of the dial socket, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from policy.declaration import Declaration, Pattern

ZONE = Declaration(mode="proxy", patterns=(Pattern(host="*.example.com"),))


class Line:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self.reader.readline())
        return found

    async def ask(self, **fields: Any) -> dict[str, Any]:
        self.send(json.dumps({"v": 1, **fields}).encode() + b"\n")
        return await self.answer()

    async def dial(self, name: str, port: int = 443) -> dict[str, Any]:
        return await self.ask(op="dial", name=name, port=port)


@contextlib.asynccontextmanager
async def connected(path: Path) -> AsyncIterator[Line]:
    """Connect to a socket however long its path is."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)
    try:
        yield Line(reader, writer)
    finally:
        writer.close()
