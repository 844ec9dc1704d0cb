"""What the service does for sandboxes whose names are answered at their gateway, open ones and others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import dns.message

from enforcer import desired, hostsfile
from enforcer.answering import Answerer, Opens
from enforcer.denials import Denials
from enforcer.gatewaydns import GatewayDns, Reply
from enforcer.lookups import Result
from enforcer.opendns import OpenNames, Vetted
from enforcer.sessions import Session
from enforcer.vetting import Verdict
from enforcer.writerclient import Held
from policy.errors import EnforcerError


@dataclass(frozen=True)
class Around:
    """What is asked of the rest of the service, of each as it is now.

    ``find`` resolves (``lookups.Lookups.find``), ``vet`` judges an address, ``opens`` is that of
    ``doors.Doors``, ``shown`` maps containers to names to the addresses of their hosts files.
    """

    find: Callable[[str], Awaitable[tuple[Result, int]]]
    vet: Callable[[str], Verdict]
    opens: Opens
    sessions: Callable[[], Iterable[Session]]
    shown: Callable[[], Mapping[str, Mapping[str, tuple[str, ...]]]]


class OpenSide:
    """Answers names, and tells whether the kernel treats a session as its policy says."""

    def __init__(self, around: Around, clock: Callable[[], float], denials: Denials) -> None:
        self._around, self._denials = around, denials
        vetted = Vetted(around.find, around.vet, denials.answered, denials.book.note)
        self._any = OpenNames(vetted)
        self._permitted = Answerer(self._session, self._published, vetted, around.opens, self._refused)
        self.dns = GatewayDns(self._decide, clock)

    def _decide(self, source: str, query: dns.message.Message) -> Reply | Awaitable[Reply]:
        session = self._session(source)
        opened = session is not None and session.open
        return self._any.decide(source, query) if opened else self._permitted.decide(source, query)

    def _session(self, source: str) -> Session | None:
        return next((one for one in self._around.sessions() if one.address == source and one.asks), None)

    def _published(self, session: Session, name: str) -> tuple[str, ...]:
        shown = self._around.shown().get(session.container)
        if shown is not None:
            return shown.get(name, ())
        try:
            # Not all that is wanted is there yet; what the file says is open all the same.
            return tuple(hostsfile.read(session.hosts_file).get(name, ()))
        except (EnforcerError, ValueError):
            return ()

    def _refused(self, session: Session, name: str, reason: str) -> None:
        self._denials.asked(session.sandbox.id, session.container, name, 0, reason)

    async def follow(self, sessions: Collection[Session]) -> str:
        """Answer names of these sessions and of nobody else; return what of it is impossible, or nothing."""
        await self.dns.follow(desired.resolvers(sessions))
        return "; ".join(self.dns.problems.values())

    def true(self, session: Session, held: Held) -> bool:
        """Tell whether the kernel opens a session as its policy does, and whether names are answered."""
        opened = any(row.src == session.address for row in held.open)
        if session.network is None or not session.asks:
            return not opened
        return opened == session.open and self.dns.serves(session.network.bridge)

    def close(self) -> None:
        """Answer nobody any more."""
        self.dns.close()
