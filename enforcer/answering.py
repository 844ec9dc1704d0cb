"""What sandboxes are told whose policy says ``egress.dns: answer``: the names it permits, once they are open.

A name is judged before anybody is asked for it: what no pattern means does not exist here, and no server
hears of it. One that is permitted is resolved, each address vetted, opened for the session that asked and
read back, and only then told. Who knows an address and was not told it does not reach it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import dns.message
import dns.rcode
import dns.rdatatype

from enforcer import asking
from enforcer.doors import ClosedError
from enforcer.gatewaydns import Reply, kind_of, name_of
from enforcer.opendns import Vetted
from enforcer.sessions import Session
from policy.container import UNLISTED_NAME

LONGEST_TTL = 60  # seconds: shorter than what was opened lives, so nobody keeps an address that is closed
ADDRESSES = 8  # of one answer; each is opened


class Opens(Protocol):
    """What is needed of ``doors.Doors.open``."""

    def __call__(
        self, container: str, name: str, ports: Iterable[int], addresses: Iterable[str], ttl: float
    ) -> Awaitable[tuple[str, ...]]:
        """Return the addresses that are open on all ports; ClosedError: none is."""


class Answerer:
    """Decides for answered sandboxes; see ``gatewaydns.Decide``.

    ``session`` returns who has an address now, ``published`` what the hosts file of a session says of a name.
    ``refused`` hears of names that were not answered: session, name, reason (``refusednames.REASONS``).
    """

    def __init__(
        self,
        session: Callable[[str], Session | None],
        published: Callable[[Session, str], Iterable[str]],
        vetted: Vetted,
        opens: Opens,
        refused: Callable[[Session, str, str], None],
    ) -> None:
        self._session, self._published, self._vetted = session, published, vetted
        self._open, self._refused = opens, refused

    def decide(self, source: str, query: dns.message.Message) -> Reply | Awaitable[Reply]:
        """Say what a question is answered."""
        session, kind, name = self._session(source), kind_of(query), name_of(query)
        if session is None:
            return Reply(dns.rcode.SERVFAIL)
        if kind is None:
            return Reply(dns.rcode.NOTIMP)
        ports = asking.ports(session, name) if name is not None else ()
        if name is None or not ports:
            # Libraries ask for both kinds of address at the same time: that is one attempt.
            if kind != dns.rdatatype.AAAA and name != UNLISTED_NAME:
                self._refused(session, name or query.question[0].name.to_text(), "denied")
            return Reply(dns.rcode.NXDOMAIN)
        if kind == dns.rdatatype.AAAA:
            # There is no IPv6 in a sandbox.
            return Reply(dns.rcode.NOERROR)
        return (
            self._answer(source, session, name, ports) if kind == dns.rdatatype.A else Reply(dns.rcode.NOTIMP)
        )

    async def _answer(self, source: str, session: Session, name: str, ports: tuple[int, ...]) -> Reply:
        pinned = {port for known in session.names if known.host == name for port in known.ports}
        standing = tuple(self._published(session, name)) if pinned else ()
        if standing:
            # They are open on these ports as long as the hosts file says so; others may come by a pattern.
            more = [port for port in ports if port not in pinned]
            if more:
                with contextlib.suppress(ClosedError):
                    await self._open(session.container, name, more, standing[:ADDRESSES], LONGEST_TTL)
            return self._still(source, session, name, Reply(dns.rcode.NOERROR, standing, LONGEST_TTL))
        reply, nothing_left = await self._vetted.resolve(source, name)
        if nothing_left:
            self._refused(session, name, "refused-address")
        elif reply.code == dns.rcode.SERVFAIL:
            self._refused(session, name, "resolve")
        if not reply.addresses:
            return reply
        try:
            found = await self._open(session.container, name, ports, reply.addresses[:ADDRESSES], reply.ttl)
        except ClosedError as error:
            if error.kind != "unready":
                self._refused(session, name, error.kind)
            return Reply(dns.rcode.NXDOMAIN if error.kind == "denied" else dns.rcode.SERVFAIL)
        ttl = min(reply.ttl, LONGEST_TTL)
        return self._still(source, session, name, Reply(dns.rcode.NOERROR, found, ttl))

    def _still(self, source: str, before: Session, name: str, reply: Reply) -> Reply:
        """Return what was found, unless it was taken back meanwhile, or its session is gone."""
        session = self._session(source)
        if session is None or session.container != before.container or not asking.ports(session, name):
            return Reply(dns.rcode.NXDOMAIN)
        return reply
