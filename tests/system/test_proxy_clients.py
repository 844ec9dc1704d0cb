"""What docs/proxy-clients.md says of clients is what they do now, real and unmodified, through a sandbox's proxy."""

from __future__ import annotations

import pytest

from .host import Host
from .proxy_clients import REGENERATE, documented, page, started, tried


@pytest.mark.engine(
    "trixie", reason="what a client does with its environment has nothing to do with the engine"
)
def test_clients_go_through_the_proxy_as_the_page_says(host: Host) -> None:
    box = started(host)
    # A name of theirs has no address in the session: what works went through the proxy.
    assert box.inside("getent", "hosts", "plain.clients.corral.example").returncode == 2
    found = tried(box)
    for client, one in found.items():
        print(f"{client} {one.version}: {one.alone}, {one.more or '-'}: {one.said}")
    told = {client: (one.alone, one.more or "—") for client, one in found.items()}
    assert told == documented(), f"docs/proxy-clients.md is not what they do: {REGENERATE}"
    assert page(found)
