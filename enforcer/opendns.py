"""What sandboxes are told whose policy says ``open``: any public name, every address of it vetted.

Only questions for the addresses of a name are answered: other types would not be vetted, and none of them is
needed to connect. CNAMEs are followed by whoever resolves and not shown, so nobody has a reason to ask for a
name that leads on to elsewhere. What cannot be prevented is that the names asked for are seen by the servers
that answer for them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import dns.message
import dns.rcode
import dns.rdatatype

from enforcer.gatewaydns import Reply, kind_of, name_of
from enforcer.lookups import Result
from enforcer.pinmodel import Failure
from enforcer.vetting import Verdict


@dataclass(frozen=True)
class Refusal:
    """An address in the answer for ``name`` that vetting refused; it was left out."""

    source: str
    name: str
    address: str
    reason: str


def refused_kind(query: dns.message.Message) -> dns.rcode.Rcode | None:
    """Return the response code of a question that nobody is asked; None when its name is to be resolved."""
    kind = kind_of(query)
    if kind == dns.rdatatype.AAAA:
        # There is no IPv6 in a sandbox: the name has no such address, whatever it is.
        return dns.rcode.NOERROR
    if kind != dns.rdatatype.A:
        return dns.rcode.NOTIMP
    # Single labels, addresses and names of local zones are not public names.
    return None if name_of(query) is not None else dns.rcode.NXDOMAIN


def judge(
    result: Result, vet: Callable[[str], Verdict]
) -> tuple[dns.rcode.Rcode, list[str], list[tuple[str, str]]]:
    """Return the response code, the addresses that may be told, and (address, reason) of the others."""
    if isinstance(result, Failure):
        codes = {"nxdomain": dns.rcode.NXDOMAIN, "empty": dns.rcode.NOERROR}
        return codes.get(result.kind, dns.rcode.SERVFAIL), [], []
    verdicts = [(address, vet(address)) for address in result.addresses]
    good = [address for address, verdict in verdicts if verdict]
    bad = [(address, verdict.reason) for address, verdict in verdicts if not verdict]
    # A name with refused addresses only does not exist here: programs give up at once.
    return (dns.rcode.NOERROR if good else dns.rcode.NXDOMAIN), good, bad


class Vetted:
    """Names to addresses that may be told: one way for all who resolve because somebody in a sandbox asked.

    ``find`` is ``lookups.Lookups.find``, ``vet`` judges an address, ``told`` hears of each refusal and
    ``known`` of each name with the addresses that are good.
    """

    def __init__(
        self,
        find: Callable[[str], Awaitable[tuple[Result, int]]],
        vet: Callable[[str], Verdict],
        told: Callable[[Refusal], None],
        known: Callable[[str, list[str]], None] = lambda _name, _addresses: None,
    ) -> None:
        self._find, self._vet, self._told, self._known = find, vet, told, known

    async def resolve(self, source: str, name: str) -> tuple[Reply, bool]:
        """Return what a source may be told of a name, and whether vetting left nothing of its answer."""
        result, left = await self._find(name)
        # Judged each time: what was asked a minute ago may be this host's by now.
        code, good, bad = judge(result, self._vet)
        for address, reason in bad:
            self._told(Refusal(source, name, address, reason))
        if good:
            self._known(name, good)
        return Reply(code, tuple(good), left), bool(bad) and not good


class OpenNames:
    """Decides for open sandboxes; see ``gatewaydns.Decide``."""

    def __init__(self, vetted: Vetted) -> None:
        self._vetted = vetted

    def decide(self, source: str, query: dns.message.Message) -> Reply | Awaitable[Reply]:
        """Say what a question is answered."""
        code, name = refused_kind(query), name_of(query)
        if code is not None or name is None:
            return Reply(dns.rcode.NXDOMAIN if code is None else code)
        return self._resolve(source, name)

    async def _resolve(self, source: str, name: str) -> Reply:
        reply, _ = await self._vetted.resolve(source, name)
        return reply
