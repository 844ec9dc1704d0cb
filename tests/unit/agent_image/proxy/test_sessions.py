"""What a client gets, and what reaches a server: with real sockets, and a clock that is set ahead."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from agent_image.files.proxy import answers, dialer, session, streams, tunnel
from agent_image.files.proxy.server import MOST, MOST_TOLD
from tests.unit.agent_image.proxy import hellos
from tests.unit.agent_image.proxy.world import LOOPBACK, NAME, OK, PATIENCE, World, told

HELLO = hellos.hello(NAME)
SERVER_HELLO = hellos.server_hello(retry=False)
RETRY = hellos.server_hello(retry=True)
SPEC = b"\x14\x03\x03\0\x01\x01"


def reply(status: int, reason: str, line: str, ident: str, allow: str = "") -> bytes:
    text = f"{line} (request {ident})\n"
    return (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: text/plain; charset=us-ascii\r\nContent-Length: {len(text)}\r\n"
        f"{allow}Connection: close\r\n\r\n{text}"
    ).encode()


MALFORMED = (
    400,
    "Bad Request",
    "400 malformed: what is asked for must be CONNECT name:port, with a domain name and no address",
)
DENIED = (
    403,
    "Forbidden",
    "403 denied: the policy of this sandbox does not allow this name on this port; see: corral denied",
)
METHOD = (
    405,
    "Method Not Allowed",
    "405 only CONNECT is served: this proxy carries TLS to allowed names; use https, not http",
)
LATE = (408, "Request Timeout", "408 the request did not come within 10 s")
UNREACHABLE = (502, "Bad Gateway", "502 unreachable: none of the name's addresses accepted a connection")
BUSY = (
    503,
    "Service Unavailable",
    "503 busy: too much at once, or the service that decides does not answer; try again",
)
UNRESOLVED = (504, "Gateway Timeout", "504 unresolved: the name could not be resolved to a public address")


def connect(target: str, *fields: str) -> bytes:
    return "\r\n".join([f"CONNECT {target} HTTP/1.1", *fields, "", ""]).encode("latin-1")


async def refused(world: World, request: bytes, said: tuple[int, str, str]) -> dict[str, Any]:
    """Ask, hold that exactly this is said, and return the line of the log."""
    client = await world.client()
    await client.send(request)
    came = await client.rest()
    line = await world.event("denied" if said[0] == 403 else "refused")
    assert came == reply(*said, ident=line["id"], allow="Allow: CONNECT\r\n" if said[0] == 405 else "")
    assert line["status"] == said[0]
    return line


@pytest.mark.parametrize(
    "request_",
    [
        connect("192.0.2.1:443"),
        connect("127.0.0.1:443"),
        connect("127.1:443"),
        connect("0x7f000001:443"),
        connect("[::1]:443"),
        connect("[::ffff:192.0.2.1]:443"),
        connect(f"{NAME}@evil.example:443"),
        connect(f"name@{NAME}:443"),
        connect(f"{NAME}:0"),
        connect(f"{NAME}:65536"),
        connect(f"{NAME}:+443"),
        connect(f"{NAME}:0443"),
        connect(NAME),
        connect(f"https://{NAME}:443/"),
        connect(f"{NAME}:443", "Content-Length: 4") + b"abcd",
        connect(f"{NAME}:443", "Transfer-Encoding: chunked"),
        connect(f"{NAME}:443", "A: b", " folded"),
        connect(f"{NAME}:443", "A: \0"),
        f"CONNECT {NAME}:443 HTTP/1.1\n\n".encode(),
        b"GET / HTTP/1.1\n\n",
        HELLO,
        b"\x05\x01\0",
        connect(f"{NAME}:443", "A: " + "b" * 8192),
    ],
    ids=lambda data: ascii(data[:50]),
)
@told
async def test_what_is_malformed_is_told_so_and_nobody_is_asked(world: World, request_: bytes) -> None:
    world.allow()
    await refused(world, request_, MALFORMED)
    assert world.asked == [] and world.nobody_came()


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
        b"GET http://api.example.com/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
        b"POST http://api.example.com/ HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
        b"connect api.example.com:443 HTTP/1.1\r\n\r\n",
        b"TRACE / HTTP/1.0\r\n\r\n",
    ],
    ids=lambda data: ascii(data[:40]),
)
@told
async def test_other_methods_are_told_the_rule_and_nobody_is_asked(world: World, request_: bytes) -> None:
    world.allow()
    await refused(world, request_, METHOD)
    assert world.asked == [] and world.nobody_came()


@told
async def test_a_name_that_is_not_allowed_is_denied_and_nothing_else_happens(world: World) -> None:
    world.allow()
    line = await refused(world, connect(f"Evil.Example.:{world.port}") + HELLO, DENIED)
    assert (line["name"], line["port"], line["why"]) == ("evil.example", world.port, "no entry allows it")
    assert world.asked == [{"v": 1, "op": "dial", "name": "evil.example", "port": world.port}]
    assert world.nobody_came()


@told
async def test_an_answer_is_not_lost_when_the_client_still_sends(world: World) -> None:
    client = await world.client()
    await client.send(b"POST http://api.example.com/ HTTP/1.1\r\nContent-Length: 200000\r\n\r\n")
    await world.event("refused")
    await client.send(bytes(100_000))
    assert (await client.exactly(9)) == b"HTTP/1.1 "
    await client.send(bytes(100_000))
    client.end()
    assert (await client.rest()).endswith(b")\n")


@told
async def test_who_goes_on_sending_after_an_answer_is_not_listened_to_for_long(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What ends it is how much it is, and not how long it takes.
    monkeypatch.setattr(session, "LINGER_WITHIN", 3600)
    client = await world.client()
    await client.send(b"GET / HTTP/1.1\r\n\r\n")
    total = 0
    with pytest.raises(ConnectionError):
        while True:
            sent = await client.send_what_goes()
            total += len(sent)
            assert total < session.LINGER_BYTES + (1 << 25)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("malformed", MALFORMED),
        ("denied", DENIED),
        ("resolve", UNRESOLVED),
        ("busy", BUSY),
        ("unready", BUSY),
        ("something-new", BUSY),
    ],
)
@told
async def test_what_the_enforcer_says_is_told(world: World, kind: str, said: tuple[int, str, str]) -> None:
    world.answers[NAME] = {"ok": False, "kind": kind, "text": "why"}
    assert (await refused(world, world.request(), said))["why"] == "why"
    assert world.nobody_came()


def granted(**changes: object) -> dict[str, object]:
    return {"ok": True, "addresses": [LOOPBACK], "protocol": "tls", "sni": True, **changes}


@pytest.mark.parametrize(
    "answer",
    [
        b"\n",
        b"[]\n",
        b"null\n",
        b"not json\n",
        b"[" * 4000 + b"\n",
        b'{"ok":true}\n',
        b'{"ok":true}\n{"ok":true}\n',
        b"x" * 5000,
        {"ok": 1, "addresses": [LOOPBACK], "protocol": "tls", "sni": True},
        granted(addresses=[]),
        granted(addresses=[LOOPBACK] * 9),
        granted(addresses=["api.example.com"]),
        granted(addresses=["127.1"]),
        granted(addresses=["::1"]),
        granted(addresses=[2130706433]),
        granted(addresses=LOOPBACK),
        granted(addresses=["127.0.0.1\0"]),
        granted(protocol="udp"),
        granted(protocol=None),
        granted(sni=0),
        {"ok": False, "kind": 3, "text": "x"},
        {"ok": False},
    ],
    ids=lambda value: ascii(value)[:40],
)
@told
async def test_an_answer_of_another_shape_opens_nothing(world: World, answer: Any) -> None:
    world.answers[NAME] = answer
    await refused(world, world.request(), BUSY)
    assert world.nobody_came()


@told
async def test_without_an_enforcer_it_is_busy_and_goes_on_when_there_is_one(world: World) -> None:
    await world.stop_enforcer()
    await refused(world, world.request(), BUSY)
    await world.start_enforcer()
    client, server = await world.through()
    await client.send(b"x")
    assert await server.recv() == b"x"


@told
async def test_a_restart_of_the_enforcer_is_not_noticed(world: World) -> None:
    for _ in range(3):
        client, server = await world.through()
        client.close()
        assert await server.rest() == b""
        server.close()
        await world.stop_enforcer()
        await world.start_enforcer()
    assert len(world.asked) == 3


@told
async def test_a_connection_that_the_enforcer_closed_unseen_is_asked_again(world: World) -> None:
    await world.through()
    (kept,) = world.dialer._kept
    lost = kept.ask

    async def ask(question: bytes) -> bytes:
        for writer in world._speaking:
            writer.transport.abort()
        return await lost(question)

    kept.ask = ask  # type: ignore[method-assign]
    await world.through()
    assert kept.lost


@told
async def test_questions_share_few_connections(world: World) -> None:
    for _ in range(30):
        client, _ = await world.through()
        client.abort()
    assert len(world._speaking) == 1
    await asyncio.gather(*(world.through() for _ in range(40)))
    await world.until(lambda: len(world._speaking) == dialer.KEPT, "more are kept")


@told
async def test_not_more_questions_than_connections_are_asked_at_a_time(world: World) -> None:
    world.answers[NAME] = None
    for _ in range(dialer.MOST_CONNECTIONS + 10):
        client = await world.client()
        await client.send(world.request())
    await world.until(lambda: len(world.asked) == dialer.MOST_CONNECTIONS, "not asked")
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(world.asked) == len(world._speaking) == dialer.MOST_CONNECTIONS


@told
async def test_an_enforcer_that_says_nothing_is_waited_for_and_no_longer(world: World) -> None:
    world.answers[NAME] = None
    client = await world.client()
    await client.send(world.request())
    await world.until(lambda: bool(world.asked), "not asked")
    await world.later(dialer.ANSWER_WITHIN - 0.5)
    assert not world.lines
    await world.later(1)
    assert (await client.rest()).startswith(b"HTTP/1.1 503 ")


@told
async def test_a_client_that_goes_while_the_enforcer_thinks_is_not_waited_for(world: World) -> None:
    world.answers[NAME] = None
    client = await world.client()
    await client.send(world.request())
    await world.until(lambda: bool(world.asked), "not asked")
    client.abort()
    await world.event("reset")
    await world.until(lambda: world.server.active == 0, "still waited for")


# Where it connects to.


@told
async def test_addresses_are_tried_in_order(world: World) -> None:
    world.allow(protocol="tcp", addresses=("127.0.0.2", "127.0.0.3", LOOPBACK))
    client = await world.client()
    await client.send(world.request() + b"early")
    assert await client.exactly(len(OK)) == OK
    server = await world.accepted()
    assert await server.recv() == b"early"


@told
async def test_when_no_address_takes_a_connection_that_is_told(world: World) -> None:
    world.allow(addresses=("127.0.0.2", "127.0.0.3"))
    line = await refused(world, world.request(), UNREACHABLE)
    assert "refused" in line["why"]


@told
async def test_an_address_that_says_nothing_is_given_up(world: World) -> None:
    # With its queue full, Linux answers no SYN.
    silent = socket.create_server(("127.0.0.2", world.port), backlog=0)
    filling = [socket.socket() for _ in range(3)]
    for sock in filling:
        sock.setblocking(False)
        sock.connect_ex(silent.getsockname())
    try:
        world.allow(protocol="tcp", addresses=("127.0.0.2", LOOPBACK))
        client = await world.client()
        await client.send(world.request())
        assert await world.seconds_until(client.exactly(len(OK))) == pytest.approx(5, abs=1)
        await world.accepted()

        world.allow(addresses=("127.0.0.2",) * 8)
        client = await world.client()
        await client.send(world.request())
        assert await world.seconds_until(client.exactly(20)) == pytest.approx(10, abs=1)
        assert (await world.event("refused"))["status"] == 502
    finally:
        for sock in (silent, *filling):
            sock.close()


# The hello.


@pytest.mark.parametrize(
    "hello",
    [
        HELLO,
        hellos.hello(NAME, size=1),
        hellos.hello(NAME, hellos.extension(51, bytes(20000))),
        hellos.hello(NAME, hellos.extension(0xFE0D, bytes(200))),
        hellos.hello("API.example.COM"),
        hellos.made(NAME),
        hellos.made(NAME, "1.2"),
    ],
    ids=["plain", "fragments", "20-KiB", "encrypted", "case", "openssl-1.3", "openssl-1.2"],
)
@pytest.mark.parametrize("pieces", ["with-the-request", "after", "single-bytes"])
@told
async def test_a_hello_with_the_right_name_arrives_as_it_is(world: World, hello: bytes, pieces: str) -> None:
    if pieces == "with-the-request":
        client, server = await world.through(hello, "tls")
    else:
        client, server = await world.through(b"", "tls")
        step = 1 if pieces == "single-bytes" and len(hello) < 1000 else len(hello)
        for at in range(0, len(hello), step):
            await client.send(hello[at : at + step])
            await asyncio.sleep(0)
    assert await server.exactly(len(hello)) == hello
    await server.send(SERVER_HELLO + b"and more")
    assert await client.exactly(len(SERVER_HELLO) + 8) == SERVER_HELLO + b"and more"
    await client.send(b"anything")
    assert await server.exactly(8) == b"anything"
    assert [question["op"] for question in world.asked] == ["dial"]


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (hellos.hello("evil.example"), "sni-mismatch"),
        (hellos.hello("x." + NAME), "sni-mismatch"),
        (hellos.hello(NAME + "\0.evil.example"), "sni-mismatch"),
        (hellos.hello("192.0.2.1"), "sni-mismatch"),
        (hellos.hello("public.example", hellos.extension(0xFE0D, NAME.encode())), "sni-mismatch"),
        (hellos.made("evil.example"), "sni-mismatch"),
        (hellos.hello(None), "no-sni"),
        (hellos.made(None), "no-sni"),
        (b"GET / HTTP/1.1\r\n\r\n", "not-tls"),
        (b"SSH-2.0-x\r\n", "not-tls"),
        (b"\x80\x2e\x01\x03\x01\0\x15\0\0\0\x10", "not-tls"),
        (
            hellos.records(hellos.message(hellos.body(hellos.names((0, NAME.encode()), (0, b"evil"))))),
            "bad-hello",
        ),
        (hellos.records(hellos.message(hellos.body(*[hellos.names((0, NAME.encode()))] * 2))), "bad-hello"),
        (HELLO[:20] + b"\x17" * 100 + hellos.records(b"\x01\xff\xff\xff"), "bad-hello"),
    ],
    ids=lambda value: value if isinstance(value, str) else ascii(value[:8]),
)
@pytest.mark.parametrize("early", [True, False], ids=["with-the-request", "after"])
@told
async def test_another_hello_is_closed_and_told_and_no_byte_of_it_goes_out(
    world: World, hello: bytes, reason: str, early: bool
) -> None:
    client, server = await world.through(hello if early else b"", "tls")
    if not early:
        await client.send(hello)
    assert await client.is_reset() and await server.is_reset()
    assert (await world.event("closed"))["reason"] == reason
    await world.until(lambda: len(world.asked) == 2, "not told")
    told_ = {"v": 1, "op": "refused", "name": NAME, "port": world.port, "reason": reason}
    assert world.asked[1] == told_


@told
async def test_a_hello_without_a_name_passes_where_the_enforcer_says_so_and_another_name_does_not(
    world: World,
) -> None:
    for hello, passes in ((hellos.hello(None), True), (HELLO, True), (hellos.hello("evil.example"), False)):
        world.allow(sni=False)
        client = await world.client()
        await client.send(world.request() + hello)
        assert await client.exactly(len(OK)) == OK
        server = await world.accepted()
        if passes:
            assert await server.exactly(len(hello)) == hello
        else:
            assert await server.is_reset()


@told
async def test_what_is_tcp_is_not_looked_at(world: World) -> None:
    client, server = await world.through(b"SSH-2.0-x\r\n", "tcp")
    assert await server.exactly(11) == b"SSH-2.0-x\r\n"
    await server.send(b"SSH-2.0-y\r\n")
    assert await client.exactly(11) == b"SSH-2.0-y\r\n"


@told
async def test_a_slow_request_is_ended(world: World) -> None:
    client = await world.client()
    for byte in b"CONNECT a":
        await client.send(bytes([byte]))
        await world.later(1)
        assert world.server.active == 1
    await world.later(1.5)
    line = await world.event("refused")
    assert await client.rest() == reply(*LATE, ident=line["id"])


@told
async def test_a_slow_hello_is_ended(world: World) -> None:
    client, server = await world.through(b"", "tls")
    for byte in HELLO[:9]:
        await client.send(bytes([byte]))
        await world.later(1)
        assert world.server.active == 1
    await world.later(1.5)
    assert await client.is_reset() and await server.is_reset()
    assert (await world.event("closed"))["reason"] == "no-hello"
    assert len(world.asked) == 1


@told
async def test_a_client_that_says_nothing_or_half_a_request_leaves_nothing(world: World) -> None:
    for sent in (b"", b"CONNECT a"):
        client = await world.client()
        await client.send(sent)
        client.end()
        assert await client.is_reset()
    client, server = await world.through(HELLO[:20], "tls")
    client.end()
    assert await server.is_reset()


# The second hello.


@pytest.mark.parametrize("size", [1, 1 << 14])
@told
async def test_after_a_retry_the_second_hello_with_the_same_name_arrives(world: World, size: int) -> None:
    client, server = await world.through(HELLO, "tls")
    assert await server.exactly(len(HELLO)) == HELLO
    retry = hellos.server_hello(True, size)
    await server.send(retry)
    assert await client.exactly(len(retry)) == retry
    second = SPEC + hellos.hello(NAME, hellos.extension(44, b"\0\1x"))
    for at in range(0, len(second), 7):
        await client.send(second[at : at + 7])
        await asyncio.sleep(0)
    await client.send(b"rest")
    assert await server.exactly(len(second) + 4) == second + b"rest"
    await server.send(SERVER_HELLO)
    assert await client.exactly(len(SERVER_HELLO)) == SERVER_HELLO


@pytest.mark.parametrize(
    "second",
    [
        hellos.hello("evil.example"),
        hellos.hello(None),
        SPEC + hellos.hello("evil.example"),
        b"\x17\x03\x03\0\x05early" + HELLO,
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["another", "none", "another-after-spec", "data-nobody-announced", "no-tls"],
)
@pytest.mark.parametrize("before", [True, False], ids=["sent-before-it-is-asked-for", "sent-after"])
@told
async def test_after_a_retry_another_second_hello_is_closed_and_told(
    world: World, second: bytes, before: bool
) -> None:
    client, server = await world.through(HELLO + (second if before else b""), "tls")
    assert await server.exactly(len(HELLO)) == HELLO
    await server.send(RETRY)
    assert await client.exactly(len(RETRY)) == RETRY
    if not before:
        await client.send(second)
    came = bytearray()
    with pytest.raises(ConnectionResetError):
        while piece := await server.recv():
            came += piece
    assert bytes(came) == b""
    await world.until(lambda: len(world.asked) == 2, "not told")
    assert world.asked[1]["reason"] == "second-hello"


@told
async def test_a_first_hello_without_a_name_is_followed_by_another_without(world: World) -> None:
    for second, passes in ((hellos.hello(None), True), (HELLO, False)):
        world.allow(sni=False)
        client = await world.client()
        await client.send(world.request() + hellos.hello(None))
        assert await client.exactly(len(OK)) == OK
        server = await world.accepted()
        await server.exactly(len(hellos.hello(None)))
        await server.send(RETRY)
        await client.send(second)
        if passes:
            assert await server.exactly(len(second)) == second
        else:
            assert await server.is_reset()


@told
async def test_early_data_goes_out_when_the_server_has_answered(world: World) -> None:
    early = hellos.hello(NAME, hellos.extension(42, b""))
    data = b"\x17\x03\x03\0\x05early"
    client, server = await world.through(early + data, "tls")
    assert await server.exactly(len(early)) == early
    await server.send(SERVER_HELLO)
    assert await server.exactly(len(data)) == data
    client, server = await world.through(early + data, "tls")
    await server.exactly(len(early))
    await server.send(RETRY)
    await client.send(HELLO)
    assert await server.exactly(len(data + HELLO)) == data + HELLO


@told
async def test_a_server_that_does_not_answer_in_tls_is_closed(world: World) -> None:
    client, server = await world.through(HELLO, "tls")
    await server.exactly(len(HELLO))
    await server.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert await server.is_reset()
    assert (await world.event("closed"))["reason"] == "server-not-tls"
    assert await client.is_reset()
    assert len(world.asked) == 1


@told
async def test_what_a_server_says_last_arrives_though_it_is_no_answer(world: World) -> None:
    client, server = await world.through(HELLO, "tls")
    await server.exactly(len(HELLO))
    alert = b"\x15\x03\x03\0\x02\x02\x28"
    await server.send(alert)
    server.end()
    assert await client.rest() == alert
    assert await server.rest() == b""
    assert await world.event("ended")


@told
async def test_a_client_that_has_ended_is_not_kept_for_a_server_that_does_not_answer(world: World) -> None:
    client, server = await world.through(HELLO, "tls")
    assert await server.exactly(len(HELLO)) == HELLO
    client.end()
    await world.later(0)
    await world.later(session.GONE_WITHIN - 1)
    assert world.server.active == 1
    assert await world.seconds_until(server.is_reset()) < 5
    await world.event("reset")


@told
async def test_a_client_that_has_ended_still_gets_what_comes_in_time(world: World) -> None:
    client, server = await world.through(HELLO, "tls")
    client.end()
    await server.exactly(len(HELLO))
    await world.later(session.GONE_WITHIN - 1)
    await server.send(SERVER_HELLO)
    assert await client.exactly(len(SERVER_HELLO)) == SERVER_HELLO
    assert await server.recv() == b""
    await world.later(session.GONE_WITHIN)
    await server.send(b"more")
    assert await client.exactly(4) == b"more"


@told
async def test_nothing_more_goes_out_until_the_server_has_answered(world: World) -> None:
    client, server = await world.through(HELLO, "tls")
    await server.exactly(len(HELLO))
    await client.send(b"more")
    for _ in range(50):
        await asyncio.sleep(0)
    with pytest.raises(BlockingIOError):
        server.sock.recv(1)
    await server.send(SERVER_HELLO)
    assert await server.exactly(4) == b"more"


# The end of it.


@pytest.mark.parametrize("who", ["client", "server"])
@told
async def test_one_direction_ends_and_the_other_goes_on(world: World, who: str) -> None:
    client, server = await world.through()
    one, other = (client, server) if who == "client" else (server, client)
    await one.send(b"last")
    one.end()
    assert await other.rest() == b"last"
    await other.send(b"still")
    assert await one.exactly(5) == b"still"
    await world.later(tunnel.IDLE - 10)
    await other.send(b"here")
    assert await one.exactly(4) == b"here"
    other.end()
    assert await one.rest() == b""
    line = await world.event("ended")
    assert (line["up"], line["down"]) == ((4, 9) if who == "client" else (9, 4))


@pytest.mark.parametrize("who", ["client", "server"])
@told
async def test_a_reset_is_passed_on(world: World, who: str) -> None:
    client, server = await world.through()
    one, other = (client, server) if who == "client" else (server, client)
    await one.send(b"half of")
    assert await other.exactly(7) == b"half of"
    one.abort()
    assert await other.is_reset()
    assert await world.event("reset")


@pytest.mark.parametrize("who", ["client", "server"])
@told
async def test_a_reset_is_passed_on_while_nobody_reads(world: World, who: str) -> None:
    client, server = await world.through()
    one, other = (client, server) if who == "client" else (server, client)
    assert len(await one.send_what_goes()) > streams.CHUNK
    one.abort()
    await world.event("reset")
    assert await other.is_reset()


@pytest.mark.parametrize("who", ["client", "server"])
@told
async def test_what_was_sent_before_an_end_arrives_though_the_reader_is_slow(world: World, who: str) -> None:
    client, server = await world.through()
    one, other = (client, server) if who == "client" else (server, client)
    sent = await one.send_what_goes()
    one.end()
    # Both directions at their end, and one of them not read yet, is no reset.
    other.end()
    assert await other.rest() == sent
    assert await one.rest() == b""
    assert await world.event("ended")


def session_of(world: World) -> session.Session:
    """Return the only session there is."""
    (task,) = world.server._served
    found: session.Session = task.get_coro().cr_frame.f_locals["self"]  # type: ignore[union-attr]
    return found


def tunnel_of(world: World) -> tunnel.Tunnel:
    """Return the only tunnel there is."""
    found = session_of(world)._tunnel
    assert found is not None
    return found


@told
async def test_little_waits_in_the_proxy_for_who_does_not_read(world: World) -> None:
    client, server = await world.through()
    sent = await client.send_what_goes()
    waiting = tunnel_of(world).up._pending
    assert waiting is not None and len(waiting) <= tunnel.PIECE
    client.end()
    assert await server.rest() == sent
    server.end()
    await world.event("ended")
    assert tunnel._Way.waiting == 0


@told
async def test_where_much_waits_little_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "MUCH", 0)
    client, server = await world.through()
    sent = await client.send_what_goes()
    waiting = tunnel_of(world).up._pending
    assert waiting is not None and len(waiting) <= tunnel.SMALL_PIECE
    client.end()
    assert await server.rest() == sent


@told
async def test_many_streams_that_wait_for_their_readers_arrive_as_they_were_sent(world: World) -> None:
    pairs = [await world.through() for _ in range(4)]
    ends = [end for pair in pairs for end in pair]
    sent = await asyncio.gather(*(end.send_what_goes(seed) for seed, end in enumerate(ends)))
    for end in ends:
        end.end()
    others = [end for client, server in pairs for end in (server, client)]
    came = await asyncio.gather(*(other.rest() for other in others))
    assert all(len(data) > streams.CHUNK for data in sent)
    assert came == sent


@pytest.mark.parametrize("who", ["client", "server"])
@told
async def test_what_came_before_a_reset_is_carried_when_its_reader_reads(world: World, who: str) -> None:
    client, server = await world.through()
    one, other = (client, server) if who == "client" else (server, client)
    one.sock.send(b"last words")
    one.abort()
    assert await other.exactly(10) == b"last words"
    assert await other.is_reset()


@told
async def test_a_reset_is_left_to_who_reads(world: World) -> None:
    client, server = await world.through()
    await client.send(b"x")
    assert await server.exactly(1) == b"x"
    one = session_of(world)
    assert one._client.reading
    # The kernel may tell of the reset first, with words before it that are not read yet.
    one._hang_up(one._client)
    await client.send(b"last words")
    assert await server.exactly(10) == b"last words"


@told
async def test_who_was_reset_and_is_not_read_any_more_is_not_forgotten(world: World) -> None:
    client, server = await world.through()
    # As when the reset is seen while there is still something to read before it.
    tunnel_of(world).up._stream.gone = True
    with pytest.raises(ConnectionResetError):
        while True:
            await client.send_what_goes()
    await world.event("reset")
    assert await server.is_reset()


@told
async def test_both_ends_have_ended_while_something_is_unread_and_that_arrives(world: World) -> None:
    client, server = await world.through()
    total = 0
    while tunnel_of(world).up._pending is None:
        total += client.sock.send(bytes(1 << 16))
        await asyncio.sleep(0)
    # Now nobody reads the client, and its end stands behind what is not read.
    await client.send(b"last")
    client.end()
    server.end()
    await world.until(lambda: tunnel_of(world).down.over, "the server's end is not seen")
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(await server.rest()) == total + 4
    assert await world.event("ended")


@told
async def test_ten_quiet_minutes_are_none_too_many_and_fifteen_are(world: World) -> None:
    client, server = await world.through()
    for _ in range(3):
        await world.later(600)
        await client.send(b"x")
        assert await server.exactly(1) == b"x"
    await world.later(600)
    await server.send(b"y")
    assert await client.exactly(1) == b"y"
    await world.later(tunnel.IDLE - 1)
    assert world.server.active == 1
    await world.later(2)
    assert await world.event("idle")
    assert await client.is_reset() and await server.is_reset()


# Many at a time.


@told
async def test_the_connection_that_is_too_much_is_told_so_and_there_is_room_again(world: World) -> None:
    many = [await world.client() for _ in range(MOST)]
    await world.until(lambda: world.server.active == MOST, "not all are served")
    line = await refused(world, world.request(), BUSY)
    assert line["why"] == "too many connections"
    # Those that say nothing are told too, and are not waited for long.
    silent = await world.client()
    assert (await silent.exactly(20)).startswith(b"HTTP/1.1 503 ")
    await world.later(session.LINGER_WITHIN + 0.5)
    await world.until(lambda: not world.server._told, "still told")
    many[7].close()
    await world.until(lambda: world.server.active == MOST - 1, "no room")
    client, server = await world.through()
    await client.send(b"x")
    assert await server.exactly(1) == b"x"


@told
async def test_of_those_that_are_too_many_a_few_are_told(world: World) -> None:
    every = [await world.client() for _ in range(MOST + MOST_TOLD + 1)]
    await world.until(lambda: len(world.server._told) == MOST_TOLD, "not all are told")
    assert (await every[MOST].exactly(12)) == b"HTTP/1.1 503"
    assert await every[-1].rest() == b""


@told
async def test_256_tunnels_carry_at_the_same_time(world: World) -> None:
    pairs = [await world.through() for _ in range(MOST)]
    for number, (client, _) in enumerate(pairs):
        await client.send(b"%d." % number)
    for number, (_, server) in enumerate(pairs):
        assert await server.rest_until(b".") == b"%d." % number


@told
async def test_without_a_descriptor_left_it_waits_and_goes_on(world: World) -> None:
    class Listening:
        def __init__(self, real: socket.socket) -> None:
            self.real = real
            self.fail = 1

        def accept(self) -> Any:
            if self.fail:
                self.fail -= 1
                raise OSError(24, "Too many open files")
            return self.real.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    world.server._listening = Listening(world.server._listening)  # type: ignore[assignment]
    client = await world.client()
    await client.send(b"GET / HTTP/1.1\r\n\r\n")
    await world.until(lambda: world.journal.counts.get("unaccepted") == 1, "not failed")
    assert world.server.active == 0
    await world.later(1)
    assert (await client.rest()).startswith(b"HTTP/1.1 405 ")


@told
async def test_the_end_of_the_proxy_resets_what_goes_on(world: World) -> None:
    client, server = await world.through()
    await world.server.close()
    assert await client.is_reset() and await server.is_reset()


# What is said.


def test_every_answer_is_one_line_with_its_request_and_nothing_of_it() -> None:
    for status, line in answers.LINES.items():
        said = answers.render(status, "ab-1").decode()
        head, _, text = said.partition("\r\n\r\n")
        assert text == f"{line} (request ab-1)\n"
        assert f"Content-Length: {len(text)}\r\n" in head + "\r\n"


@told
async def test_no_header_and_nothing_that_passes_is_in_the_log(world: World) -> None:
    world.allow(protocol="tcp")
    for name in (NAME, "evil.example"):
        client = await world.client()
        await client.send(
            connect(f"{name}:{world.port}", "Proxy-Authorization: Basic c2VjcmV0", "Cookie: secret")
            + b"secret"
        )
        client.end()
        if name == NAME:
            assert await client.exactly(len(OK)) == OK
            server = await world.accepted()
            assert await server.rest() == b"secret"
            server.close()
        await client.rest()
    await world.event("ended")
    text = json.dumps(world.lines)
    assert "ecret" not in text and "c2VjcmV0" not in text and "evil.example" in text


def test_the_tests_are_not_more_patient_than_the_proxy() -> None:
    assert PATIENCE < tunnel.IDLE
