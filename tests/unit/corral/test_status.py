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
    "dead_resolver": 2,
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
        "    3 packets denied (see: corral denied); its dead resolver was asked 2 times",
    ]


PROXY: dict[str, Any] = {
    "service": "proxy",
    "session": "0123abcd",
    "address": "172.16.0.3",
    "state": "running",
    "problems": [],
    "names": [],
}
PROXIED: dict[str, Any] = {
    **{"service": "main", "session": "0a1b2c3d", "address": "172.16.0.2", "state": "running"},
    "proxied": True,
    "asked": [
        {"host": "*.example.com", "ports": [443, 8443], "seconds": None},
        {"host": "*.example.org", "ports": [443], "seconds": 50.0},
    ],
}


def with_sessions(*rows: dict[str, Any]) -> list[str]:
    body = status()
    body["sandboxes"][0] = {**body["sandboxes"][0], "sessions": list(rows)}
    return render(body, colour=False).splitlines()[1:]


def test_a_proxy_is_no_session_and_what_goes_through_it_is_shown() -> None:
    assert with_sessions(PROXY, PROXIED) == [
        "  main-0a1b2c3d  172.16.0.2  running",
        "    *.example.com: ports 443, 8443 through the proxy",
        "    *.example.org: port 443 through the proxy, for 50s more",
        "  proxy  172.16.0.3  running",
    ]
    assert with_sessions(PROXY) == ["  no sessions", "  proxy  172.16.0.3  running"]


def test_how_often_a_proxy_was_asked_is_told_and_when_it_cannot_ask() -> None:
    counts = {"socket": True, "allowed": 7, "refused": {"denied": 2, "resolve": 1}, "open": 4}
    (_, line) = with_sessions({**PROXY, "proxy": counts})
    assert line == "  proxy  172.16.0.3  running  7 names opened, 3 refused; 4 addresses open"
    lines = with_sessions({**PROXY, "proxy": {**counts, "socket": False}})
    assert any("PROBLEM: it cannot ask" in line for line in lines)
    waits = {**PROXY, "state": "ready", "proxy": {**counts, "socket": False}}
    assert not any("PROBLEM" in line for line in with_sessions(waits))


def test_what_is_asked_for_by_DNS_is_shown_and_what_is_pinned_only_once() -> None:
    row = {"host": "api.example.com", "ports": [443], "seconds": None}
    asks = {**SESSION, "answered": True, "asked": [row, {**row, "host": "*.example.com"}]}
    lines = with_sessions(asks)
    assert "    *.example.com: port 443 by DNS" in lines
    assert [line for line in lines if "api.example.com" in line and "by DNS" in line] == []
    assert any(
        "port 443 through the proxy and by DNS" in one for one in with_sessions({**asks, "proxied": True})
    )
    assert not any(" by DNS" in line for line in with_sessions({**asks, "answered": False}))


def test_a_session_that_needs_a_proxy_and_has_none_is_a_problem() -> None:
    exited = {**PROXY, "state": "created", "problems": ["its mount differs"]}
    for proxies in ([], [exited]):
        assert any("PROBLEM: the proxy" in line for line in with_sessions(PROXIED, *proxies))
    assert "    PROBLEM: its mount differs" in with_sessions(PROXIED, exited)
    for rows in ([PROXIED, PROXY], [{**PROXIED, "state": "ready"}], [SESSION]):
        assert not any("PROBLEM" in line for line in with_sessions(*rows))


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
    assert "STRANGER: container curious on corral-demo-0123abcd: not declared" in text


def test_nothing_at_all_is_said() -> None:
    assert render(status(sandboxes=[]), colour=False) == "no sandboxes"
    empty = {"sandbox": "demo-0123abcd", "subnet": "172.16.0.0/26", "bridge": "corral-0123abcd"}
    assert render(status(sandboxes=[empty]), colour=False).endswith("  no sessions")
    assert render({}, colour=False) == "no sandboxes"


