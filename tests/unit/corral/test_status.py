from __future__ import annotations

from typing import Any

from corral.console import RED, YELLOW
from corral.status import render

SESSION: dict[str, Any] = {
    "service": "main",
    "session": "0a1b2c3d",
    "address": "172.16.0.2",
    "state": "running",
    "problems": [],
    "denied": 3,
    "host_services": [{"name": "llama", "port": 8081}],
    "names": [
        {
            "name": "api.example.com",
            "state": "OK",
            "addresses": ["203.0.113.10", "203.0.113.11"],
            "packets": 42,
            "age": 12.4,
            "next_refresh": 30.0,
            "error": None,
        },
        {
            "name": "git.example.com",
            "state": "STALE",
            "addresses": [],
            "packets": 0,
            "age": None,
            "next_refresh": None,
            "error": "timeout: no answer within 6 s",
        },
    ],
}


def status(**changes: Any) -> dict[str, Any]:
    body = {
        "permit_ranges": [],
        "problems": [],
        "errors": [],
        "sandboxes": [
            {
                "sandbox": "demo-0123abcd",
                "bridge": "corral-0123abcd",
                "subnet": "172.16.0.0/26",
                "problems": [],
                "sessions": [SESSION],
            }
        ],
        "strangers": [],
    }
    return {**body, **changes}


def test_a_session_shows_names_addresses_services_and_errors() -> None:
    assert render(status(), colour=False).splitlines() == [
        "demo-0123abcd  network 172.16.0.0/26  bridge corral-0123abcd",
        "  main-0a1b2c3d  172.16.0.2  running",
        "    NAME             STATE  ADDRESSES                  PACKETS  AGE  NEXT",
        "    api.example.com  OK     203.0.113.10 203.0.113.11  42       12s  30s",
        "    git.example.com  STALE  -                          0        -    -",
        "    git.example.com: timeout: no answer within 6 s",
        "    host service llama: corral-host:8081",
        "    3 packets denied",
    ]


def test_permitted_ranges_come_first_and_red() -> None:
    lines = render(status(permit_ranges=["203.0.113.0/24"]), colour=True).splitlines()
    assert lines[0].startswith(RED)
    assert "WARNING: permitted ranges: 203.0.113.0/24" in lines[0]
    plain = render(status(permit_ranges=["203.0.113.0/24"]), colour=False)
    assert "\033" not in plain
    assert plain.startswith("WARNING: permitted ranges: 203.0.113.0/24")


def test_problems_of_kernel_network_and_session_are_shown() -> None:
    text = render(
        status(
            problems=["the jump is missing"],
            errors=["writer: no answer"],
            sandboxes=[
                {
                    "sandbox": "demo-0123abcd",
                    "problems": ["network: icc is on"],
                    "sessions": [{**SESSION, "state": "refused", "problems": ["runs as root"], "names": []}],
                }
            ],
        ),
        colour=False,
    )
    for problem in ("the jump is missing", "writer: no answer", "network: icc is on", "runs as root"):
        assert f"PROBLEM: {problem}" in text


def test_a_state_that_is_not_good_stands_out() -> None:
    text = render(status(), colour=True)
    assert f"{YELLOW}    git.example.com" in text
    assert f"{YELLOW}    api.example.com  OK" not in text


def test_strangers_are_named_with_the_reason() -> None:
    stranger = {"name": "curious", "network": "corral-demo-0123abcd", "reasons": ["not declared"]}
    text = render(status(strangers=[stranger]), colour=False)
    assert "STRANGER: container curious on corral-demo-0123abcd reaches nothing: not declared" in text


def test_nothing_at_all_is_said() -> None:
    assert render(status(sandboxes=[]), colour=False) == "no sandboxes"
    empty = {"sandbox": "demo-0123abcd", "subnet": "172.16.0.0/26", "bridge": "corral-0123abcd"}
    assert render(status(sandboxes=[empty]), colour=False).endswith("  no sessions")
    assert render({}, colour=False) == "no sandboxes"
