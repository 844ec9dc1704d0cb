"""Our proxy beside mitmdump and beside none: ``python -m tests.bench.proxies``, on this machine, on loopback.

mitmproxy is installed into an environment of its own below the user's cache directory; it needs Python 3.12. Everything is
measured in turns, so that what the machine does beside meets all. Numbers and ratios, nothing is asserted; writes
docs/results/proxy-bench.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import trustme

from agent_image.archive import executable
from tests.results import RESULTS, commit

from .statistics import percentile

MITMPROXY = "mitmproxy==12.3.1"
NEEDED = (3, 12)
LOOPBACK = "127.0.0.1"
NAME, PLAIN = "localhost", "plain.example.com"
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
RESPONSE = 139
BULK = 1 << 28
TUNNELS = 100
HERE = Path(__file__).parent


class Way:
    """How a server is reached: ``proxy`` is a port, or None; ``names``: CONNECT is by name, else by address.

    mitmdump would resolve the name, and that is not what is compared.
    """

    def __init__(
        self, name: str, proxy: int | None = None, process: int | None = None, names: bool = True
    ) -> None:
        self.name = name
        self.proxy = proxy
        self.process = process
        self.names = names

    def open(self, name: str, port: int) -> socket.socket:
        """Return a connection to a server, through the proxy if there is one."""
        sock = socket.create_connection((LOOPBACK, self.proxy or port), timeout=60)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.proxy:
            target = f"{name if self.names else LOOPBACK}:{port}"
            sock.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                piece = sock.recv(1)
                if not piece:
                    raise ConnectionError(f"{self.name}: {head!r}")
                head += piece
            if b" 200 " not in head:
                raise ConnectionError(f"{self.name}: {head!r}")
        return sock


def take(sock: socket.socket, size: int) -> None:
    """Read exactly ``size`` bytes."""
    buffer = memoryview(bytearray(1 << 20))
    while size:
        found = sock.recv_into(buffer, min(size, len(buffer)))
        if not found:
            raise ConnectionError(f"the end, {size} bytes early")
        size -= found


class Bench:
    """The measurements; each returns seconds."""

    def __init__(self, ways: list[Way], http: int, plain: int, trust: ssl.SSLContext) -> None:
        self.ways = ways
        self._http = http
        self._plain = plain
        self._trust = trust

    def _tls(self, way: Way) -> ssl.SSLSocket:
        return self._trust.wrap_socket(way.open(NAME, self._http), server_hostname=NAME)

    def fresh_tls(self, way: Way) -> float:
        """A small request over TLS on a new connection."""
        began = time.perf_counter()
        with self._tls(way) as sock:
            sock.sendall(REQUEST)
            take(sock, RESPONSE)
            return time.perf_counter() - began

    def fresh_plain(self, way: Way) -> float:
        """Six bytes there and a hundred back on a new connection, without TLS."""
        began = time.perf_counter()
        with way.open(PLAIN, self._plain) as sock:
            sock.sendall(b"  100\n")
            take(sock, 100)
            return time.perf_counter() - began

    def bulk(self, way: Way) -> float:
        """Many bytes on one connection, without TLS."""
        with way.open(PLAIN, self._plain) as sock:
            began = time.perf_counter()
            sock.sendall(b"%d\n" % BULK)
            take(sock, BULK)
            return time.perf_counter() - began

    def _rest(self) -> None:
        """Wait until no proxy works any more for what was measured before."""
        processes = [way.process for way in self.ways if way.process is not None]
        before, seen = -1, 0
        for _ in range(100):
            before, seen = seen, sum(_processor(process) for process in processes)
            if before == seen:
                return
            time.sleep(0.005)

    def kept(self, count: int) -> dict[str, list[float]]:
        """Small requests on one connection over TLS."""
        found: dict[str, list[float]] = {way.name: [] for way in self.ways}
        with contextlib.ExitStack() as stack:
            opened = {way.name: stack.enter_context(self._tls(way)) for way in self.ways}
            for _ in range(count):
                for name, sock in opened.items():
                    began = time.perf_counter()
                    sock.sendall(REQUEST)
                    take(sock, RESPONSE)
                    found[name].append(time.perf_counter() - began)
        return found

    def in_turns(self, measure: Callable[[Way], float], count: int) -> dict[str, list[float]]:
        """Measure all ways ``count`` times; the first turn fills caches."""
        found: dict[str, list[float]] = {way.name: [] for way in self.ways}
        chance = random.Random(count)
        for turn in range(count + 1):
            for way in chance.sample(self.ways, len(self.ways)):
                self._rest()
                seconds = measure(way)
                if turn:
                    found[way.name].append(seconds)
        return found

    def worked(self, measure: Callable[[Way], float], count: int) -> dict[str, float]:
        """Return the milliseconds of processor that each proxy uses for one; what else runs does not show in it."""
        found = {}
        for way in self.ways:
            if way.process is not None:
                before = _processor(way.process)
                for _ in range(count):
                    measure(way)
                found[way.name] = round((_processor(way.process) - before) / 1e6 / count, 3)
        return found

    def memory(self) -> dict[str, float]:
        """Resident MiB of each proxy with so many tunnels open and used."""
        found = {}
        for way in self.ways:
            if way.process is None:
                continue
            with contextlib.ExitStack() as stack:
                for _ in range(TUNNELS):
                    sock = stack.enter_context(self._tls(way))
                    sock.sendall(REQUEST)
                    take(sock, RESPONSE)
                found[way.name] = round(_resident(way.process) / 1024, 1)
        return found


def _processor(process: int) -> int:
    """Return the nanoseconds a process has run, all its threads together."""
    threads = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads)


def _resident(process: int) -> int:
    """Return the KiB a process has in memory."""
    text = Path(f"/proc/{process}/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS:"))


# What takes part.


def python_for_mitmproxy() -> str | None:
    """Return an interpreter that mitmproxy runs on: on PATH, or one that pyenv has."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    on_path = [shutil.which(f"python3.{minor}") for minor in range(NEEDED[1], NEEDED[1] + 4)]
    found = [
        *on_path,
        *(str(path) for path in sorted(root.glob("versions/3.*/bin/python"))),
        shutil.which("python3"),
    ]
    code = f"import sys, venv; sys.exit(sys.version_info[:2] < {NEEDED})"
    for python in filter(None, found):
        # One that is only a stand-in for others may not run at all.
        if subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0:
            return python
    return None


