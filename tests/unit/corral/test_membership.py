from __future__ import annotations

import os
from pathlib import Path

from corral.membership import Membership, login_fix, membership, process_groups, writer_problem

MEMBER = Membership(1000, "agnes", 999, member=True)
OUTSIDER = Membership(1000, "agnes", 999, member=False)
DENIED = {"writer": {"reachable": False, "error": "no permission for /run/corral/netfilter.sock"}}
MISSING = {"writer": {"reachable": False, "error": "the writer does not answer"}}


def fix(answer: dict[str, object], found: Membership) -> str:
    problem = writer_problem(answer, found)
    assert problem is not None
    assert str(answer["writer"]["error"]) in problem[0]  # type: ignore[index]
    return problem[1]


def test_a_reachable_writer_is_no_problem() -> None:
    assert writer_problem({"writer": {"reachable": True}}, OUTSIDER) is None


def test_each_cause_has_its_own_fix() -> None:
    assert fix(DENIED, MEMBER).startswith("sudo systemctl restart user@1000.service")
    assert fix(DENIED, OUTSIDER).startswith(
        "sudo usermod -aG docker agnes, then sudo systemctl restart user@1000"
    )
    assert fix(MISSING, MEMBER).startswith("systemctl status corral-netfilter.socket")
    assert "install Docker Engine" in fix(DENIED, Membership(1000, "agnes", None, member=False))


def test_a_login_from_before_joining_is_told_from_no_membership() -> None:
    assert "newgrp docker" in login_fix(MEMBER)
    assert login_fix(OUTSIDER).startswith("sudo usermod -aG docker agnes")


def test_the_groups_of_a_process_are_those_it_runs_with(tmp_path: Path) -> None:
    own = process_groups(os.getpid())
    assert own is not None and own >= {*os.getgroups(), os.getegid()}
    assert process_groups(1, tmp_path) is None


def test_an_account_s_membership_is_looked_up() -> None:
    found = membership(os.getuid())
    assert found.uid == os.getuid() and found.user
    assert not membership(2**31 - 5).member or found.group is not None
