"""Field cases about life and names: pause, rename, subnets that are taken, names that look alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .flooding import ALLOWED_URL, flooding
from .host import BASE_POLICY, Host


@pytest.mark.case(14)
def test_rules_follow_a_sandbox_that_is_paused_and_renamed(host: Host) -> None:
    with flooding(host, "paused") as flood:
        session = flood.project.sandbox["sessions"][0]
        held = [f"{session['address']},tcp:443,{address}" for address in ("203.0.113.10", "203.0.113.20")]

        def elements() -> list[str]:
            listed = host.netadmin("ipset", "list", "corral-pins").stdout.partition("Members:\n")[2]
            return sorted(line.split()[0] for line in listed.splitlines())

        assert elements() == held
        for words in (("pause",), ("unpause",), ("rename", "another-name"), ("rename", session["name"])):
            who = session["container"]
            host.box.run(["docker", words[0], who, *words[1:]])
            host.wait_enforcer()
            assert elements() == held
            rows = flood.project.sandbox["sessions"]
            assert [row["container"] for row in rows] == [who]
        assert flood.leaked == (0, 0)
        flood.works()


@pytest.mark.case(23)
def test_a_range_that_is_routed_or_used_is_left_alone_and_others_are_found(host: Host) -> None:
    # A VPN whose route covers the preferred range, and a network of Docker's inside the next one. Where the engine
    # has a network of its own, routes of both count.
    for number, entering in enumerate(dict.fromkeys([(), host.engine.entering()])):
        with routed(host, entering, "172.16.0.0/16"):
            project = host.project(f"routed-{number}")
            assert "203.0.113.10" in project.inside("curl", "-sS", "-m", "10", ALLOWED_URL).stdout
            assert not project.sandbox["subnet"].startswith("172.16.")
        # A range that was chosen by hand and is taken: said, with the reason and the place to change it.
        config = f"{host.box.home}/.config/corral/enforcer.toml"
        former = host.box.read(config)
        with routed(host, entering, "10.66.0.0/16"):
            host.box.write(config, former + 'subnet_range = "10.66.0.0/16"\n')
            try:
                other = host.project(f"chosen-{number}")
                done = other.inside("touch", "ran", check=False)
                assert done.returncode == 1
                assert "10.66.0.0/16" in done.stderr
                assert "enforcer.toml" in done.stderr
                assert not other.exists("ran")
            finally:
                host.box.write(config, former)


@contextmanager
def routed(host: Host, entering: tuple[str, ...], network: str) -> Iterator[None]:
    """A VPN that has a network, on the host or where its engine is."""
    host.root(
        *entering,
        "sh",
        "-ec",
        f"ip tuntap add vpn0 mode tun; ip link set vpn0 up; ip route add {network} dev vpn0",
    )
    try:
        yield
    finally:
        host.root(*entering, "ip", "link", "del", "vpn0")


@pytest.mark.case(27)
def test_sandboxes_whose_names_look_alike_are_distinct_and_leave_one_by_one(host: Host) -> None:
    long = "x" * 40
    names = [f"{long}-one", f"{long}-two", "my project.v1", "my project.v2", "café ☕", "cafe", "y" * 250]
    projects = [host.project(name) for name in names]
    rows = {}
    for project in projects:
        project.start("sh", "-c", "touch up; sleep 200", marker="up")
    shown = json.loads(host.box.run(["corral", "status", "--json"]).stdout)["sandboxes"]
    for row in shown:
        rows[row["sandbox"]] = row
    assert len(rows) == len(names)
    for key in ("sandbox", "network", "bridge", "subnet"):
        assert len({row[key] for row in rows.values()}) == len(names), key
    assert all(len(row["bridge"]) <= 15 for row in rows.values())
    sources = {row["sessions"][0]["address"] for row in rows.values()}
    assert len(sources) == len(names)
    # One goes; the one that looks like it works on.
    projects[0].corral("down")
    left = json.loads(host.box.run(["corral", "status", "--json"]).stdout)["sandboxes"]
    assert len([row for row in left if row["sessions"]]) == len(names) - 1
    assert "203.0.113.10" in projects[1].inside("curl", "-sS", "-m", "10", ALLOWED_URL).stdout


@pytest.mark.case(27)
def test_a_name_of_three_hundred_characters_is_a_sandbox(host: Host) -> None:
    project, known = host.project("named"), set()
    # What differs in the last one only is another sandbox.
    for name in ("z" * 300, "z" * 299 + "y"):
        project.policy(f"name: {name}\n{BASE_POLICY}")
        assert project.inside("sh", "-c", "echo ran").stdout == "ran\n"
        ident = json.loads(project.corral("render", "--json").stdout)["sandbox"]
        assert len(ident) < 40
        known.add(ident)
    assert len(known) == 2
    project.start("sh", "-c", "touch up; sleep 200", marker="up")
    (row,) = json.loads(project.corral("ps", "--here", "--json").stdout)["sessions"]
    assert row["sandbox"] == ident and row["state"] == "running"
    project.corral("down", ident)
    assert json.loads(project.corral("ps", "--here", "--json").stdout)["sessions"] == []
