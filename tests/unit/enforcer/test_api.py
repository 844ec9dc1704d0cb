"""Whether who asked has hung up."""

from __future__ import annotations

import asyncio
import fcntl
import resource
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from enforcer.api import _Handler


@pytest.fixture
def many() -> Iterator[None]:
    """Allow descriptors above those that select knows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, 4096)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip("no more descriptors are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many")
def test_who_hung_up_is_told_from_who_waits_however_many_descriptors_are_in_use() -> None:
    ours, theirs = socket.socketpair()
    with theirs, ours, socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 2000)) as high:
        handler: Any = _Handler.__new__(_Handler)
        handler.connection = high
        assert not handler._gone()
        theirs.send(b"x")
        assert not handler._gone()
        high.recv(1)
        theirs.close()
        assert handler._gone()


class _Status:
    """A server as the handler sees it, whose status is long."""

    class backend:  # noqa: N801
        @staticmethod
        async def status() -> dict[str, Any]:
            return {"long": "x" * 1_000_000}

    @staticmethod
    def call(work: Any, timeout: float) -> Any:
        return asyncio.run(work)


def test_who_hangs_up_before_the_answer_is_no_error() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(b"GET /v1/status HTTP/1.1\r\n\r\n")
        theirs.close()
        server: Any = _Status
        _Handler(ours, "", server)
