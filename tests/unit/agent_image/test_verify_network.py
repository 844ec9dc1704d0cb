"""Against real sockets: loopback, and network namespaces of their own."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent_image.files.verify import network

PROJECT = Path(__file__).parents[3]
WAIT = 0.1


@contextlib.contextmanager
def listener(backlog: int = 8) -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(backlog)
        yield server


def port_of(server: socket.socket) -> int:
    return int(server.getsockname()[1])


def test_accepted_connection_is_connected() -> None:
    with listener() as server:
        assert network.tcp("127.0.0.1", port_of(server)).kind == "connected"


def test_closed_port_is_refused() -> None:
    with listener() as server:
        port = port_of(server)
    reply = network.tcp("127.0.0.1", port)
    assert (reply.kind, reply.code) == ("refused", 111)
    assert "ECONNREFUSED" in str(reply)


def test_host_that_says_nothing_is_a_time_out() -> None:
    with listener(backlog=0) as server, contextlib.ExitStack() as stack:
        for _ in range(2):  # fill the queue: further requests to connect are dropped
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        assert network.tcp("127.0.0.1", port_of(server), wait=WAIT).kind == "timeout"


def test_server_that_accepts_and_says_nothing_is_connected() -> None:
    with listener() as server:
        assert network.tcp("127.0.0.1", port_of(server), b"\0\1?", wait=WAIT).kind == "connected"


@contextlib.contextmanager
def serving(serve: Callable[[socket.socket], object]) -> Iterator[int]:
    """Accept one connection, let ``serve`` have it, close it; yield the port."""
    with listener() as server:

        def accept() -> None:
            connection, _ = server.accept()
            with connection:
                serve(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        yield port_of(server)
        thread.join()


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("end", [lambda _: None, reset], ids=["end", "reset"])
def test_server_that_hangs_up_at_once_is_told_from_one_that_waits(
    end: Callable[[socket.socket], object],
) -> None:
    with serving(end) as port:
        assert network.tcp("127.0.0.1", port, linger=5).kind == "closed"
    with listener() as server:
        assert network.tcp("127.0.0.1", port_of(server), linger=WAIT).kind == "connected"


def test_server_that_speaks_first_is_heard() -> None:
    with serving(lambda connection: connection.sendall(b"220 ready")) as port:
        reply = network.tcp("127.0.0.1", port, linger=5)
    assert (reply.kind, reply.data) == ("data", b"220 ready")


def test_question_that_is_answered_by_a_reset_reached_somebody() -> None:
    with serving(reset) as port:
        assert network.tcp("127.0.0.1", port, b"\0\1?", wait=5).kind == "closed"


def test_answer_in_pieces_is_put_together() -> None:
    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(100)
            for piece in (b"\0", b"\x04ab", b"cd"):
                connection.sendall(piece)

    with listener() as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        reply = network.tcp("127.0.0.1", port_of(server), b"\0\1?", wait=5)
        thread.join()
    assert (reply.kind, reply.data) == ("data", b"\0\x04abcd")


def test_datagram_to_a_closed_port_comes_back_as_an_error() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        port = port_of(server)
    assert network.udp("127.0.0.1", port, b"?").kind == "refused"


def test_datagram_without_an_answer_is_a_time_out() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        assert network.udp("127.0.0.1", port_of(server), b"?", wait=WAIT).kind == "timeout"


def test_answered_datagram_is_data() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))

        def serve() -> None:
            data, sender = server.recvfrom(100)
            server.sendto(data[::-1], sender)

        thread = threading.Thread(target=serve)
        thread.start()
        reply = network.udp("127.0.0.1", port_of(server), b"ab", wait=5)
        thread.join()
    assert (reply.kind, reply.data) == ("data", b"ba")


def test_short_or_foreign_message_is_malformed() -> None:
    asked = network.query("a.example", "A")
    good = asked[:2] + struct.pack("!HHHHH", 0x8183, 1, 2, 0, 0)
    assert network.answer_of(asked, good) == ("NXDOMAIN", 2)
    assert network.answer_of(asked, good[:11]) == ("MALFORMED", 0)
    other = bytes([asked[0] ^ 1]) + good[1:]
    assert network.answer_of(asked, other) == ("MALFORMED", 0)


def in_namespace(script: str, *options: str) -> str:
    """Run a script with the checker's modules in a fresh network namespace; return what it prints."""
    if os.geteuid() != 0:
        pytest.skip("making a network namespace needs root")
    head = "from agent_image.files.verify import network, reach\n"
    argv = ["unshare", "--net", *options, sys.executable, "-c", head + script]
    done = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.netns
