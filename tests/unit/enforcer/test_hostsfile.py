"""A container's hosts file: always whole, always the same inode, read right by glibc."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enforcer import hostsfile
from policy.errors import EnforcerError

OWN, GATEWAY = "198.51.100.5", "198.51.100.1"
NAMES = ("api.example", "cdn.example")


def render(published: dict[str, list[str]] | None = None, names: tuple[str, ...] = NAMES) -> bytes:
    return hostsfile.render("agent", OWN, GATEWAY, names, published)


def entries(content: bytes) -> list[tuple[str, str]]:
    """Parse as a resolver does: comments off, words apart."""
    lines = (line.partition("#")[0].split() for line in content.decode("ascii").splitlines())
    return [(words[0], name) for words in lines if words for name in words[1:]]


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    hostsfile.create(path, render())
    return path


def test_file_names_loopback_the_container_its_host_and_each_published_address() -> None:
    content = render({"cdn.example": ["203.0.113.9", "203.0.113.10"], "api.example": ["203.0.113.1"]})
    assert entries(content) == [
        ("127.0.0.1", "localhost"),
        (OWN, "agent"),
        (GATEWAY, "corral-host"),
        ("203.0.113.1", "api.example"),
        ("203.0.113.9", "cdn.example"),
        ("203.0.113.10", "cdn.example"),
    ]


addresses = st.ip_addresses(v=4).map(str)
tables = st.dictionaries(st.sampled_from(NAMES), st.lists(addresses, max_size=16))


@given(tables, tables)
def test_every_publication_of_a_policy_has_one_length_and_aligned_lines(
    one: dict[str, list[str]], two: dict[str, list[str]]
) -> None:
    first, second = render(one), render(two)
    assert len(first) == len(second)
    lines = first.splitlines(keepends=True)
    assert {len(line) for line in lines} == {64}
    assert first.endswith(b"\n")


@given(tables, tables)
def test_two_publications_differ_in_the_first_sixteen_bytes_of_lines_only(
    one: dict[str, list[str]], two: dict[str, list[str]]
) -> None:
    for old, new in zip(render(one).splitlines(), render(two).splitlines(), strict=True):
        assert old[16:] == new[16:]


@given(tables, tables, st.data())
def test_any_mixture_of_old_and_new_lines_shows_a_name_that_has_addresses_in_both(
    old: dict[str, list[str]], new: dict[str, list[str]], data: st.DataObject
) -> None:
    pairs = list(zip(render(old).splitlines(), render(new).splitlines(), strict=True))
    picks = data.draw(st.lists(st.booleans(), min_size=len(pairs), max_size=len(pairs)))
    mixed = b"\n".join(pair[pick] for pair, pick in zip(pairs, picks, strict=True))
    shown = entries(mixed)
    for name in NAMES:
        seen = {address for address, owner in shown if owner == name}
        assert seen <= {*old.get(name, ()), *new.get(name, ())}
        if old.get(name) and new.get(name):
            assert seen


def test_an_added_name_moves_no_line_of_the_others() -> None:
    published = {"api.example": ["203.0.113.1"], "cdn.example": ["203.0.113.2"]}
    assert render(published, (*NAMES, "added.example")).startswith(render(published))


def test_order_of_addresses_does_not_change_the_file() -> None:
    one = render({"api.example": ["203.0.113.10", "203.0.113.9"]})
    assert one == render({"api.example": ["203.0.113.9", "203.0.113.10", "203.0.113.9"]})


@pytest.mark.parametrize(("length", "width"), [(47, 64), (48, 128), (111, 128), (253, 512)])
def test_lines_grow_to_the_next_power_of_two(length: int, width: int) -> None:
    name = ("a." * 126 + "example.org")[-length:].lstrip(".").rjust(length, "b")
    content = render({name: ["203.0.113.1"]}, (name,))
    assert {len(line) for line in content.splitlines(keepends=True)} == {width}
    assert ("203.0.113.1", name) in entries(content)


@pytest.mark.parametrize(
    "name",
    [
        "a b",
        "a\n203.0.113.1 x",
        "a#b",
        "",
        ".",
        "a..b",
        "a.example.",
        "ä.example",
        "x" * 254,
        "corral-host",
        "agent",
    ],
)
def test_names_that_would_change_the_meaning_of_the_file_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        render({}, (name,))


@pytest.mark.parametrize("address", ["203.0.113.1 evil", "::1", "203.0.113", "203.0.113.1\n", ""])
def test_addresses_that_are_none_are_refused(address: str) -> None:
    with pytest.raises(ValueError):
        render({"api.example": [address]})


def test_a_published_name_outside_the_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"other\.example"):
        render({"other.example": ["203.0.113.1"]})


def test_more_addresses_than_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="17 addresses"):
        render({"api.example": [f"203.0.113.{n}" for n in range(17)]})


def test_create_ignores_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    before = os.umask(0o077)
    try:
        hostsfile.create(path, render())
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert entries(path.read_bytes())[0] == ("127.0.0.1", "localhost")


def test_create_refuses_what_is_there_already(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EnforcerError):
        hostsfile.create(path, render())
    assert not (tmp_path / "elsewhere").exists()


def test_publish_keeps_the_inode_and_writes_only_what_differs(hosts: Path) -> None:
    inode = hosts.stat().st_ino
    content = render({"api.example": ["203.0.113.1"]})
    assert hostsfile.publish(hosts, content) is True
    assert hosts.read_bytes() == content
    written = hosts.stat().st_mtime_ns
    assert hostsfile.publish(hosts, content) is False
    assert hosts.stat().st_mtime_ns == written
    assert hosts.stat().st_ino == inode


def test_a_descriptor_opened_before_sees_the_new_content(hosts: Path) -> None:
    content = render({"api.example": ["203.0.113.1"]})
    with hosts.open("rb") as reader:
        hostsfile.publish(hosts, content)
        assert reader.read() == content


def test_a_shorter_policy_leaves_no_old_line_behind(hosts: Path) -> None:
    hostsfile.publish(hosts, render({"cdn.example": ["203.0.113.2"]}))
    size = hosts.stat().st_size
    hostsfile.publish(hosts, render({"api.example": ["203.0.113.1"]}, ("api.example",)))
    assert hosts.stat().st_size == size
    assert [name for _, name in entries(hosts.read_bytes())] == [
        "localhost",
        "agent",
        "corral-host",
        "api.example",
    ]


def test_a_wider_policy_extends_the_file(hosts: Path) -> None:
    content = render({"third.example": ["203.0.113.3"]}, (*NAMES, "third.example"))
    hostsfile.publish(hosts, content)
    assert hosts.read_bytes() == content


def test_publish_refuses_a_symbolic_link(hosts: Path) -> None:
    link = hosts.with_name("link")
    link.symlink_to(hosts)
    before = hosts.read_bytes()
    with pytest.raises(EnforcerError):
        hostsfile.publish(link, render({"api.example": ["203.0.113.1"]}))
    assert hosts.read_bytes() == before


def test_publish_refuses_a_file_that_has_another_name(hosts: Path) -> None:
    os.link(hosts, hosts.with_name("other"))
    with pytest.raises(EnforcerError, match="names"):
        hostsfile.publish(hosts, render({"api.example": ["203.0.113.1"]}))


def test_publish_refuses_a_fifo_without_hanging(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hosts")
    with pytest.raises(EnforcerError, match="plain"):
        hostsfile.publish(tmp_path / "hosts", render())


def test_publish_does_not_bring_a_removed_file_back(tmp_path: Path) -> None:
    with pytest.raises(EnforcerError):
        hostsfile.publish(tmp_path / "hosts", render())
    assert not (tmp_path / "hosts").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_publish_refuses_a_file_of_somebody_else(hosts: Path) -> None:
    os.chown(hosts, 65534, 65534)
    before = hosts.read_bytes()
    with pytest.raises(EnforcerError, match="65534"):
        hostsfile.publish(hosts, render({"api.example": ["203.0.113.1"]}))
    assert hosts.read_bytes() == before


def in_pieces(path: Path, size: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return b"".join(iter(lambda: os.read(descriptor, size), b""))
    finally:
        os.close(descriptor)


def test_no_reader_sees_an_empty_torn_or_nameless_file_while_it_is_rewritten(hosts: Path) -> None:
    """Readers take the file whole and in 4096-byte pieces while it changes as fast as it can."""
    versions = [
        render({"api.example": ["203.0.113.101"], "cdn.example": [f"203.0.113.{n}" for n in range(1, 17)]}),
        render({"api.example": ["198.51.100.7"], "cdn.example": ["192.0.2.99"]}),
        render(
            {"api.example": ["192.0.2.44", "203.0.113.101"], "cdn.example": ["198.51.100.8", "203.0.113.5"]}
        ),
    ]
    known = {line for version in versions for line in version.splitlines(keepends=True)}
    pairs = {pair for version in versions for pair in entries(version)}
    size = len(versions[0])
    hostsfile.publish(hosts, versions[0])
    problems: list[str] = []
    reads = [0, 0, 0]
    stop = threading.Event()

    def read(index: int, piece: int) -> None:
        while not stop.is_set():
            content = in_pieces(hosts, piece)
            reads[index] += 1
            if len(content) != size:
                problems.append(f"{len(content)} bytes")
            if strange := set(content.splitlines(keepends=True)) - known:
                problems.append(f"torn {strange}")
            if strange_entries := set(entries(content)) - pairs:
                problems.append(f"never published {strange_entries}")
            if {name for _, name in entries(content)} < {"localhost", "agent", "corral-host", *NAMES}:
                problems.append("a name is missing")

    readers = [
        threading.Thread(target=read, args=(index, piece))
        for index, piece in enumerate((1 << 20, 4096, 1024))
    ]
    for reader in readers:
        reader.start()
    end = time.monotonic() + 1.5
    writes = 0
    try:
        for version in itertools.cycle(versions):
            writes += hostsfile.publish(hosts, version)
            if problems or time.monotonic() > end:
                break
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert not problems, problems[:3]
    assert writes > 100
    assert min(reads) > 10


@pytest.mark.netns
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare")
def test_glibc_returns_every_address_of_a_name(hosts: Path) -> None:
    """Through a bind mount over /etc/hosts, in a mount namespace of its own and without any network."""
    nsswitch = hosts.with_name("nsswitch.conf")
    nsswitch.write_text("hosts: files\npasswd: files\ngroup: files\n")
    host_conf = hosts.with_name("host.conf")
    host_conf.write_bytes(hostsfile.HOST_CONF)
    fifo = hosts.with_name("go")
    os.mkfifo(fifo)
    script = f"""
        set -e
        ip link set lo up
        ip address add {OWN}/24 dev lo  # getent asks for families that are configured
        mount --bind {hosts} /etc/hosts
        mount --bind {nsswitch} /etc/nsswitch.conf
        [ -e /etc/host.conf ] && mount --bind {host_conf} /etc/host.conf
        for name in localhost agent corral-host api.example cdn.example; do
            getent ahostsv4 $name | awk '$2 == "STREAM" {{print $1, "'$name'"}}'
        done
        echo --
        echo ready > {fifo}; cat {fifo} > /dev/null
        getent ahostsv4 api.example | awk '$2 == "STREAM" {{print $1}}'
        getent ahostsv4 cdn.example || echo "cdn.example $?"
    """
    hostsfile.publish(
        hosts, render({"api.example": ["203.0.113.9", "203.0.113.10"], "cdn.example": ["203.0.113.7"]})
    )
    process = subprocess.Popen(
        ["unshare", "--mount", "--net", "--propagation", "private", "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert fifo.read_text() == "ready\n"
        hostsfile.publish(hosts, render({"api.example": ["203.0.113.11"]}))
        fifo.write_text("go\n")
        output, errors = process.communicate(timeout=20)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    before, after = output.split("--\n")
    assert process.returncode == 0, errors
    assert sorted(before.splitlines()) == sorted(
        [
            "127.0.0.1 localhost",
            f"{OWN} agent",
            f"{GATEWAY} corral-host",
            "203.0.113.9 api.example",
            "203.0.113.10 api.example",
            "203.0.113.7 cdn.example",
        ]
    )
    assert after.splitlines() == ["203.0.113.11", "cdn.example 2"]


later_names = st.lists(
    st.sampled_from(
        ["late.example", "b" * 60 + ".example", ".".join(["c" * 60] * 3) + ".example", "d.example"]
    ),
    unique=True,
    max_size=4,
)


@given(tables, later_names, st.lists(addresses, max_size=16))
def test_names_that_come_later_move_nothing_and_keep_runs_in_one_block(
    published: dict[str, list[str]], later: list[str], found: list[str]
) -> None:
    before = render(published)
    after = hostsfile.render(
        "agent", OWN, GATEWAY, NAMES, {**published, **dict.fromkeys(later, found)}, later
    )
    assert after.startswith(before)
    assert {name for _, name in entries(after[len(before) :])} == (set(later) if found else set())
    at = len(before)
    for name in later:
        start = after.index(name.encode(), at)
        width = next(size for size in (64, 128, 256, 512) if size >= 17 + len(name))
        line = after.rindex(b"\n", 0, start) + 1
        assert line % (width * hostsfile.SLOTS) == 0
        at = line + width * hostsfile.SLOTS
    assert len(after) == at


def test_a_file_that_grows_is_read_whole_by_whoever_opened_it_before(hosts: Path) -> None:
    with hosts.open("rb") as reader:
        inode = hosts.stat().st_ino
        grown = hostsfile.render(
            "agent", OWN, GATEWAY, NAMES, {"late.example": ["203.0.113.7"]}, ["late.example"]
        )
        assert hostsfile.publish(hosts, grown)
        assert hosts.stat().st_ino == inode
        assert ("203.0.113.7", "late.example") in entries(reader.read())
    # The name ends: its lines stay, without addresses.
    assert hostsfile.publish(hosts, hostsfile.render("agent", OWN, GATEWAY, NAMES, {}, ["late.example"]))
    assert "late.example" not in dict(entries(hosts.read_bytes()))
    assert hosts.stat().st_size == len(grown)
