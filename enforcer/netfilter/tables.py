"""Reading and writing iptables, one class for each of the two. What is written is decided in ``plan``."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from enforcer.netfilter import process, xtlegacy
from enforcer.netfilter.plan import Lines, parse_save
from enforcer.netfilter.process import Run, ToolError

Script = tuple[int, str]
"""An address family, and what iptables-restore would get."""

TABLES = ((4, "filter"), (4, "nat"), (6, "filter"))
LOCK = Path("/run/xtables.lock")
PATIENCE, BETWEEN = 10.0, 0.02
"""Seconds to wait for the lock, and between two tries: others hold it for milliseconds."""
CHILD = (
    "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); "
    "from enforcer.netfilter.legacy import main; sys.exit(main())"
)


LISTINGS: Mapping[tuple[int, str], tuple[str, ...]] = {
    (4, "filter"): ("iptables-nft", "-S"),
    (4, "nat"): ("iptables-nft", "-t", "nat", "-S"),
    (6, "filter"): ("ip6tables-nft", "-S"),
}


class Tables(Protocol):
    """One of the two iptables. Methods raise ToolError or OSError."""

    def read(self) -> dict[tuple[int, str], Lines]:
        """Return (family, table) -> chain -> rules, as ``plan.Observed`` has them."""

    def restore(self, scripts: Sequence[Script]) -> None:
        """Carry scripts of iptables-restore out, each all or nothing, leaving what they do not name."""

    def new_chain(self, name: str) -> None:
        """Make a chain of the IPv4 filter table; one that exists is an error."""


class NftTables:
    """iptables on nft, through its own programs."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def read(self) -> dict[tuple[int, str], Lines]:
        """See Tables."""
        # Threads of this call alone: they are in the network namespace of the one that made them.
        with ThreadPoolExecutor(len(LISTINGS)) as pool:
            texts = pool.map(lambda words: self._run(words, None), LISTINGS.values())
            return dict(zip(LISTINGS, map(parse_save, texts), strict=True))

    def restore(self, scripts: Sequence[Script]) -> None:
        """See Tables."""
        for family, text in scripts:
            tool = "iptables-nft-restore" if family == 4 else "ip6tables-nft-restore"
            self._run((tool, "--noflush", "-w"), text)

    def new_chain(self, name: str) -> None:
        """See Tables."""
        self._run(("iptables-nft", "-w", "-N", name), None)


class LegacyTables:
    """The legacy tables: read from the kernel itself, written by ``legacy`` (python-iptables).

    The library is C called through ctypes and keeps copies of tables, so each write has a process of its own:
    what goes wrong in there is an error, and not the end of the writer.
    """

    def __init__(
        self,
        run: Run = process.run,
        lock: Path = LOCK,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run = run
        self._lock = lock
        self._clock = clock
        self._sleep = sleep

    def read(self) -> dict[tuple[int, str], Lines]:
        """See Tables."""
        return {(family, table): xtlegacy.read(family, table).lines for family, table in TABLES}

    def restore(self, scripts: Sequence[Script]) -> None:
        """See Tables."""
        paths = json.dumps(library_paths())
        with self._locked():
            self._run((sys.executable, "-I", "-S", "-c", CHILD, paths), json.dumps(list(scripts)))

    def new_chain(self, name: str) -> None:
        """See Tables."""
        if name in xtlegacy.read(4, "filter").chains:
            raise FileExistsError(f"chain {name} exists")
        self.restore([(4, f"*filter\n:{name} - [0:0]\nCOMMIT\n")])

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock that iptables and Docker take: the kernel itself lets writers undo each other."""
        with contextlib.ExitStack() as stack:
            descriptor = self._open(stack)
            self._take(descriptor)
            try:
                yield
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)

    def _take(self, descriptor: int) -> None:
        """Take the lock, or fail: whoever keeps it must not stop the writer from doing everything else."""
        end = self._clock() + PATIENCE
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if self._clock() >= end:
                    raise TimeoutError(
                        f"another program has held {self._lock} for {PATIENCE:.0f} s: fuser {self._lock}"
                    ) from None
            self._sleep(BETWEEN)

    def _open(self, stack: contextlib.ExitStack) -> int:
        try:
            descriptor = os.open(self._lock, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            # Only root may open it: the service manager opened it for us, as standard input.
            if not os.path.samestat(os.fstat(0), self._lock.stat()):
                raise
            return 0
        stack.callback(os.close, descriptor)
        return descriptor


def library_paths() -> list[str]:
    """Return the directories that hold this package and python-iptables."""
    found = [str(Path(__file__).resolve().parents[2])]
    spec = importlib.util.find_spec("iptc")
    if spec is not None and spec.origin is not None:
        found.append(str(Path(spec.origin).parents[1]))
    return list(dict.fromkeys(found))


def legacy_usable() -> bool:
    """Tell whether python-iptables is here."""
    return importlib.util.find_spec("iptc") is not None


__all__ = ["LOCK", "LegacyTables", "NftTables", "Tables", "ToolError", "legacy_usable", "library_paths"]