def mitmdump() -> Path | None:
    """Return mitmdump, installed below the cache directory; None: this machine has no Python for it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "corral-bench"
    program = cache / MITMPROXY / "bin" / "mitmdump"
    if not program.exists():
        python = python_for_mitmproxy()
        if python is None:
            return None
        subprocess.run([python, "-m", "venv", "--clear", program.parents[1]], check=True)
        subprocess.run(
            [
                program.with_name("pip"),
                "install",
                "--quiet",
                "--quiet",
                "--disable-pip-version-check",
                MITMPROXY,
            ],
            check=True,
        )
    return program


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def _answers(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection((LOOPBACK, port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise ConnectionError(f"nobody listens on {port}")


@contextlib.contextmanager
def _started(*argv: object, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([str(word) for word in argv], **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ours(stack: contextlib.ExitStack, directory: Path) -> Way:
    """Start our proxy."""
    program = directory / "corral-proxy"
    program.write_bytes(executable("proxy"))
    argv = (sys.executable, "-IS", program, "--listen", f"{LOOPBACK}:0", "--dial", directory / "dial.sock")
    log = (directory / "log").open("wb")
    # A file, as a container's log is one: it is written to, and not read by us meanwhile.
    process = stack.enter_context(_started(*argv, stdout=log))
    deadline = time.monotonic() + 60
    while not (line := (directory / "log").read_bytes()).endswith(b"\n"):
        if time.monotonic() > deadline:
            raise ConnectionError("our proxy does not start")
        time.sleep(0.05)
    return Way("corral-proxy", json.loads(line.splitlines()[0])["port"], process.pid)


def theirs(stack: contextlib.ExitStack, directory: Path, program: Path, pem: Path, opaque: bool) -> Way:
    """Start mitmdump; ``opaque``: it carries TLS as it is, as ours does, else it opens it."""
    port = _free_port()
    name = "mitmdump, opaque" if opaque else "mitmdump, intercepting"
    home = directory / name.replace(", ", "-")
    options = ["--ignore-hosts", ".*"] if opaque else ["--set", f"ssl_verify_upstream_trusted_ca={pem}"]
    argv = [program, "-q", "--set", f"confdir={home}", "--listen-host", LOOPBACK, "-p", port, *options]
    process = stack.enter_context(_started(*argv, stdout=subprocess.DEVNULL))
    _answers(port, process)
    return Way(name, port, process.pid, names=False)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.proxies", description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    options = parser.parse_args()
    program = mitmdump()
    if program is None:
        print("no Python 3.12 or later is on this machine: mitmdump does not take part", file=sys.stderr)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        authority = trustme.CA()
        pem, root = directory / "server.pem", directory / "root.pem"
        authority.issue_cert(NAME).private_key_and_cert_chain_pem.write_to_path(pem)
        authority.cert_pem.write_to_path(root)
        script = (sys.executable, HERE / "proxyserve.py", pem, directory / "dial.sock")
        served = stack.enter_context(_started(*script, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert served.stdout is not None
        http, plain = json.loads(served.stdout.readline())
        ways = [Way("direct"), ours(stack, directory)]
        trust = ssl.create_default_context(cafile=str(root))
        if program is not None:
            ways += [theirs(stack, directory, program, root, opaque) for opaque in (True, False)]
            trust.load_verify_locations(directory / "mitmdump-intercepting" / "mitmproxy-ca-cert.pem")
        told = measured(Bench(ways, http, plain, trust), options.count)
    facts = {
        "commit": commit(),
        "python": platform.python_version(),
        "mitmproxy": MITMPROXY if program is not None else "no Python for it",
        "processors": os.cpu_count(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "count": options.count,
    }
    print(json.dumps({**facts, **told}, indent=2))
    print(table(told))
    (RESULTS / "proxy-bench.json").write_text(json.dumps({**facts, **told}, indent=2) + "\n")
    return 0


def measured(bench: Bench, count: int) -> dict[str, Any]:
    """Return medians and what they are to those of mitmdump."""
    kinds = {
        "new connection, TLS": bench.in_turns(bench.fresh_tls, count),
        "new connection, plain": bench.in_turns(bench.fresh_plain, count),
        "kept connection, TLS": bench.kept(count),
    }
    rows: dict[str, Any] = {
        f"{what}, ms": {name: round(1000 * percentile(seconds, 0.5), 3) for name, seconds in found.items()}
        for what, found in kinds.items()
    }
    # Turn by turn: what slows one of a turn down slows the others down as well.
    added = {
        what: {
            name: percentile([one - other for one, other in zip(seconds, found["direct"], strict=True)], 0.5)
            for name, seconds in found.items()
        }
        for what, found in kinds.items()
    }
    rows |= {
        f"{what}, over direct, ms": {
            name: round(1000 * seconds, 3) for name, seconds in found.items() if name != "direct"
        }
        for what, found in added.items()
    }
    bulk = bench.in_turns(bench.bulk, max(3, count // 50))
    rows["bulk, MiB/s"] = {
        name: round(BULK / 2**20 / percentile(seconds, 0.5)) for name, seconds in bulk.items()
    }
    rows["processor for a new connection, TLS, ms"] = bench.worked(bench.fresh_tls, count)
    rows["processor for a new connection, plain, ms"] = bench.worked(bench.fresh_plain, count)
    rows[f"processor for {BULK >> 20} MiB, ms"] = bench.worked(bench.bulk, max(3, count // 50))
    rows[f"resident with {TUNNELS} tunnels, MiB"] = bench.memory()
    return {"medians": rows, "corral-proxy against mitmdump": ratios(rows)}


def ratios(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return how many times better ours is than each mitmdump, of each row: quicker, faster, smaller."""
    found: dict[str, dict[str, float]] = {}
    for what, row in rows.items():
        own = row["corral-proxy"]
        others = {name: value for name, value in row.items() if name.startswith("mitmdump")}
        more_is_better = what.endswith("/s")
        found[what] = {
            name: round(own / value if more_is_better else value / own, 1)
            for name, value in others.items()
            if own > 0 and value > 0
        }
    return {what: row for what, row in found.items() if row}


def table(told: dict[str, Any]) -> str:
    """Return the medians and ratios as a table in Markdown: decision 065 holds it."""
    names = list(told["medians"]["kept connection, TLS, ms"])
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for what, row in told["medians"].items():
        times = told["corral-proxy against mitmdump"].get(what, {})
        cells = [
            f"{row[name]:g} ({times[name]:g}×)" if name in times else f"{row[name]:g}" if name in row else "–"
            for name in names
        ]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