def test_without_a_route_nothing_is_sent() -> None:
    assert in_namespace("print(network.tcp('203.0.113.1', 443).kind)") == "no-route"
    assert in_namespace("print(network.udp('203.0.113.1', 53, b'?').kind)") == "no-route"


@pytest.mark.netns
def test_packet_filter_answers_root_and_refuses_everybody_else() -> None:
    assert in_namespace("print(network.netfilter_errno())") == "0"
    unprivileged = "import os; os.setgid(4242); os.setuid(4242); print(network.netfilter_errno())"
    assert in_namespace(unprivileged) == "1"


@pytest.mark.netns
def test_other_file_systems_are_not_searched_for_set_id_files(tmp_path: Path) -> None:
    (tmp_path / "mounted").mkdir()
    script = f"""
import pathlib, subprocess
from agent_image.files.verify.identity import regular_files
top = pathlib.Path({str(tmp_path)!r})
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", top / "mounted"], check=True)
(top / "mounted/there").touch()
(top / "here").touch()
print([pathlib.Path(path).name for path, _ in regular_files(top)])
"""
    assert in_namespace(script, "--mount") == "['here']"


@pytest.mark.netns
def test_switching_ipv6_off_takes_the_address_of_the_loopback_interface_too() -> None:
    script = """
import pathlib, subprocess
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
conf = pathlib.Path("/proc/sys/net/ipv6/conf")
addresses = lambda: len(pathlib.Path("/proc/self/net/if_inet6").read_text().splitlines())
before = addresses()
for name in ("all", "default"):
    (conf / name / "disable_ipv6").write_text("1")
print(before, addresses(), sorted({(p / "disable_ipv6").read_text().strip() for p in conf.iterdir()}))
"""
    assert in_namespace(script) == "1 0 ['1']"


ANSWER = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 3\r\n\r\nno\n"


def answering(*pieces: bytes) -> Callable[[socket.socket], object]:
    """Send one piece for each that is received."""

    def serve(connection: socket.socket) -> None:
        for piece in pieces:
            connection.recv(65535)
            connection.sendall(piece)

    return serve


def test_an_answer_of_http_ends_with_its_length() -> None:
    held = threading.Event()
    with serving(lambda connection: (answering(ANSWER)(connection), held.wait(5))) as port:
        reply, after = network.converse("127.0.0.1", port, b"GET /\r\n\r\n", b"more", 5)
        held.set()
    assert (reply.kind, reply.data, after) == ("data", ANSWER, None)
    assert reply.seconds < 4
    assert network.status_of(reply.data) == 403


def test_what_follows_a_200_is_sent_and_its_answer_read() -> None:
    ok = b"HTTP/1.1 200 Connection established\r\n\r\n"
    with serving(answering(ok, b"\x15\3\3")) as port:
        reply, after = network.converse("127.0.0.1", port, b"CONNECT x:1\r\n\r\n", b"hello", 5)
    assert network.status_of(reply.data) == 200
    assert after is not None
    assert (after.kind, after.data) == ("data", b"\x15\3\3")
    with serving(answering(ok)) as port:
        _, after = network.converse("127.0.0.1", port, b"CONNECT x:1\r\n\r\n", b"hello", 5)
    assert after is not None
    assert after.kind == "closed"


@pytest.mark.parametrize(("serve", "kind"), [(lambda _: None, "closed"), (reset, "closed")])
def test_who_hangs_up_has_not_answered(serve: Callable[[socket.socket], object], kind: str) -> None:
    with serving(serve) as port:
        assert network.converse("127.0.0.1", port, b"GET /\r\n\r\n", b"", 5)[0].kind == kind


def test_who_says_nothing_is_waited_for_no_longer_than_told() -> None:
    with listener() as server:
        reply, _ = network.converse("127.0.0.1", port_of(server), b"GET /\r\n\r\n", b"", WAIT)
    assert reply.kind == "timeout"
    assert network.converse("127.0.0.1", port_of_closed(), b"x", b"", WAIT)[0].kind == "refused"


def port_of_closed() -> int:
    with listener() as server:
        return port_of(server)


def test_an_answer_without_an_end_is_read_up_to_a_bound() -> None:
    with serving(answering(b"x" * 100_000)) as port:
        reply, _ = network.converse("127.0.0.1", port, b"GET /\r\n\r\n", b"", 5)
    assert network.MOST <= len(reply.data) < 3 * network.MOST


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1", b"HTTP/1.1 OK", b"HTTP/1.1 2000 x", b"SSH-2.0-x 200 y"])
def test_what_is_no_answer_has_no_status(data: bytes) -> None:
    assert network.status_of(data) == 0
