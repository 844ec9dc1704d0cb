from __future__ import annotations

import random
import warnings

import pytest

from agent_image.files.proxy import hello, serverhello
from agent_image.files.proxy.hello import BAD_HELLO, NOT_TLS, BadHello, Hello, HelloReader
from agent_image.files.proxy.records import NotTls
from tests.unit.agent_image.proxy import hellos

NAME = "api.example.com"
ENCRYPTED_HELLO = 0xFE0D
EARLY = hellos.extension(42, b"")


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def read(data: bytes, size: int = 1 << 20) -> tuple[Hello, HelloReader] | None:
    reader = HelloReader()
    fed = pieces(data, size)
    for number, piece in enumerate(fed):
        found = reader.feed(piece)
        if found:
            assert bytes(reader.raw) + reader.rest + b"".join(fed[number + 1 :]) == data
            return found, reader
    assert bytes(reader.raw) == data
    return None


def name_in(data: bytes, size: int = 1 << 20) -> str | None:
    found = read(data, size)
    assert found
    return found[0].name


BIG = hellos.extension(51, bytes(15000)), hellos.extension(41, bytes(9000))


@pytest.mark.parametrize("step", [1, 2, 5, 6, 1000, 1 << 20])
@pytest.mark.parametrize(
    "data",
    [
        hellos.hello(NAME),
        hellos.hello(NAME, size=1),
        hellos.hello(NAME, size=3),
        hellos.hello(NAME, *BIG),
        hellos.hello(NAME, hellos.extension(ENCRYPTED_HELLO, bytes(300))),
        hellos.records(hellos.message(hellos.body(*BIG, hellos.names((0, NAME.encode()))))),
        hellos.records(hellos.message(hellos.body(hellos.names((0, NAME.encode())), session=bytes(32)))),
    ],
    ids=["plain", "a-byte-a-record", "three-a-record", "24-KiB", "encrypted", "name-last", "session"],
)
def test_the_name_is_found_however_the_hello_is_cut(data: bytes, step: int) -> None:
    assert name_in(data, step) == NAME


def test_of_an_encrypted_hello_the_outer_name_is_what_is_seen() -> None:
    inner = hellos.names((0, b"hidden.example"))
    outer = hellos.hello("public.example", hellos.extension(ENCRYPTED_HELLO, inner))
    assert name_in(outer) == "public.example"


def test_a_hello_may_say_no_name_and_may_have_no_extensions() -> None:
    assert name_in(hellos.hello(None, hellos.extension(16, b""))) is None
    assert name_in(hellos.hello(None)) is None


def test_a_name_is_given_as_it_was_said_and_judged_elsewhere() -> None:
    said = "API.Example.com\0.evil.example\xff"
    assert name_in(hellos.hello(said)) == said


def test_whether_data_may_follow_at_once_is_told() -> None:
    for more, early in (((), False), ((EARLY,), True)):
        found = read(hellos.hello(NAME, *more))
        assert found and found[0].early is early


def test_what_comes_behind_the_hello_is_kept_apart() -> None:
    for rest in (b"\x17\x03\x03\0\x01x", b"no record at all", hellos.hello("other.example")):
        found = read(hellos.hello(NAME) + rest)
        assert found and found[1].rest == rest


def _sized(size: int) -> bytes:
    short = len(hellos.body(hellos.names((0, NAME.encode())), hellos.extension(21, b"")))
    return hellos.hello(NAME, hellos.extension(21, bytes(size - short)))


def test_a_hello_may_be_64_kib_and_no_longer() -> None:
    assert name_in(_sized(65000)) == NAME
    with pytest.raises(BadHello, match="more than 65536") as caught:
        read(hellos.records(b"\x01\x01\x00\x01"))
    assert caught.value.reason == BAD_HELLO


NAMED = hellos.names((0, NAME.encode()))
EVIL = hellos.names((0, b"evil.example"))


