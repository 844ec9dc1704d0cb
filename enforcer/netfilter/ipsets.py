"""Our ipsets over netlink."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from pyroute2.ipset import IPSet, PortEntry
from pyroute2.netlink.exceptions import IPSetError

from enforcer.netfilter.model import NO_LIVES, PROTOCOLS, Element, Entry, Lives
from enforcer.netfilter.refusals import Tally
from enforcer.netfilter.skeleton import MAXELEM, SEEN, SEEN_MAX, TIMEOUT

NUMBERS = {number: name for name, number in PROTOCOLS.items()}
NOT_ADDED = 4103  # IPSET_ERR_EXIST in a delete
HASH_FULL = 4352  # IPSET_ERR_HASH_FULL


class SetError(Exception):
    """The kernel refused an operation on a set."""

    @property
    def missing(self) -> bool:
        """Whether there is no such set."""
        cause = self.__cause__
        if isinstance(cause, IPSetError):
            return bool(cause.code == errno.ENOENT)
        return isinstance(cause, OSError) and cause.errno == errno.ENOENT


class Sets:
    """Create, read and change sets. One netlink socket, opened in the caller's network namespace."""

    def __init__(self) -> None:
        self._socket = IPSet()

    def close(self) -> None:
        """Close the netlink socket."""
        self._socket.close()

    def create(self, name: str, kind: str) -> None:
        """Create a set with counters, comments and a default timeout; an equal one may exist."""
        try:
            self._socket.create(
                name,
                stype=kind,
                family=socket.AF_INET,
                maxelem=SEEN_MAX if name == SEEN else MAXELEM,
                timeout=TIMEOUT,
                counters=True,
                comment=True,
                exclusive=False,
            )
        except IPSetError as error:
            raise SetError(f"create {name}: {error}") from error

    def kind(self, name: str) -> str | None:
        """Return the type of a set, None when it does not exist."""
        try:
            for message in self._socket.headers(name):
                return str(message.get_attr("IPSET_ATTR_TYPENAME"))
        except IPSetError as error:
            if error.code != errno.ENOENT:
                raise SetError(f"read {name}: {error}") from error
        return None

    def destroy(self, name: str) -> None:
        """Destroy a set that no rule names."""
        try:
            self._socket.destroy(name)
        except IPSetError as error:
            raise SetError(f"destroy {name}: {error}") from error

    def _rows(self, name: str) -> Iterable[Any]:
        try:
            for message in self._socket.list(name):
                body = message.get_attr("IPSET_ATTR_ADT")
                if body is not None:
                    yield from body.get_attrs("IPSET_ATTR_DATA")
        except IPSetError as error:
            raise SetError(f"list {name}: {error}") from error

    def entries(self, name: str) -> dict[Element, Entry]:
        """Return the content of a hash:ip,port,ip set."""
        found = {}
        for row in self._rows(name):
            proto = NUMBERS.get(row.get_attr("IPSET_ATTR_PROTO"), "other")
            element = Element(
                row.get_attr("IPSET_ATTR_IP_FROM").get_attr("IPSET_ATTR_IPADDR_IPV4"),
                proto,
                row.get_attr("IPSET_ATTR_PORT_FROM"),
                row.get_attr("IPSET_ATTR_IP2").get_attr("IPSET_ATTR_IPADDR_IPV4"),
            )
            found[element] = Entry(
                element,
                int(row.get_attr("IPSET_ATTR_TIMEOUT") or 0),
                int(row.get_attr("IPSET_ATTR_PACKETS") or 0),
                str(row.get_attr("IPSET_ATTR_COMMENT") or ""),
            )
        return found

    def sources(self, name: str) -> dict[str, int]:
        """Return the content of a hash:ip set: address -> packets counted."""
        return {
            row.get_attr("IPSET_ATTR_IP_FROM").get_attr("IPSET_ATTR_IPADDR_IPV4"): int(
                row.get_attr("IPSET_ATTR_PACKETS") or 0
            )
            for row in self._rows(name)
        }

    def tallies(self, name: str) -> list[Tally]:
        """Return the content of a hash:ip,port,ip set whose elements the kernel added itself."""
        return [
            Tally(
                row.get_attr("IPSET_ATTR_IP_FROM").get_attr("IPSET_ATTR_IPADDR_IPV4"),
                int(row.get_attr("IPSET_ATTR_PROTO") or 0),
                int(row.get_attr("IPSET_ATTR_PORT_FROM") or 0),
                row.get_attr("IPSET_ATTR_IP2").get_attr("IPSET_ATTR_IPADDR_IPV4"),
                int(row.get_attr("IPSET_ATTR_PACKETS") or 0),
                int(row.get_attr("IPSET_ATTR_TIMEOUT") or 0),
            )
            for row in self._rows(name)
        ]

    def put(self, name: str, elements: Mapping[Element, str], lives: Lives = NO_LIVES) -> None:
        """Add or renew elements; counters of existing ones are kept.

        Comment and timeout travel every time: the kernel drops what an ``-exist`` add leaves out.
        """
        try:
            for element, comment in elements.items():
                self._socket.add(
                    name,
                    (element.src, PortEntry(element.port, protocol=PROTOCOLS[element.proto]), element.dst),
                    etype="ip,port,ip",
                    timeout=min(lives.get(element, TIMEOUT), TIMEOUT),
                    comment=comment,
                    exclusive=False,
                )
        except IPSetError as error:
            reason = "the set is full" if error.code == HASH_FULL else str(error)
            raise SetError(f"add to {name}: {reason}") from error

    def drop_tallies(self, name: str, gone: Iterable[Tally]) -> None:
        """Delete elements that the kernel added itself; one that is not there is fine."""
        for tally in gone:
            self._drop(name, (tally.src, PortEntry(tally.port, protocol=tally.proto), tally.dst))

    def drop(self, name: str, elements: Iterable[Element]) -> None:
        """Delete elements; one that is not there is fine."""
        for element in elements:
            self._drop(
                name, (element.src, PortEntry(element.port, protocol=PROTOCOLS[element.proto]), element.dst)
            )

    def _drop(self, name: str, entry: tuple[Any, ...]) -> None:
        try:
            self._socket.delete(name, entry, etype="ip,port,ip")
        except IPSetError as error:
            if error.code not in (NOT_ADDED, errno.ENOENT):
                raise SetError(f"delete from {name}: {error}") from error

    def put_source(self, name: str, source: str) -> None:
        """Add or renew one address of a hash:ip set."""
        try:
            self._socket.add(name, source, etype="ip", timeout=TIMEOUT, comment="", exclusive=False)
        except IPSetError as error:
            raise SetError(f"add to {name}: {error}") from error

    def drop_source(self, name: str, source: str) -> None:
        """Delete one address of a hash:ip set; one that is not there is fine."""
        try:
            self._socket.delete(name, source, etype="ip")
        except IPSetError as error:
            if error.code not in (NOT_ADDED, errno.ENOENT):
                raise SetError(f"delete from {name}: {error}") from error
