"""Keeps the account of refused packets: asks the writer, remembers names, looks at dead resolvers.

What never leaves a container's network namespace cannot be counted by any rule. Its resolver is such a thing:
lookups end at 127.0.0.1, where nobody listens. But the kernel counts datagrams that meet no listener in each
namespace, and tells whoever owns the process; that is how often the dead resolver was asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Protocol

from enforcer import pins
from enforcer.addressbook import AddressBook
from enforcer.denied import ANSWER, VERIFY, Counted, Heard, Ledger, Place
from enforcer.deniedreport import report
from enforcer.opendns import Refusal
from enforcer.refusednames import RefusedNames
from enforcer.sessions import Network, Session
from policy import proxying, savedfile
from policy.errors import EnforcerError

log = logging.getLogger("corral.enforcer")

POLL = 1.0  # seconds; the writer keeps the latest thousand records of a bridge meanwhile
IDLE = 10.0  # seconds, while there is no session
MANY = 1024  # records in one answer after which the writer may have more
TALLIES_EVERY = 2.0
SAVE_EVERY = 60.0
ENDED = 512  # sessions whose lookups are remembered
# The gate asks Docker's resolver twice over UDP, which asks the dead one.
GATE_LOOKUPS = 2


class Source(Protocol):
    """What is needed of the writer's client."""

    def denied(self, epoch: str, after: int, sources: Collection[str], tallies: bool) -> Mapping[str, Any]:
        """Return the answer to a ``denied`` request; EnforcerError when there is none."""


