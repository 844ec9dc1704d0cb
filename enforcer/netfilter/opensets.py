"""The sources that are open, in the sets that they have to be in."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from pyroute2.netlink.exceptions import NetlinkError

from enforcer.netfilter import flows
from enforcer.netfilter.interface import KernelError
from enforcer.netfilter.ipsets import SetError, Sets
from enforcer.netfilter.model import HALF, Open
from enforcer.netfilter.nftsets import TableSets
from enforcer.netfilter.opening import OPEN
from enforcer.netfilter.skeleton import OPENED

T = TypeVar("T")


class OpenSets:
    """Both sets as one. Methods raise KernelError.

    ``both`` tells whether the decision is outside our table: then a source passes only if it is in the
    table's set, which the mark depends on, and in the ipset, without which the mark says nothing.
    """

    def __init__(self, ipsets: Sets, table: TableSets, both: Callable[[], bool]) -> None:
        self._ipsets, self._table, self._both = ipsets, table, both

    def rows(self) -> dict[str, Open]:
        """Return the sources; one that is only in some of the sets has the time HALF."""
        rows = _present(lambda: self._table.rows(OPEN))
        listed = (Open(socket.inet_ntoa(r.key[:4]), r.timeout, r.packets, r.comment) for r in rows)
        found = {row.src: row for row in listed}
        if not self._both():
            return found
        keys = set(_present(lambda: self._ipsets.sources(OPENED)))
        halves = {source: Open(source, HALF, 0, "") for source in keys ^ found.keys()}
        return {source: row for source, row in found.items() if source in keys} | halves

    def put(self, sources: Mapping[str, str]) -> None:
        """Add or renew sources; the values are comments."""
        try:
            for source, comment in sources.items():
                if self._both():
                    self._ipsets.put_source(OPENED, source)
                self._table.put_source(OPEN, source, comment)
        except SetError as error:
            raise KernelError(str(error)) from error

    def drop(self, sources: Iterable[str]) -> None:
        """Delete sources from every set, and the conntrack entries of their flows."""
        gone = list(sources)
        try:
            for source in gone:
                if self._both():
                    self._ipsets.drop_source(OPENED, source)
                self._table.drop_source(OPEN, source)
        except SetError as error:
            # With a table that somebody deleted, what it allowed is gone too.
            if not error.missing:
                raise KernelError(str(error)) from error
        try:
            flows.forget_sources(gone)
        except (NetlinkError, OSError) as error:
            raise KernelError(str(error)) from error


def _present(read: Callable[[], Iterable[T]]) -> list[T]:
    try:
        return list(read())
    except SetError as error:
        if error.missing:
            return []
        raise KernelError(str(error)) from error