@pytest.mark.parametrize(
    ("data", "reason", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", NOT_TLS, "no record"),
        (b"SSH-2.0-x\r\n", NOT_TLS, "no record"),
        (b"\x80\x2e\x01\x03\x01\0\x15\0\0\0\x10", NOT_TLS, "no record"),  # SSLv2
        (b"\x16\x02\x00\0\x05", NOT_TLS, "no record"),
        (b"\x16\x03\x05\0\x05", NOT_TLS, "no record"),
        (b"\x16\x03\x01\x40\x01", NOT_TLS, "too long"),
        (b"\x17\x03\x03\0\x01x", NOT_TLS, "no handshake"),
        (b"\x14\x03\x03\0\x01\x01", NOT_TLS, "no handshake"),
        (b"\x15\x03\x03\0\x02\x01\0", NOT_TLS, "no handshake"),
        (hellos.records(hellos.message(hellos.body(NAMED), 2)), BAD_HELLO, "does not begin with"),
        (b"\x16\x03\x01\0\0" + hellos.hello(), BAD_HELLO, "empty handshake"),
        (hellos.hello(size=10)[:15] + b"\x14\x03\x01\0\x01\x01", BAD_HELLO, "inside the hello"),
        (hellos.hello(size=10)[:15] + b"\x16\x03\x01\0\0", BAD_HELLO, "empty handshake"),
        (hellos.hello(size=10)[:15] + b"garbage", BAD_HELLO, "no record"),
        (hellos.records(hellos.message(hellos.body(NAMED)) * 2), BAD_HELLO, "behind the hello"),
        (hellos.records(hellos.message(hellos.body(NAMED)) + b"\x01"), BAD_HELLO, "behind the hello"),
        (hellos.records(hellos.message(hellos.body(NAMED, tail=b"x"))), BAD_HELLO, "behind the extensions"),
        (hellos.records(hellos.message(hellos.body(NAMED, EVIL))), BAD_HELLO, "twice"),
        (hellos.records(hellos.message(hellos.body(NAMED, NAMED))), BAD_HELLO, "twice"),
        (hellos.hello(NAME, EARLY, EARLY), BAD_HELLO, "twice"),
        (
            hellos.records(hellos.message(hellos.body(hellos.names((0, b"a"), (0, b"b"))))),
            BAD_HELLO,
            "several",
        ),
        (
            hellos.records(hellos.message(hellos.body(hellos.names((0, b"a"), (1, b"b"))))),
            BAD_HELLO,
            "several",
        ),
        (hellos.records(hellos.message(hellos.body(hellos.names((1, b"a"))))), BAD_HELLO, "another kind"),
        (hellos.records(hellos.message(hellos.body(hellos.names()))), BAD_HELLO, "longer than"),
        (hellos.records(hellos.message(hellos.body(hellos.extension(0, b"")))), BAD_HELLO, "longer than"),
        (
            hellos.records(hellos.message(hellos.body(hellos.extension(0, b"\0\x04\0\0\x01ax")))),
            BAD_HELLO,
            "list",
        ),
        (hellos.records(hellos.message(hellos.body(b"\0\0\0\x09x"))), BAD_HELLO, "longer than"),
        (hellos.records(hellos.message(hellos.body(NAMED)[:-1])), BAD_HELLO, "longer than"),
        (hellos.records(hellos.message(hellos.body(NAMED, version=0x0203))), BAD_HELLO, "version"),
        (hellos.records(hellos.message(hellos.body(NAMED, session=bytes(33)))), BAD_HELLO, "session id"),
        (hellos.records(hellos.message(hellos.body(NAMED, suites=b"\x13"))), BAD_HELLO, "cipher"),
        (hellos.records(hellos.message(hellos.body(NAMED, suites=b""))), BAD_HELLO, "cipher"),
        (hellos.records(hellos.message(b"")), BAD_HELLO, "longer than"),
        (hellos.records(hellos.message(bytes(60000)), size=1), BAD_HELLO, "too many records"),
    ],
)
def test_what_two_readers_could_read_differently_is_refused(data: bytes, reason: str, why: str) -> None:
    for step in (1, 7, 1 << 20):
        with pytest.raises(BadHello, match=why) as caught:
            read(data, step)
        assert caught.value.reason == reason