class Denials:
    """Owns the ledger and the address book. Runs on the service's loop.

    ``world`` returns sessions, networks and the pinning engine's state as they are now, which is worth
    something once ``looked`` is set. ``wall`` is the time of day, ``clock`` monotonic. ``proc`` is where the
    kernel tells about processes.
    """

    def __init__(
        self,
        source: Source,
        store: Path,
        world: Callable[[], tuple[Collection[Session], Collection[Network], pins.State]],
        wall: Callable[[], float],
        clock: Callable[[], float],
        looked: asyncio.Event,
        proc: Path = Path("/proc"),
    ) -> None:
        self.ledger, self.book = Ledger(), AddressBook()
        self.names = RefusedNames(self.ledger)
        self.lost, self.problem = 0, "the writer was not asked yet"
        self.epoch = os.urandom(8).hex()
        self._source, self._store, self._world = source, store, world
        self._wall, self._clock, self._looked, self._proc = wall, clock, looked, proc
        self._writer, self._after = "", 0
        self._tallied = self._saved = clock()
        self._asking = asyncio.Lock()
        self._lookups: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._namespaces: dict[tuple[str, int], int] = {}
        self._wake = asyncio.Event()
        try:
            self.book.restore(savedfile.value(store))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            log.warning("saved names of addresses are not used: %s", error)

    def notice(self) -> None:
        """Remember who has which address and which names resolve to what, before it changes again."""
        sessions, networks, state = self._world()
        self.ledger.notice(sessions, networks)
        self.book.learn(state.names)
        if sessions:
            self._wake.set()

    async def forever(self) -> None:
        """Ask the writer every second while there are sessions."""
        await self._looked.wait()
        while True:
            await self.poll(self._clock() - self._tallied >= TALLIES_EVERY)
            if self._clock() - self._saved >= SAVE_EVERY:
                self.save()
            sessions, _, _ = self._world()
            if sessions:
                await asyncio.sleep(POLL)
                continue
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), IDLE)

    async def poll(self, tallies: bool = True) -> None:
        """Ask the writer once for all it has; on failure ``problem`` says why."""
        if not self._looked.is_set():
            # What came in now would be nobody's.
            self.problem = "Docker was not looked at yet"
            return
        async with self._asking:
            self.notice()
            sessions, _, _ = self._world()
            # What is refused to a session with problems is worth telling too; one may have no fixed address.
            sources = {session.address for session in sessions if _is_address(session.address)}
            try:
                while await self._ask(sources, tallies):
                    tallies = False
            except EnforcerError as error:
                if self.problem != error.message:
                    log.warning("what is refused cannot be told: %s", error.message)
                self.problem = error.message
            self._look(sessions)

    async def _ask(self, sources: Collection[str], tallies: bool) -> bool:
        """Take in one answer; True when the writer has more."""
        answer = await asyncio.to_thread(self._source.denied, self._writer, self._after, sources, tallies)
        now = self._wall()
        try:
            records = [
                (int(number), Heard(float(at), (str(src), int(proto), int(port), str(dst))))
                for number, at, src, proto, port, dst in answer["records"]
            ]
            counted = [
                Counted((str(src), int(proto), int(port), str(dst)), int(packets), int(left))
                for src, proto, port, dst, packets, left in answer.get("tallies", ())
            ]
            totals = {str(address): int(packets) for address, packets in answer["totals"].items()}
            epoch, reached, lost = str(answer["epoch"]), int(answer["next"]), int(answer["lost"])
            self.problem = str(answer["problem"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EnforcerError(
                f"the writer's account of refused packets is not understood: {error!r}"
            ) from error
        # What was lost before this service began is nobody's loss.
        self.lost += lost if epoch == self._writer else 0
        self._writer, self._after = epoch, reached
        self.ledger.hear(record for _, record in records)
        if tallies:
            self.ledger.count(counted, now)
            self._tallied = self._clock()
        self.ledger.totals(totals, now)
        return len(records) >= MANY

    def answered(self, refusal: Refusal) -> None:
        """Take in an address that an open sandbox was not told, because vetting refused it."""
        self.book.note(refusal.name, [refusal.address], refusal.reason)
        self.ledger.hear([Heard(self._wall(), (refusal.source, ANSWER, 0, refusal.address))])

    def asked(self, sandbox: str, container: str, name: str, port: int, reason: str) -> None:
        """Take in a name that was asked for and refused; never raises.

        Args:
            sandbox: whose socket or bridge it came in on, never what the question says.
            container: of the proxy or session that asked; empty or unknown when that is not known.
            name: as it was asked for, whatever that is.
            port: 0 when it was asked for by DNS.
            reason: one of ``refusednames.REASONS``.
        """
        sessions, _, _ = self._world()
        own = [one for one in sessions if one.sandbox.id == sandbox]
        session = next((one for one in own if one.container == container), None)
        project = next((one.project for one in (session, *own) if one is not None and one.project), "")
        place = Place(sandbox, project)
        # By DNS there is no port.
        proxied = session.service == proxying.SERVICE if session is not None else bool(port)
        if proxied:
            # One account for all lives of a proxy: which session asked it cannot be seen.
            place = Place(sandbox, project, proxying.SERVICE)
        elif session is not None:
            place = Place(sandbox, project, session.service, session.session, session.container)
        check = session is not None and session.purpose == VERIFY
        if proxied and any(one.purpose == VERIFY for one in own):
            check = is_name_check(name, reason)
        self.names.ask(place, name, port, reason, self._wall(), check=check)

    # -- the dead resolver

    def _look(self, sessions: Collection[Session]) -> None:
        for session in sessions:
            count = self._unheard(session)
            if count is not None and session.purpose != VERIFY:
                asked = max(0, count - GATE_LOOKUPS)
                self._lookups[session.container] = (session.sandbox.id, asked)
        while len(self._lookups) > ENDED:
            self._lookups.popitem(last=False)
        living = {session.container for session in sessions}
        self._namespaces = {key: inode for key, inode in self._namespaces.items() if key[0] in living}

    def _unheard(self, session: Session) -> int | None:
        """Return how many datagrams met no listener inside a container; None when that cannot be seen."""
        place = self._proc / str(session.life.pid)
        if not session.life.pid:
            return None
        try:
            namespace = (place / "ns" / "net").stat().st_ino
            own = (self._proc / "self" / "ns" / "net").stat().st_ino
            # Another process may have the number by now, and the host's namespace is not the container's.
            key = (session.container, session.life.pid)
            if namespace == own or self._namespaces.setdefault(key, namespace) != namespace:
                return None
            return unheard((place / "net" / "snmp").read_text())
        except OSError:
            return None

    def lookups(self, container: str) -> int | None:
        """Return how often a session asked its dead resolver; None when that could not be seen."""
        found = self._lookups.get(container)
        return None if found is None else found[1]

    # -- what is asked for

    async def report(self, after: int = 0, project: str | None = None) -> dict[str, Any]:
        """Return the body of ``GET /v1/denied``, fresh from the writer."""
        await self.poll()
        sessions, _, _ = self._world()
        return report(
            self.ledger,
            self.book,
            self._lookups_of(),
            self.names,
            sessions,
            epoch=self.epoch,
            after=after,
            project=project,
            lost=self.lost,
            problem=self.problem,
        )

    def counts(self) -> dict[str, Any]:
        """Return what the metrics tell of it: by sandbox, and what was lost."""
        denied = {name: self.ledger.of_sandbox(name)[0] for name in self.ledger.accounts}
        asked = {name: account.total - account.checks for name, account in self.names.accounts.items()}
        return {"denied": denied, "asked": asked, "lookups": self._lookups_of(), "lost": self.lost}

    def _lookups_of(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for sandbox, count in self._lookups.values():
            found[sandbox] = found.get(sandbox, 0) + count
        return found

    def save(self) -> None:
        """Write the address book for the next start, when something was added."""
        self._saved = self._clock()
        if not self.book.moved:
            return
        try:
            self._store.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial = self._store.with_suffix(".new")
            partial.write_text(json.dumps(self.book.save()))
            partial.replace(self._store)
        except OSError as error:
            log.warning("names of addresses cannot be saved: %s", error)


def _is_address(text: str) -> bool:
    try:
        return str(IPv4Address(text)) == text
    except ValueError:
        return False


def is_name_check(name: str, reason: str) -> bool:
    """Tell whether what a proxy refused while ``corral verify`` runs is what that tries."""
    return (reason == "denied" and name in proxying.CHECKED) or reason == "sni-mismatch"


def unheard(snmp: str) -> int | None:
    """Return UDP's count of datagrams to ports without a listener out of ``/proc/<pid>/net/snmp``."""
    rows = [line.split() for line in snmp.splitlines() if line.startswith("Udp: ")]
    if len(rows) != 2 or len(rows[0]) != len(rows[1]):
        return None
    found = dict(zip(*rows, strict=True)).get("NoPorts", "")
    return int(found) if found.isdecimal() else None
