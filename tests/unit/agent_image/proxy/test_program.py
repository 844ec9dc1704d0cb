"""The program as it is in the image: one file, run by a Python that knows nothing of this tree."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from agent_image.archive import executable
from agent_image.files.proxy import main, serverhello
from agent_image.files.proxy.journal import BURST, LONGEST, PER_SECOND, Journal
from tests.unit.agent_image.proxy import hellos

LOOPBACK = "127.0.0.1"
# The oldest it has to run on, where this machine has one.
OLDEST = "3.9"


def _oldest() -> str | None:
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    installed = [str(path) for path in root.glob(f"versions/{OLDEST}.*/bin/python")]
    for python in filter(None, [shutil.which(f"python{OLDEST}"), *installed]):
        if subprocess.run([python, "-c", "import asyncio"], capture_output=True, check=False).returncode == 0:
            return python
    return None


@pytest.fixture
def enforcer(tmp_path: Path) -> Iterator[Path]:
    """An enforcer that allows ok.example.com, as TCP, and tls.example.com, on loopback."""
    path = tmp_path / "dial.sock"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()

    def serve(connection: socket.socket) -> None:
        with connection, connection.makefile("rwb") as file:
            for line in file:
                name = json.loads(line).get("name")
                allowed = name in ("ok.example.com", "tls.example.com")
                answer: dict[str, Any] = {"ok": False, "kind": "denied", "text": "no entry"}
                if allowed:
                    answer = {"ok": True, "addresses": [LOOPBACK], "sni": True}
                    answer["protocol"] = "tcp" if name == "ok.example.com" else "tls"
                file.write(json.dumps(answer).encode() + b"\n")
                file.flush()

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield path
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


class Program:
    def __init__(self, python: str, file: Path, dial: Path, listen: str = "127.0.0.1:0") -> None:
        self.process = subprocess.Popen(
            [python, "-IS", file, "--listen", listen, "--dial", dial],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def end(self, number: int = signal.SIGTERM) -> list[dict[str, Any]]:
        """Send the signal and return what it still says."""
        self.process.send_signal(number)
        out, error = self.process.communicate(timeout=20)
        assert (self.process.returncode, error) == (0, b"")
        return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "corral-proxy"
    path.write_bytes(executable("proxy"))
    return path


def ask(port: int, request: bytes) -> bytes:
    with socket.create_connection((LOOPBACK, port), timeout=20) as sock:
        sock.sendall(request)
        data = b""
        while piece := sock.recv(4096):
            data += piece
        return data


@pytest.mark.parametrize("oldest", [False, True])
def test_the_file_runs_by_itself_and_ends_at_once_with_its_counters(
    oldest: bool, file: Path, enforcer: Path
) -> None:
    python = _oldest() if oldest else sys.executable
    if python is None:
        pytest.skip(f"there is no Python {OLDEST} here")
    program = Program(python, file, enforcer)
    with socket.create_server((LOOPBACK, 0)) as upstream:
        port = program.line()["port"]
        assert ask(port, b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 405 ")
        assert ask(port, b"CONNECT evil.example:443 HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 403 ")
        client = socket.create_connection((LOOPBACK, port), timeout=20)
        client.sendall(b"CONNECT ok.example.com:%d HTTP/1.1\r\n\r\nhello" % upstream.getsockname()[1])
        server, _ = upstream.accept()
        assert client.recv(100).startswith(b"HTTP/1.1 200 ") and server.recv(100) == b"hello"
        # With a tunnel open.
        said = program.end()
        with client, server:
            with pytest.raises(ConnectionResetError):
                client.recv(1)
    assert [line["event"] for line in said] == ["refused", "denied", "allowed", "counters"]
    counts = said[-1]["counts"]
    assert {name: counts[name] for name in ("connections", "allowed", "denied", "refused", "active")} == {
        "connections": 3,
        "allowed": 1,
        "denied": 1,
        "refused": 1,
        "active": 1,
    }


@pytest.mark.parametrize("version", ["1.2", "1.3"])
@pytest.mark.parametrize("curve", [None, "secp384r1"], ids=["first-hello", "asked-for-another"])
def test_real_servers_and_clients_speak_tls_through_it(
    file: Path, enforcer: Path, version: str, curve: str | None
) -> None:
    name = "tls.example.com"
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name, "evil.example").configure_cert(context)
    context.maximum_version = hellos.VERSIONS[version]
    if curve:
        # A client of TLS 1.3 guesses another one first, and is asked for a second hello.
        context.set_ecdh_curve(curve)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    answers: list[bytes] = []

    def serve(upstream: socket.socket) -> None:
        for _ in range(2):
            connection, _ = upstream.accept()
            # Something as large as a chain of certificates, to and fro.
            with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True) as tls:
                answers.append(tls.recv(100))
                tls.sendall(bytes(1 << 20))
                tls.unwrap()

    with socket.create_server((LOOPBACK, 0)) as upstream:
        server = threading.Thread(target=serve, args=(upstream,), daemon=True)
        server.start()
        program = Program(sys.executable, file, enforcer)
        port = program.line()["port"]

        def through(said: str) -> tuple[int, str | None]:
            sock = socket.create_connection((LOOPBACK, port), timeout=20)
            sock.sendall(b"CONNECT %s:%d HTTP/1.1\r\n\r\n" % (name.encode(), upstream.getsockname()[1]))
            assert sock.recv(39).endswith(b"\r\n\r\n")
            with trust.wrap_socket(sock, server_hostname=said) as tls:
                tls.sendall(b"hello")
                size = 0
                while piece := tls.recv(1 << 16):
                    size += len(piece)
                return size, tls.version()

        assert through(name) == (1 << 20, f"TLSv{version}")
        with pytest.raises(OSError):
            through("evil.example")
        server.join(20)
        said = program.end()
    assert answers == [b"hello"]
    (closed,) = (line for line in said if line["event"] == "closed")
    assert closed["reason"] == "sni-mismatch"


@pytest.mark.parametrize(("curve", "wanted"), [(None, serverhello.ON), ("secp384r1", serverhello.AGAIN)])
def test_a_real_server_that_wants_another_curve_is_seen_to_ask_for_another_hello(
    curve: str | None, wanted: str
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("tls.example.com").configure_cert(context)
    if curve:
        context.set_ecdh_curve(curve)
    came, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    came.write(hellos.made("tls.example.com"))
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(came, sent, server_side=True).do_handshake()
    assert serverhello.ServerReader().feed(sent.read()) == wanted


def test_a_log_that_nobody_reads_stops_nothing(file: Path, enforcer: Path) -> None:
    program = Program(sys.executable, file, enforcer)
    port = program.line()["port"]
    assert program.process.stdout is not None
    # As small as a pipe can be: 4096 bytes hold some thirty lines.
    import fcntl

    fcntl.fcntl(program.process.stdout.fileno(), 1031, 4096)  # F_SETPIPE_SZ
    for _ in range(100):
        assert ask(port, b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 405 ")
    program.process.kill()
    out, _ = program.process.communicate(timeout=20)
    assert 10 < len(out.splitlines()) < 100
    assert all(json.loads(line) for line in out.splitlines())


def test_sigint_ends_it_too(file: Path, tmp_path: Path) -> None:
    program = Program(sys.executable, file, tmp_path / "nobody.sock")
    program.line()
    assert [line["event"] for line in program.end(signal.SIGINT)] == ["counters"]


def test_a_port_that_is_taken_is_said(file: Path, tmp_path: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        where = f"{LOOPBACK}:{taken.getsockname()[1]}"
        program = Program(sys.executable, file, tmp_path / "nobody.sock", where)
        out, error = program.process.communicate(timeout=20)
    assert (program.process.returncode, out) == (1, b"")
    assert error.decode() == f"corral-proxy: ERROR: cannot listen at {where}: Address already in use\n"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--listen", "127.0.0.1:1"],
        ["--dial", "x"],
        ["--listen", "127.0.0.1", "--dial", "x"],
        ["--listen", "localhost:1", "--dial", "x"],
        ["--listen", "127.0.0.1:65536", "--dial", "x"],
        ["--listen", "[::]:1", "--dial", "x"],
        ["--listen", "127.0.0.1:1", "--dial", "x", "y"],
    ],
)
def test_a_wrong_argument_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(argv)
    assert ended.value.code == 2
    assert capsys.readouterr().err


# The journal.


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_flood_of_events_is_counted_and_not_written() -> None:
    lines: list[bytes] = []
    clock = Clock()
    journal = Journal(lines.append, clock, lambda: 1.5)
    for _ in range(BURST + 100):
        journal.event("denied", name="a")
    assert len(lines) == BURST
    assert journal.counts == {"denied": BURST + 100, "unwritten": 100}
    clock.now += 1
    for _ in range(100):
        journal.event("denied", name="a")
    assert len(lines) == BURST + PER_SECOND
    assert json.loads(lines[0]) == {"time": 1.5, "event": "denied", "name": "a"}


def test_counters_are_written_when_one_has_changed() -> None:
    lines: list[bytes] = []
    journal = Journal(lines.append, Clock(), lambda: 0)
    journal.count("x")
    for active in (1, 1, 0, 0):
        journal.counters(active)
    assert [json.loads(line)["counts"] for line in lines] == [{"x": 1, "active": 1}, {"x": 1, "active": 0}]


def test_a_line_is_short_and_in_ascii() -> None:
    lines: list[bytes] = []
    journal = Journal(lines.append, Clock(), lambda: 0)
    journal.event("refused", why="\u202e\n\x1b[31m")
    journal.event("refused", why="x" * LONGEST)
    (line,) = lines
    assert line.isascii() and line.count(b"\n") == 1 and b"\x1b" not in line
    assert journal.counts["unwritten"] == 1


def test_a_descriptor_limit_that_is_too_low_is_raised() -> None:
    code = (
        "import resource; from agent_image.files.proxy import main; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 2000)); main._enough_descriptors(); "
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    root = str(Path(__file__).parents[4])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"1024 2000\n"
