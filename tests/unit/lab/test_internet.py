"""Records, query log and counters of the lab's internet, as text; and its web server on loopback."""

from __future__ import annotations

import asyncio
import functools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab import connections, network
from tests.lab.internet import Query, Record, parse_queries, parse_zone, zone
from tests.lab.servers import serve_http

LOG = """\
Nov 29 18:10:24 dnsmasq[9445]: started, version 2.90 cachesize 0
Nov 29 18:10:24 dnsmasq[9445]: 1 198.51.100.2/40123 query[A] Allowed1.corral.example from 198.51.100.2
Nov 29 18:10:24 dnsmasq[9445]: 1 198.51.100.2/40123 config allowed1.corral.example is 203.0.113.10
Nov 29 18:10:24 dnsmasq[9445]: 2 198.51.100.2/40124 query[type=65] allowed1.corral.example from 198.51.100.2
Nov 29 18:10:24 dnsmasq[9445]: 3 198.51.100.2/40125 query[PTR] 10.113.0.203.in-addr.arpa from 198.51.100.2
"""

COUNTERS = json.dumps(
    {
        "nftables": [
            {"metainfo": {"json_schema_version": 1}},
            {
                "set": {
                    "name": "ports4",
                    "elem": [
                        {
                            "elem": {
                                "val": {"concat": ["udp", "203.0.113.66", 9]},
                                "counter": {"packets": 3, "bytes": 90},
                            }
                        },
                        {
                            "elem": {
                                "val": {"concat": ["tcp", "203.0.113.66", 443]},
                                "counter": {"packets": 2, "bytes": 90},
                            }
                        },
                        {
                            "elem": {
                                "val": {"concat": [253, "203.0.113.66", 0]},
                                "counter": {"packets": 1, "bytes": 30},
                            }
                        },
                        {
                            "elem": {
                                "val": {"concat": ["udp", "203.0.113.10", 9]},
                                "counter": {"packets": 7, "bytes": 9},
                            }
                        },
                    ],
                }
            },
        ]
    }
)

addresses = st.lists(st.ip_addresses(v=4).map(str), min_size=1, max_size=4, unique=True).map(tuple)
labels = st.from_regex(r"[a-z][a-z0-9-]{0,8}\.example", fullmatch=True)
records = st.dictionaries(labels, st.builds(Record, addresses, st.integers(0, 86400)))


@given(records)
def test_zone_is_read_back_as_written(known: dict[str, Record]) -> None:
    assert parse_zone(zone(known)) == known


def test_every_question_is_found_in_the_log() -> None:
    assert parse_queries(LOG) == [
        Query("allowed1.corral.example", "A", "198.51.100.2"),
        Query("allowed1.corral.example", "type=65", "198.51.100.2"),
        Query("10.113.0.203.in-addr.arpa", "PTR", "198.51.100.2"),
    ]


@pytest.mark.parametrize(
    ("proto", "port", "packets"),
    [(None, None, 6), ("udp", None, 3), ("tcp", 443, 2), ("udp", 443, 0), (None, 9, 3), ("253", None, 1)],
)
def test_counters_are_summed_over_what_is_not_asked_for(
    proto: str | None, port: int | None, packets: int
) -> None:
    counters = network.parse_counters(COUNTERS)
    assert network.count(counters, "203.0.113.66", proto, port) == packets


def test_set_without_elements_counts_nothing() -> None:
    assert network.parse_counters('{"nftables": [{"set": {"name": "packets4"}}]}') == {}


def ask(*requests: str) -> bytes:
    async def talk() -> bytes:
        serve = functools.partial(serve_http, files=Path(__file__).parent)
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write("".join(requests).encode())
            answer = await asyncio.wait_for(reader.read(-1), 10)
            writer.close()
            return answer

    return asyncio.run(talk())


def test_web_server_says_what_was_reached() -> None:
    body = ask("GET / HTTP/1.0\r\nHost: a.example\r\n\r\n").partition(b"\r\n\r\n")[2]
    told = json.loads(body)
    assert (told["host"], told["server"], told["scheme"]) == ("a.example", "127.0.0.1", "http")


def test_web_server_keeps_a_connection_until_told_otherwise() -> None:
    answer = ask(
        "POST /post HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
        "GET /bytes?count=4 HTTP/1.1\r\nConnection: close\r\n\r\n",
    )
    assert b"\r\n\r\n5\n" in answer
    assert answer.endswith(b"\r\n\r\nxxxx")


def test_stream_is_chunked_one_byte_at_a_time_and_ends() -> None:
    answer = ask("GET /stream?interval=0&count=3 HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n1\r\n0\r\n1\r\n1\r\n1\r\n2\r\n0\r\n\r\n")


def test_nonsense_closes_the_connection() -> None:
    assert ask("nonsense\r\n\r\n") == b""


def test_files_of_a_directory_are_served_and_nothing_beside_it() -> None:
    own = Path(__file__)
    found = ask(f"GET /files/{own.name} HTTP/1.0\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 200 OK") and found.endswith(own.read_bytes())
    for outside in (f"../{own.parent.name}/../conftest.py", "..%2f..%2f..%2fpyproject.toml", "no-such-file"):
        assert ask(f"GET /files/{outside} HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 404")


CONNECTIONS = """\
LISTEN     0      512          0.0.0.0:443           0.0.0.0:*
ESTAB      0      0       203.0.113.10:443      198.51.100.2:34082
ESTAB      0      29      203.0.113.10:443      198.51.100.2:34084 timer:(on,200ms,0)
ESTAB      0      870     203.0.113.66:443      198.51.100.2:34086 timer:(on,1.5sec,3)
ESTAB      0      0       203.0.113.66:443      198.51.100.2:34087 timer:(keepalive,1min59sec,1)
LAST-ACK   0      1       203.0.113.66:80       198.51.100.2:34088 timer:(on,51sec,8)
FIN-WAIT-1 0      1     [2001:db8:66::1]:80   [2001:db8::2]:40100 timer:(on,025ms,1)
"""


def test_a_connection_is_stuck_when_something_was_sent_again_without_an_answer() -> None:
    assert connections.parse(CONNECTIONS) == [
        ("203.0.113.66", "443", "198.51.100.2", "34086"),
        ("203.0.113.66", "80", "198.51.100.2", "34088"),
        ("[2001:db8:66::1]", "80", "[2001:db8::2]", "40100"),
    ]