def test_records_that_may_come_before_a_second_hello_are_passed_over_and_passed_on() -> None:
    before = b"\x14\x03\x03\0\x01\x01" + b"\x17\x03\x03\0\x05early"
    reader = HelloReader((20, 23))
    found = None
    for piece in pieces(before + hellos.hello(NAME) + b"rest", 1):
        found = found or reader.feed(piece)
    assert found and found.name == NAME
    assert bytes(reader.raw) == before + hellos.hello(NAME)
    with pytest.raises(BadHello):
        HelloReader((20,)).feed(before)


# What OpenSSL makes and what it reads.


@pytest.mark.parametrize("version", hellos.VERSIONS)
@pytest.mark.parametrize(
    "name", [NAME, "a.b.c.d.example", "xn--bcher-kva.example", "a" * 63 + ".example", None]
)
@pytest.mark.parametrize("noise", [0, 1, 40, 1500], ids=lambda count: f"alpn-{count}")
def test_a_real_hello_is_read_as_openssl_reads_it(version: str, name: str | None, noise: int) -> None:
    protocols = [f"protocol-{number}-{'x' * 20}" for number in range(noise)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = hellos.made(name, version, protocols)
    if not data:
        pytest.skip(f"this OpenSSL does not speak TLS {version}")
    assert hellos.openssl_reads(data) == (True, name)
    for step in (1, 1000, 1 << 20):
        assert name_in(data, step) == name
    assert len(data) > noise * 20


def test_a_damaged_hello_that_is_taken_has_the_name_that_openssl_finds() -> None:
    chance = random.Random(7)
    seeds = [hellos.made(NAME, version) for version in hellos.VERSIONS] + [hellos.hello(NAME, EARLY)]
    taken = agreed = 0
    for _ in range(20000):
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.choice((1, 1, 2, 3))):
            at = chance.randrange(len(data))
            match chance.randrange(3):
                case 0:
                    data[at] = chance.choice((0, 1, 0xFF, data[at] ^ 1 << chance.randrange(8)))
                case 1:
                    data[at:at] = data[at : at + chance.randrange(1, 30)]
                case 2:
                    del data[at : at + chance.randrange(1, 4)]
        try:
            found = read(bytes(data))
        except BadHello:
            continue
        # Of one that is not ASCII, ssl tells nothing; it is no name anyway.
        if found and (found[0].name or "").isascii():
            taken += 1
            whole, name = hellos.openssl_reads(bytes(found[1].raw))
            if whole:
                agreed += 1
                assert name == found[0].name, bytes(data)
    assert taken > 1000 and agreed > 500


# What a server answers.


@pytest.mark.parametrize("step", [1, 3, 1 << 20])
@pytest.mark.parametrize("size", [1, 7, 1 << 14])
@pytest.mark.parametrize("retry", [False, True])
def test_a_server_that_asks_for_another_hello_is_recognised(step: int, size: int, retry: bool) -> None:
    warning = b"\x15\x03\x03\0\x02\x01\x70"
    data = warning + hellos.server_hello(retry, size)
    reader = serverhello.ServerReader()
    found = [answer for piece in pieces(data, step) if (answer := reader.feed(piece))]
    assert found[0] == (serverhello.AGAIN if retry else serverhello.ON)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x17\x03\x03\0\x01x",
        hellos.hello(),
        hellos.server_hello(True, 7)[:12] + b"\x14\x03\x03\0\x01\x01",
    ],
)
def test_an_answer_that_is_none_is_told(data: bytes) -> None:
    with pytest.raises(NotTls):
        serverhello.ServerReader().feed(data)


def test_the_random_of_a_retry_is_what_openssl_sends() -> None:
    assert hello.CLIENT_HELLO == 1 and hellos.RETRY_RANDOM == serverhello.RETRY
