"""Which name servers are asked: resolv.conf and the text form of a server."""

from __future__ import annotations

import pytest

from enforcer.resolver import Server, system_servers


def test_resolv_conf_gives_servers_in_order_and_nothing_else() -> None:
    text = """
# a comment
; another
search corp.example
options edns0 ndots:5
nameserver 127.0.0.53
nameserver   192.0.2.1   # trailing
nameserver 127.0.0.53
nameserver 2001:db8::53
nameserver fe80::1%eth0
nameserver [2001:db8::54]:5353
nameserver 192.0.2.2:5300
nameserver not-an-address
nameserver 192.0.2.3:99999
nameserver
#nameserver 192.0.2.9
"""
    assert system_servers(text) == (
        Server("127.0.0.53"),
        Server("192.0.2.1"),
        Server("2001:db8::53"),
        Server("fe80::1%eth0"),
        Server("2001:db8::54", 5353),
        Server("192.0.2.2", 5300),
    )


def test_resolv_conf_without_servers_means_the_local_machine() -> None:
    assert system_servers("search corp.example\n") == (Server("127.0.0.1"),)


@pytest.mark.parametrize("text", ["192.0.2.1", "192.0.2.1:5353", "2001:db8::1", "[2001:db8::1]:5353"])
def test_server_text_round_trips(text: str) -> None:
    assert str(Server.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "dns.example", "192.0.2.1:0", "192.0.2.1:", "[192.0.2.1", "192.0.2.1:70000"]
)
def test_server_text_that_is_none_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        Server.parse(text)
