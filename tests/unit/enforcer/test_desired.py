"""The desired state never asks the writer for more than it takes: it would refuse that with all the rest."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from math import inf

import pytest

from enforcer import desired
from enforcer.granting import Opened
from enforcer.netfilter.model import MAX_REQUEST
from enforcer.pins import Grant
from enforcer.writerclient import PROTOCOL_VERSION
from policy.declaration import Declaration, HostService, Name, Pattern

from .sessionbench import NETWORK, proxy, session

PINNED = session(
    1,
    declaration=Declaration(
        names=(Name(host="a.example.com"),), dns="answer", patterns=(Pattern(host="a.example.com"),)
    ),
)


def addresses(first: int, count: int) -> list[str]:
    return [f"192.0.{number // 256}.{number % 256}" for number in range(first, first + count)]


def doors(first: int, count: int, end: float = 99.0) -> list[Opened]:
    return [Opened(address, 443, "b.example.com", end) for address in addresses(first, count)]


def test_pins_come_first_and_no_container_has_more_than_the_writer_takes() -> None:
    pinned = {"c1": {"a.example.com": tuple(Grant(address, (443,)) for address in addresses(0, 1000))}}
    kept = [((PINNED.address, "tcp", 443, address), "kept", 50.0) for address in addresses(2000, 20)]
    rules = desired.desired([PINNED], [NETWORK], pinned, kept, {"c1": doors(990, 500)})
    assert Counter(row[0] for row in rules.pins)[PINNED.address] == desired.PER_SOURCE
    assert {row[3] for row in rules.pins} >= {*addresses(0, 1000), *addresses(2000, 20)}
    # Of what was opened on demand, what was used last is there.
    assert (PINNED.address, "tcp", 443, "192.0.3.232") in rules.pins
    # A pin has no end, whoever else opened it.
    assert (PINNED.address, "tcp", 443, "192.0.3.230") not in rules.ends
    assert rules.ends[PINNED.address, "tcp", 443, "192.0.3.232"] == 99.0


def test_all_together_are_no_more_than_the_writer_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desired, "BYTES", 1 << 30)
    every = [
        session(number, container=f"c{number}", address=f"172.16.{number // 60}.{number % 60 + 2}")
        for number in range(150)
    ]
    opened = {one.container: doors(0, 512) for one in every}
    rules = desired.desired(every, [NETWORK], {}, (), opened)
    assert len(rules.pins) == desired.ALTOGETHER


def test_what_is_sent_is_no_longer_than_the_writer_takes_however_long_the_comments_are() -> None:
    every = [
        session(number, container=f"c{number}", address=f"172.16.{number // 60}.{number % 60 + 2}")
        for number in range(80)
    ]
    long = ".".join(["n" * 60] * 4)
    shelf = [Opened(f"192.0.{100 + n // 256}.{n % 256}", 65000, long, 86400.0) for n in range(512)]
    pinned = {"c0": {"a.example.com": tuple(Grant(address, (443,)) for address in addresses(0, 400))}}
    rules = desired.desired(every, [NETWORK], pinned, (), {one.container: shelf for one in every})
    body = {
        "pins": [[*row, text] for row, text in rules.pins.items()],
        "host": [[*row, text] for row, text in rules.host.items()],
        "lives": rules.lives(0.0),
    }
    size = len(json.dumps({"v": PROTOCOL_VERSION, **body}))
    assert 0.9 * desired.BYTES < size <= desired.BYTES < MAX_REQUEST - (1 << 20)
    # The last ones go without, and no pin does.
    assert {row[3] for row in rules.pins if row[0] == every[0].address} >= set(addresses(0, 400))
    assert not any(row[0] == every[-1].address for row in rules.pins)


def test_the_last_end_of_what_an_element_stands_for_holds() -> None:
    one = session(1, container="c1")
    kept = [((one.address, "tcp", 443, "192.0.0.0"), "kept", 50.0)]
    rules = desired.desired([one], [NETWORK], {}, kept, {"c1": doors(0, 1)})
    assert rules.ends == {(one.address, "tcp", 443, "192.0.0.0"): 99.0}
    rules = desired.desired([one], [NETWORK], {}, (), {"c1": doors(0, 1, inf)})
    assert rules.ends == {}


def test_what_has_problems_has_nothing_and_only_proxied_sessions_reach_the_proxy() -> None:
    bad = session(1, Pattern(host="*.example.com"), problems=("it differs",))
    good = session(2, Pattern(host="*.example.com"))
    plain = session(3, declaration=Declaration(names=(Name(host="a.example.com"),)))
    rules = desired.desired([bad, good, plain, proxy()], [NETWORK], {}, (), {"c1": doors(0, 1)})
    assert rules.pins == {}
    assert set(rules.host) == {(good.address, "tcp", 8443, str(NETWORK.gateway))}


def test_where_a_relay_would_be_a_host_service_and_the_proxy_nobody_reaches_it() -> None:
    # The command line refuses the second of them, unless both start in the same moment.
    services = (HostService(name="dev", port=8443), HostService(name="db", port=5432))
    proxied = session(1, Pattern(host="*.example.com"))
    served = session(2, declaration=Declaration(host_services=services))
    gateway = str(NETWORK.gateway)
    db, dev = (served.address, "tcp", 5432, gateway), (served.address, "tcp", 8443, gateway)
    assert set(desired.desired([proxied, served], [NETWORK], {}).host) == {db}
    # What differs from what was declared reaches nothing anyway, and takes nothing away from the others.
    assert set(desired.desired([replace(proxied, problems=("it differs",)), served], [NETWORK], {}).host) == {
        db,
        dev,
    }
    assert set(desired.desired([proxied], [NETWORK], {}).host) == {(proxied.address, "tcp", 8443, gateway)}
