"""Where the stand-ins for the outside ask whether they shall fail."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from enforcer.netfilter.kernel import KernelError
from policy.errors import EnforcerError, EngineError


class ServiceKilled(SystemExit):
    """kill -9 of the service. A SystemExit, because asyncio lets nothing else through."""


class WriterKilled(BaseException):
    """kill -9 of the writer."""


ERRORS: dict[str, Callable[[str], BaseException]] = {
    "engine": lambda where: EngineError(f"Docker: injected failure of {where}"),
    "request": lambda where: EnforcerError(f"asking the writer failed: injected, {where}"),
    "answer": lambda where: EnforcerError(f"the writer broke off its answer: injected, {where}"),
    "netlink": lambda where: KernelError(f"netlink: injected failure of {where}"),
    "tool": lambda where: KernelError(f"iptables: injected failure of {where}"),
    "file": lambda where: OSError(errno.ENOSPC, "No space left on device", where),
    "claims": lambda where: KernelError(f"the claims cannot be saved: injected, {where}"),
    "dns": TimeoutError,
}


@dataclass
class Faults:
    """Counts external calls by kind and by place. ``fail`` maps a kind to the number of the call that fails.

    ``kill_service`` and ``kill_writer`` count down over the writes of that process: at 0 it dies there.
    """

    counts: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)
    fail: dict[str, int] = field(default_factory=dict)
    happened: list[str] = field(default_factory=list)
    kill_service: int | None = None
    kill_writer: int | None = None

    def call(self, kind: str, where: str) -> None:
        """Count a call and fail it when it is its turn."""
        self.counts[kind] += 1
        self.places[where] += 1
        if self.fail.get(kind) == self.counts[kind]:
            self.happened.append(f"{kind} {self.counts[kind]}: {where}")
            raise ERRORS[kind](where)

    def service_writes(self, where: str) -> None:
        """Mark a place between two writes of the service."""
        if self.kill_service is not None:
            self.kill_service -= 1
            if self.kill_service < 0:
                self.kill_service = None
                self.happened.append(f"service killed: {where}")
                raise ServiceKilled(where)

    def writer_writes(self, where: str) -> None:
        """Mark a place between two writes of the writer."""
        if self.kill_writer is not None:
            self.kill_writer -= 1
            if self.kill_writer < 0:
                self.kill_writer = None
                self.happened.append(f"writer killed: {where}")
                raise WriterKilled(where)
