from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from agent_image.files.entrypoint.tries import Try, exchange

LOOPBACK = "127.0.0.1"
Serve = Callable[[Callable[[socket.socket], None]], int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts TCP servers on ports of their own, which do one thing with each connection and close it."""
    listening: list[socket.socket] = []

    def start(act: Callable[[socket.socket], None]) -> int:
        server = socket.create_server((LOOPBACK, 0))
        listening.append(server)

        def loop() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    act(connection)

        threading.Thread(target=loop, daemon=True).start()
        return int(server.getsockname()[1])

    yield start
    for server in listening:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def until_closed(connection: socket.socket) -> None:
    while connection.recv(100):
        pass


def greet(connection: socket.socket) -> None:
    connection.sendall(b"hello")
    until_closed(connection)


def only(one: Try) -> Try:
    exchange([one])
    return one


@pytest.fixture
def unused() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])


def test_a_listening_port_connects(serve: Serve) -> None:
    assert only(Try(LOOPBACK, serve(until_closed))).kind == "connected"


@pytest.mark.parametrize("udp", [True, False])
def test_a_port_without_a_listener_is_refused(unused: int, udp: bool) -> None:
    found = only(Try(LOOPBACK, unused, b"x" * udp, udp=udp))
    assert found.kind == "refused"
    assert "ECONNREFUSED" in str(found)


def test_a_relay_with_nothing_behind_it_is_closed_and_one_with_something_connected(serve: Serve) -> None:
    empty = only(Try(LOOPBACK, serve(lambda connection: None), linger=5))
    real = only(Try(LOOPBACK, serve(until_closed), linger=0.2))
    speaking = only(Try(LOOPBACK, serve(greet), linger=10))
    assert speaking.seconds < speaking.linger
    assert (empty.kind, real.kind, speaking.kind) == ("closed", "connected", "data")


def test_a_connection_that_is_reset_was_accepted(serve: Serve) -> None:
    def reset(connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    port = serve(reset)
    # Now the reset is seen after the connection, now together with it.
    for _ in range(200):
        assert only(Try(LOOPBACK, port, linger=5)).kind == "closed"


def test_an_answer_over_tcp_is_read_to_its_end(serve: Serve) -> None:
    def answer(connection: socket.socket) -> None:
        assert connection.recv(10) == b"ask"
        connection.sendall(b"\0")
        connection.sendall(b"\4ab")
        connection.sendall(b"cd")
        until_closed(connection)

    found = only(Try(LOOPBACK, serve(answer), b"ask", wait=10))
    assert (found.kind, found.data) == ("data", b"\0\4abcd")
    # Not because time was up.
    assert found.seconds < found.wait


def test_a_server_that_takes_a_question_and_says_nothing_ends_in_time(serve: Serve) -> None:
    assert only(Try(LOOPBACK, serve(until_closed), b"ask", wait=0.1)).kind == "connected"
    assert only(Try(LOOPBACK, serve(lambda connection: None), b"ask", wait=5)).kind == "closed"


def test_udp_answers_are_data_and_silence_is_a_timeout() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((LOOPBACK, 0))
        silent = only(Try(*server.getsockname(), b"ask", udp=True, wait=0.1))
        assert (silent.kind, server.recv(10)) == ("timeout", b"ask")

        def answer() -> None:
            _, peer = server.recvfrom(10)
            server.sendto(b"told", peer)

        thread = threading.Thread(target=answer)
        thread.start()
        found = only(Try(*server.getsockname(), b"ask", udp=True, wait=5))
        thread.join()
        assert (found.kind, found.data) == ("data", b"told")


def test_many_tries_take_as_long_as_the_longest_and_leave_nothing_open(serve: Serve, unused: int) -> None:
    port = serve(until_closed)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind((LOOPBACK, 0))
        tries = [Try(*silent.getsockname(), b"x", udp=True, wait=0.3) for _ in range(50)]
        tries += [Try(LOOPBACK, port, linger=0.2) for _ in range(20)]
        tries += [Try(LOOPBACK, unused) for _ in range(20)]
        exchange(tries)
    assert [one.kind for one in tries] == ["timeout"] * 50 + ["connected"] * 20 + ["refused"] * 20
    # Anyhow far from the sum, which is 19 seconds.
    assert max(one.seconds for one in tries) < 5
    assert all(one.connection.fileno() == -1 for one in tries)


def test_a_connection_that_nobody_takes_up_or_refuses_is_a_timeout() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as full:
        full.bind((LOOPBACK, 0))
        full.listen(0)
        tries = [Try(*full.getsockname(), wait=0.3, linger=0.1) for _ in range(4)]
        exchange(tries)
    # The kernel takes one or two for a queue that nobody empties, and is silent to the others.
    assert tries[-1].kind == "timeout"


def test_nothing_to_try_is_over_at_once() -> None:
    exchange([])
