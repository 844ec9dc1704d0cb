"""The explanations, the checks the code makes, the tamper table and docs/verify.md are about the same checks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agent_image.files.verify.main import PROFILE_CHECKS
from agent_image.files.verify.main import checks as made
from corral import checkdocs, checks, livecheck
from corral.checkdocs import UnknownCheck
from tests.system.tamper import TABLE, summary
from tests.unit.agent_image.container import expect

DOC = (Path(__file__).parents[3] / "docs" / "verify.md").read_text(encoding="utf-8")
# As the first description of corral lists them.
LISTED = """\
non-root uid-matches-host no-sudo no-capabilities iptables-refused no-docker-socket:/var/run/docker.sock
no-docker-socket:/run/docker.sock no-credential-dir:.ssh no-credential-dir:.aws no-credential-dir:.gnupg
no-credential-dir:.kube no-credential-dir:.docker no-credential-dir:.netrc host-home-only-mounts env-file-not-mounted
root-owned:/usr/local/sbin/corral-entrypoint root-owned:/usr/local/sbin/corral-firewall
root-owned:/usr/local/bin/corral-verify root-owned:/etc/corral/allowlist root-owned:/etc/corral/host-ports
root-owned:/etc/corral/internal-gateway root-owned:/etc/corral/uid root-owned:/etc/corral/gid
root-owned:/etc/corral/mounts-rw root-owned:/etc/corral/mounts-ro root-owned:/etc/corral/mount-names
root-owned:/etc/corral/state-paths root-owned:/etc/resolv.conf root-owned:/etc/hosts rw-writable:PATH
unlisted-host-blocked dns-closed ipv6-disabled no-ipv6-address host-service:PORT
"""
FIRST = LISTED.split()
# Of a sandbox that reaches all public addresses; what breaks them is tried in test_opened.py.
OF_OPEN = {"closed-address", "host-closed", "public-name"}


def families() -> set[str]:
    """Every kind of check that the code can say something of."""
    profile = [{"kind": kind, "target": "/x"} for kind in PROFILE_CHECKS]
    told = {"profile": profile, "shadows": ["/home/agent/.env"]}
    kinds: list[dict[str, object]] = [
        {"connection": "own"},
        {"connection": "none"},
        {"proxy": {"port": 8443, "denied": "example.com"}},
        {"answered": {"denied": "example.com"}},
        {"closed": ["192.168.255.1"]},
    ]
    inside = {name.partition(":")[0] for kind in kinds for name, _ in made(expect(**told, **kind))}
    host = {check.name for check in livecheck.skeleton_checks({})}
    source = "".join(
        (Path(checks.__file__).parent / name).read_text()
        for name in ("apart.py", "checks.py", "verify.py", "livecheck.py")
    )
    literal = set(re.findall(r'Check\(\s*"([a-z-]+)"', source))
    return inside | host | literal | {checks.GATE, checks.CHECKER, "expectations"}


def test_every_check_the_code_makes_is_explained_and_no_other() -> None:
    assert {doc.family for doc in checkdocs.DOCS} == families()
    assert len({doc.family for doc in checkdocs.DOCS}) == len(checkdocs.DOCS)


def test_every_check_the_code_makes_has_a_tampering_and_no_other() -> None:
    # What only says that an image is not corral's cannot fail.
    assert {row.check.partition(":")[0] for row in TABLE} == families() - {"foreign-image", *OF_OPEN}
    for row in TABLE:
        assert row.check in row.expected
        assert bool(row.why) == (len(row.expected) > 1), row.ident
        ways = (row.body, row.image, row.before, row.during, row.whole)
        assert sum(map(bool, ways)) == 1, row.ident
    idents = [row.ident for row in TABLE]
    assert len(set(idents)) == len(idents)


def test_the_table_of_the_documentation_is_the_one_that_is_explained() -> None:
    assert checkdocs.table() in DOC


def test_every_check_of_the_first_description_is_kept_or_replaced() -> None:
    assert len(FIRST) == 35
    rows = dict(re.findall(r"^\| `([^`]+)` \| ((?:kept|replaced).*) \|$", DOC, re.MULTILINE))
    assert list(rows) == FIRST
    for name, verdict in rows.items():
        named = re.findall(r"`([^`]+)`", verdict)
        if verdict.startswith("kept"):
            checkdocs.find(name)
        else:
            assert named, name
            assert any(found.partition(":")[0] in families() for found in named), name


@pytest.mark.parametrize(
    "name", ["no-sudo", "root-owned:/etc/hosts", "dns-closed@0a1b2c3d", "rw-writable:/a:b@c"]
)
def test_a_check_is_found_by_the_name_it_is_printed_with(name: str) -> None:
    doc = checkdocs.find(name)
    assert doc.family == re.split("[:@]", name)[0]
    text = checkdocs.explain(doc)
    for part in (doc.name, doc.proves, doc.measured, doc.means, doc.fix):
        assert part in text
    assert "does not:" not in text
    assert checkdocs.body(doc)["fix"] == doc.fix


def test_what_a_check_does_not_prove_is_said_where_it_matters() -> None:
    doc = checkdocs.find("proxy-checks-sni")
    assert f"  does not:      {doc.beyond}" in checkdocs.explain(doc).splitlines()
    assert checkdocs.body(doc)["beyond"] == doc.beyond


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("no-sud", "did you mean: no-sudo"),
        ("Root-Owned", "did you mean: root-owned"),
        ("dns", "embedded-dns-closed"),
        ("xyzzy", "the checks are: "),
        ("", "the checks are: "),
    ],
)
def test_an_unknown_check_is_exit_2_and_names_what_is_close(name: str, told: str) -> None:
    with pytest.raises(UnknownCheck) as raised:
        checkdocs.find(name)
    assert raised.value.exit_code == 2
    assert told in str(raised.value.hint)


def test_the_table_at_the_end_of_a_run_says_what_failed_and_what_did_not() -> None:
    assert summary([("passed", {})]) == []
    rows = summary(
        [
            ("passed", {"tampering": ["no-sudo", "sudo by name", ["no-sudo"], ""]}),
            (
                "failed",
                {"tampering": ["backstop", "gone", ["backstop", "session-ready"], "nothing is granted"]},
            ),
        ]
    )
    assert rows == [
        "check     tampering     failed as it should",
        "no-sudo   sudo by name  yes",
        "backstop  gone          NO, with session-ready: nothing is granted",
    ]
