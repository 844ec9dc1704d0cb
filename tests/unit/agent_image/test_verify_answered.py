"""The checker where names of the policy are answered: every check fails when just its property is broken."""

from __future__ import annotations

import errno
import struct
from pathlib import Path
from typing import Any

import pytest

from agent_image.files.verify import main
from agent_image.files.verify.network import WAIT, Reply
from tests.unit.agent_image.container import BODY, GATEWAY, PROBE, RESOLVER, Container, expect
from tests.unit.agent_image.test_opened import answer

ALLOWED, DENIED = "api.example.org", "example.com"
ADDRESS = "203.0.113.80"
EMBEDDED = "127.0.0.11"
ANSWERED: dict[str, Any] = {"denied": DENIED, "permitted": [ALLOWED, 443]}
NOERROR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED = 0, 2, 3, 4, 5
OWN = ["dns-outside-closed", "dns-answers-only-permitted", "dns-answers-permitted"]
KINDS = {1: "A", 28: "AAAA", 16: "TXT"}


class Answering(Container):
    """One whose gateway answers what it must; a test makes it wrong in one way."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        # (name, record, server, way) -> (code, addresses); None: silence
        self.wrong: dict[tuple[str, str, str, str], tuple[int, list[str]] | None] = {}
        self.open_tcp[ADDRESS, 443] = Reply("connected", 0.01)

    def told(self, message: bytes, server: str, way: str) -> bytes | None:
        at, labels = 12, []
        while size := message[at]:
            labels.append(message[at + 1 : at + 1 + size].decode())
            at += 1 + size
        name, record = ".".join(labels), KINDS[struct.unpack_from("!H", message, at + 1)[0]]
        right = (NOERROR, [ADDRESS]) if name == ALLOWED and record == "A" else (NXDOMAIN, [])
        found = self.wrong.get((name, record, server, way), right)
        return None if found is None else answer(found[0], *found[1])(message)

    def udp(self, address: str, port: int, payload: bytes, wait: float = WAIT) -> Reply:
        if port == 53 and address in {EMBEDDED, GATEWAY}:
            data = self.told(payload, address, "UDP")
            return Reply("timeout", wait) if data is None else Reply("data", 0.01, data)
        return super().udp(address, port, payload, wait)

    def tcp(self, address: str, port: int, payload: bytes = b"", linger: float = 0.0) -> Reply:
        if port == 53 and payload and address in {EMBEDDED, GATEWAY}:
            data = self.told(payload[2:], address, "TCP")
            return Reply("timeout", WAIT) if data is None else Reply("data", 0.01, _framed(data))
        return super().tcp(address, port, payload, linger)


def _framed(data: bytes) -> bytes:
    return struct.pack("!H", len(data)) + data


@pytest.fixture
def inside(tmp_path: Path) -> Answering:
    return Answering(tmp_path)


def found(inside: Container, **changes: Any) -> dict[str, tuple[str, str]]:
    body = {**BODY, "answered": {**ANSWERED, **changes}}
    return {r["check"]: (r["status"], r["detail"]) for r in main.verify(body, inside)}


def failing(inside: Container, **changes: Any) -> set[str]:
    return {name for name, (status, _) in found(inside, **changes).items() if status == "fail"}


def test_an_answerer_that_is_right_passes_everything(inside: Answering) -> None:
    results = found(inside)
    assert {name: results[name][0] for name in OWN} == dict.fromkeys(OWN, "ok")
    assert failing(inside) == set()
    assert not {*OWN} & {name for name, _ in main.checks(expect())}


def test_what_would_be_wrong_there_says_why_it_is_left_out(inside: Answering) -> None:
    results = found(inside)
    for name in ("dns-closed", "embedded-dns-closed"):
        assert results[name][0] == "skip"
        assert results[name][1].startswith("egress.dns is answer")
    # The same container, where nothing says so.
    ordinary = {r["check"]: r["status"] for r in main.verify(BODY, inside)}
    assert ordinary["embedded-dns-closed"] == ordinary["dns-closed"] == "fail"


@pytest.mark.parametrize("way", ["UDP", "TCP"])
@pytest.mark.parametrize("server", [EMBEDDED, GATEWAY])
@pytest.mark.parametrize("record", ["A", "AAAA", "TXT"])
@pytest.mark.parametrize("wrong", [(NOERROR, ["203.0.113.9"]), (NOERROR, []), (NXDOMAIN, ["203.0.113.9"])])
def test_a_name_that_is_not_permitted_and_answered_is_found(
    inside: Answering, way: str, server: str, record: str, wrong: tuple[int, list[str]]
) -> None:
    inside.wrong[DENIED, record, server, way] = wrong
    assert failing(inside) == {"dns-answers-only-permitted"}


@pytest.mark.parametrize("code", [SERVFAIL, REFUSED])
def test_a_name_that_is_not_permitted_does_not_exist_and_is_not_an_error(
    inside: Answering, code: int
) -> None:
    inside.wrong[DENIED, "A", EMBEDDED, "UDP"] = (code, [])
    assert failing(inside) == {"dns-answers-only-permitted"}


def test_a_kind_of_question_that_is_answered_for_no_name_may_be_refused(inside: Answering) -> None:
    inside.wrong[DENIED, "TXT", EMBEDDED, "UDP"] = (NOTIMP, [])
    assert failing(inside) == set()


def test_a_resolver_that_says_nothing_is_found(inside: Answering) -> None:
    inside.wrong[DENIED, "A", EMBEDDED, "UDP"] = None
    assert failing(inside) == {"dns-answers-only-permitted"}
    # Only Docker's resolver has to be able to ask the gateway.
    inside.wrong = {(DENIED, "A", GATEWAY, way): None for way in ("UDP", "TCP")}
    assert failing(inside) == set()


@pytest.mark.parametrize("wrong", [(NXDOMAIN, []), (SERVFAIL, []), (NOERROR, []), None])
def test_a_permitted_name_without_an_answer_is_found(inside: Answering, wrong: Any) -> None:
    inside.wrong[ALLOWED, "A", EMBEDDED, "UDP"] = wrong
    assert failing(inside) == {"dns-answers-permitted"}


def test_an_address_that_is_told_and_not_open_is_found(inside: Answering) -> None:
    inside.open_tcp[ADDRESS, 443] = Reply("refused", 0.001, code=errno.ECONNREFUSED)
    assert failing(inside) == {"dns-answers-permitted"}


def test_a_policy_of_zones_alone_has_no_name_to_try(inside: Answering) -> None:
    results = found(inside, permitted=None)
    assert results["dns-answers-permitted"][0] == "skip"
    assert failing(inside, permitted=None) == set()


@pytest.mark.parametrize("server", [RESOLVER, PROBE])
@pytest.mark.parametrize("way", ["udp", "tcp"])
def test_a_resolver_elsewhere_that_answers_is_found(inside: Answering, server: str, way: str) -> None:
    (inside.open_udp if way == "udp" else inside.open_tcp)[server, 53] = Reply("data", 0.01, b"x")
    assert failing(inside) == {"dns-outside-closed"}


@pytest.mark.parametrize(
    "change", [{"colour": "red"}, {"denied": None}, {"permitted": "x"}, {"permitted": [1, 2]}]
)
def test_what_is_not_understood_is_an_error(inside: Answering, change: dict[str, Any]) -> None:
    assert failing(inside, **change) == {"expectations"}
