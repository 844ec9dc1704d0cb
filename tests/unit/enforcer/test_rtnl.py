"""What a list of links is worth that changed while the kernel gave it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest

from enforcer.netfilter import rtnl
from enforcer.netfilter.rtnl import HEADER, NLM_F_DUMP_INTR, NLMSG_DONE, RTM_NEWLINK


class Socket:
    """A netlink socket that answers each dump with one link and the flags that are next."""

    def __init__(self, flags: Iterator[int]) -> None:
        self.flags, self.asked = flags, 0
        self.answer = b""

    def send(self, request: bytes) -> None:
        self.asked += 1
        sequence = HEADER.unpack_from(request)[3]
        link = HEADER.pack(HEADER.size, RTM_NEWLINK, next(self.flags), sequence, 0)
        self.answer = link + HEADER.pack(HEADER.size, NLMSG_DONE, 0, sequence, 0)

    def recv(self, _: int) -> bytes:
        return self.answer


@pytest.fixture
def links() -> rtnl.Links:
    found = object.__new__(rtnl.Links)
    found._sequence = 0
    return found


def ask(links: rtnl.Links, *flags: int) -> tuple[int, list[bytes]]:
    links._socket = Socket(iter(flags))  # type: ignore[assignment]
    found = links._dump(rtnl.RTM_GETLINK, RTM_NEWLINK, bytes([socket.AF_UNSPEC]))
    return links._socket.asked, found  # type: ignore[attr-defined]


def test_a_list_that_changed_while_it_was_read_is_read_again(links: rtnl.Links) -> None:
    assert ask(links, 0) == (1, [b""])
    assert ask(links, NLM_F_DUMP_INTR, NLM_F_DUMP_INTR, 0) == (3, [b""])


def test_a_list_that_never_is_whole_is_an_error_and_no_list(links: rtnl.Links) -> None:
    with pytest.raises(OSError, match="changed while it was read") as raised:
        ask(links, *[NLM_F_DUMP_INTR] * rtnl.TRIES)
    # It is none of the errors that say that a link is no more.
    assert raised.value.errno == errno.EINTR
    assert not rtnl.gone(raised.value)