def names(*rows: dict[str, Any]) -> list[str]:
    session = {**SESSION, "names": list(rows), "host_services": [], "denied": 0, "dead_resolver": None}
    body = status()
    body["sandboxes"][0] = {**body["sandboxes"][0], "sessions": [session]}
    return render(body, colour=False).splitlines()[2:]


def test_many_names_keep_the_columns_and_nothing_wraps() -> None:
    name = SESSION["names"][0]
    long = "a" * 63 + "." + "b" * 63 + "." + "c" * 63 + ".example.com"
    many = [f"203.0.113.{n}" for n in range(64)]
    rows = [{**name, "name": f"n{n}.example.com", "packets": 10**n} for n in range(12)]
    lines = names({**name, "name": long}, *rows, {**name, "addresses": many, "lingering": ["203.0.113.99"]})
    assert lines[1].strip() == long
    table = [lines[0], *lines[2:]]
    places = {line.index(" OK ") for line in table[1:]}
    assert places == {table[0].index(" STATE")}
    assert max(len(line) for line in table) < 120
    assert "203.0.113.0 203.0.113.1 203.0.113.2 +61 (1 ending)" in table[-1]


def test_times_are_short() -> None:
    name = SESSION["names"][0]
    ages = {0: "0s", 99: "99s", 600: "10m", 5940 + 60: "2h", 86400 * 9: "9d"}
    for age, shown in ages.items():
        (line,) = names({**name, "age": age, "next_refresh": None})[1:]
        assert line.split()[-2:] == [shown, "-"]


HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e\r\n"


def test_nothing_in_any_field_reaches_the_terminal_as_it_is() -> None:
    def poisoned(value: Any) -> Any:
        if isinstance(value, str):
            return value + HOSTILE
        if isinstance(value, dict):
            return {key: poisoned(item) for key, item in value.items()}
        return [poisoned(item) for item in value] if isinstance(value, list) else value

    stranger = {"container": "x", "name": "guest", "network": "net", "reasons": ["why"]}
    body = status(permit_ranges=["203.0.113.0/24"], problems=["x"], errors=["y"], strangers=[stranger])
    lines = render(poisoned(body), colour=False).split("\n")
    assert all(line.isprintable() for line in lines)
    # Two names are too wide for the table now.
    assert len(lines) == len(render(body, colour=False).split("\n")) + 2


def test_what_was_allowed_by_hand_is_marked_with_its_end() -> None:
    name = {**SESSION["names"][0], "granted": {"8443": None, "443": 3590.0}}
    body = status()
    body["sandboxes"] = [{**body["sandboxes"][0], "sessions": [{**SESSION, "names": [name]}]}]
    text = render(body, colour=False)
    assert "    api.example.com: port 443 was allowed by hand, for 60m more" in text
    assert "    api.example.com: port 8443 was allowed by hand, until the session ends" in text


def sandbox_with(**more: Any) -> list[str]:
    body = status()
    body["sandboxes"][0] = {**body["sandboxes"][0], **more}
    return render(body, colour=False).splitlines()


def test_a_unit_is_told_and_what_keeps_it_from_running() -> None:
    unit = {"unit": "corral-sandbox-0123abcd.service", "enabled": True, "active": "active", "sub": "running"}
    lines = sandbox_with(unit=unit, lingers=True)
    assert lines[1] == "  unit corral-sandbox-0123abcd.service: active (running), starts with the machine"
    assert not any("linger" in line for line in lines)
    lines = sandbox_with(unit={**unit, "enabled": False}, lingers=False)
    assert "does not start with the machine" in lines[1]
    assert "loginctl enable-linger" in lines[2]
    assert sandbox_with(unit=None, lingers=False) == sandbox_with()


def test_a_session_that_was_left_is_told_by_what_it_is_called() -> None:
    for held, told in ((False, True), (True, False), (None, False)):
        text = "\n".join(sandbox_with(sessions=[{**SESSION, "attended": held, "called": "review"}]))
        assert ("nobody is attached: corral attach review" in text) == told
