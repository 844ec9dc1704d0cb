from __future__ import annotations

import errno
import os
import socket

import pytest

from agent_image.files.verify import identity
from tests.unit.agent_image.container import Container, outcome


def test_ordinary_user_is_not_root(container: Container) -> None:
    assert outcome(identity.non_root, container) == ("ok", "uid 1000 on the host")


@pytest.mark.parametrize(
    "fields",
    [
        {"Uid": "0\t0\t0\t0"},
        {"Uid": "1000\t1000\t0\t1000"},
        {"Gid": "1000\t0\t1000\t1000"},
        {"Groups": "27 0 1000"},
        {"Uid": ""},
        {"Uid": "1000"},
    ],
)
def test_any_trace_of_root_is_found(container: Container, fields: dict[str, str]) -> None:
    container.set_status(**fields)
    assert outcome(identity.non_root, container)[0] == "fail"


def test_ids_are_the_host_users(container: Container) -> None:
    assert outcome(identity.uid_matches_host, container) == ("ok", "1000:1000")


@pytest.mark.parametrize("change", [{"uid": 1001}, {"gid": 1001}])
def test_other_ids_than_the_host_users_are_found(container: Container, change: dict[str, int]) -> None:
    status, detail = outcome(identity.uid_matches_host, container, **change)
    assert status == "fail"
    assert "1001" in detail


def test_saved_id_of_somebody_else_is_found(container: Container) -> None:
    container.set_status(Uid="1000\t1000\t1001\t1000")
    assert outcome(identity.uid_matches_host, container)[0] == "fail"


def test_plain_files_make_nobody_root(container: Container) -> None:
    container.put("/usr/bin/su", mode=0o755)
    status, detail = outcome(identity.no_sudo, container)
    assert status == "ok"
    assert detail.startswith("none among ")


@pytest.mark.parametrize("path", ["/usr/bin/sudo", "/usr/local/sbin/doas", "/bin/pkexec"])
def test_program_to_become_root_is_found(container: Container, path: str) -> None:
    container.put(path)
    assert outcome(identity.no_sudo, container) == ("fail", f"{path} is there")


def test_dangling_link_called_sudo_is_found(container: Container) -> None:
    container.real("/usr/bin/sudo").symlink_to("/nowhere")
    assert outcome(identity.no_sudo, container)[0] == "fail"


@pytest.mark.parametrize(("mode", "word"), [(0o4755, "set-uid"), (0o2755, "set-gid"), (0o4644, "set-uid")])
def test_set_id_file_anywhere_is_found(container: Container, mode: int, word: str) -> None:
    container.put("/opt/deep/er/tool", mode=mode)
    assert outcome(identity.no_sudo, container) == ("fail", f"/opt/deep/er/tool is {word}")


def test_file_with_capabilities_is_found(container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    container.put("/usr/bin/ping", mode=0o755)
    container.put("/usr/share/ping.txt")
    asked = []

    def listxattr(path: str, follow_symlinks: bool) -> list[str]:
        asked.append(os.path.basename(path))
        return ["security.capability"]

    monkeypatch.setattr(identity.os, "listxattr", listxattr)
    assert outcome(identity.no_sudo, container) == ("fail", "/usr/bin/ping carries capabilities")
    assert asked == ["ping"]


def test_links_are_not_followed_out_of_the_container(container: Container) -> None:
    outside = container.real("/").parent / "outside"
    outside.mkdir()
    tool = outside / "tool"
    tool.touch()
    tool.chmod(0o4755)
    container.real("/usr/bin/link").symlink_to(outside)
    container.real("/usr/bin/tool").symlink_to(tool)
    assert outcome(identity.no_sudo, container)[0] == "ok"


def test_empty_sets_are_no_capabilities(container: Container) -> None:
    assert outcome(identity.no_capabilities, container)[0] == "ok"


@pytest.mark.parametrize("name", identity.CAPABILITY_SETS)
@pytest.mark.parametrize("value", ["0000000000003000", "", "garbage"])
def test_each_set_must_be_known_to_be_empty(container: Container, name: str, value: str) -> None:
    container.set_status(**{name: value})
    status, detail = outcome(identity.no_capabilities, container)
    assert status == "fail"
    assert detail.startswith(name)


@pytest.mark.parametrize("value", ["0", ""])
def test_privileges_must_not_be_gained(container: Container, value: str) -> None:
    container.set_status(NoNewPrivs=value)
    assert outcome(identity.no_capabilities, container)[0] == "fail"


def test_packet_filter_is_out_of_reach(container: Container) -> None:
    assert outcome(identity.iptables_refused, container)[0] == "ok"


@pytest.mark.parametrize("code", [0, errno.EINVAL])
def test_packet_filter_that_answers_is_found(container: Container, code: int) -> None:
    container.netfilter = code
    status, detail = outcome(identity.iptables_refused, container)
    assert status == "fail"
    assert "packet filter" in detail


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_PACKET])
def test_raw_socket_is_found(container: Container, family: int) -> None:
    container.raw = {family}
    status, detail = outcome(identity.iptables_refused, container)
    assert status == "fail"
    assert "raw" in detail


def test_tool_that_works_is_found_and_one_that_fails_is_not(container: Container) -> None:
    container.put("/usr/sbin/nft", mode=0o755)
    assert outcome(identity.iptables_refused, container)[0] == "ok"
    assert container.executed == [(str(container.real("/usr/sbin/nft")), "list", "ruleset")]
    container.exit_code = 0
    assert outcome(identity.iptables_refused, container) == ("fail", "/usr/sbin/nft works")


def test_system_calls_are_filtered(container: Container) -> None:
    assert outcome(identity.seccomp, container)[0] == "ok"


@pytest.mark.parametrize("mode", ["0", "1", ""])
def test_missing_filter_of_system_calls_is_found(container: Container, mode: str) -> None:
    container.set_status(Seccomp=mode)
    assert outcome(identity.seccomp, container)[0] == "fail"


def test_filter_that_lets_namespaces_be_made_is_found(container: Container) -> None:
    container.mounting["namespaces"] = True
    assert outcome(identity.seccomp, container) == ("fail", "new user namespaces are allowed")


def test_whom_a_rootless_engine_calls_0_is_the_host_user(container: Container) -> None:
    container.become_rootless()
    assert outcome(identity.non_root, container) == ("ok", "uid 1000 on the host")
    assert outcome(identity.uid_matches_host, container) == ("ok", "1000:1000")


@pytest.mark.parametrize("number", ["1", "1000", "70000"])
def test_another_user_of_a_rootless_engine_is_not_the_host_user(container: Container, number: str) -> None:
    container.become_rootless()
    container.set_status(Uid=f"{number}\t" * 4)
    assert outcome(identity.uid_matches_host, container)[0] == "fail"


def test_0_of_an_engine_that_maps_nobody_is_root(container: Container) -> None:
    container.set_status(Uid="0\t0\t0\t0")
    assert outcome(identity.non_root, container)[0] == "fail"
