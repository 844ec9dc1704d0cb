"""What the service does for sandboxes that reach all public addresses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from enforcer import desired
from enforcer.denials import Denials
from enforcer.opendns import OpenDns, Result
from enforcer.sessions import Session
from enforcer.vetting import Verdict
from enforcer.writerclient import Held


class OpenSide:
    """Answers names of open sessions, and tells whether the kernel treats a session as its policy says."""

    def __init__(
        self,
        ask: Callable[[str], Awaitable[Result]],
        vet: Callable[[str], Verdict],
        clock: Callable[[], float],
        denials: Denials,
    ) -> None:
        self.dns = OpenDns(ask, vet, clock, denials.answered, denials.book.note)

    async def follow(self, sessions: Collection[Session]) -> str:
        """Answer names of these sessions and of nobody else; return what of it is impossible, or nothing."""
        await self.dns.follow(desired.resolvers(sessions))
        return "; ".join(self.dns.problems.values())

    def true(self, session: Session, held: Held) -> bool:
        """Tell whether the kernel opens a session if, and only if, its policy does."""
        opened = any(row.src == session.address for row in held.open)
        if session.network is None or not session.open:
            return not opened
        return opened and self.dns.serves(session.network.bridge)

    def close(self) -> None:
        """Answer nobody any more."""
        self.dns.close()
