from __future__ import annotations

import ast
import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

import agent_image.files
from agent_image.archive import executable
from agent_image.files.verify import main
from agent_image.files.verify.expectations import Expectations
from agent_image.files.verify.outcome import Failed
from agent_image.files.verify.tasks import together
from tests.unit.agent_image.container import BODY, HOME, PROBE, PROJECT, Container, Reply, expect

SOURCES = sorted(Path(agent_image.files.__path__[0]).rglob("*.py"))


def results(container: Container, body: Any = BODY, **options: float) -> dict[str, tuple[str, str]]:
    return {r["check"]: (r["status"], r["detail"]) for r in main.verify(body, container, **options)}


def test_everything_holds_in_a_right_container(container: Container) -> None:
    found = results(container)
    assert {name: result for name, result in found.items() if result[0] != "ok"} == {}


def test_checks_and_their_order() -> None:
    assert [name for name, _ in main.checks(expect(profile=[{"kind": "runs", "target": "/x"}]))] == [
        "non-root",
        "uid-matches-host",
        "no-sudo",
        "no-capabilities",
        "seccomp",
        "iptables-refused",
        "no-docker-socket:/var/run/docker.sock",
        "no-docker-socket:/run/docker.sock",
        "no-credential-dir:.ssh",
        "no-credential-dir:.aws",
        "no-credential-dir:.gnupg",
        "no-credential-dir:.kube",
        "no-credential-dir:.docker",
        "no-credential-dir:.netrc",
        "host-home-only-mounts",
        "mounts-equal-policy",
        "env-file-not-mounted",
        "read-only-root",
        "root-owned:/usr/local/bin/corral-entrypoint",
        "root-owned:/usr/local/bin/corral-verify",
        "root-owned:/usr/local/bin/corral-proxy",
        "root-owned:/etc/hosts",
        "root-owned:/etc/hostname",
        "root-owned:/etc/resolv.conf",
        "runs:/x",
        f"rw-writable:{PROJECT}",
        f"ro-unwritable:{HOME}/notes",
        "state-writable:/home/agent/.cache/tool",
        "limits",
        "unlisted-host-blocked",
        "dns-closed",
        "embedded-dns-closed",
        "ipv6-disabled",
        "no-ipv6-address",
        "pinned-name:api.example",
        "host-service:8081",
        "peer-unreachable:corral-other-main",
    ]


def test_a_check_that_the_profile_asks_for_again_is_made_once() -> None:
    names = [
        name
        for name, _ in main.checks(expect(profile=[{"kind": "root-owned", "target": "/etc/hosts"}]))
        if name == "root-owned:/etc/hosts"
    ]
    assert len(names) == 1


def test_broken_property_fails_exactly_its_check(container: Container) -> None:
    container.open_tcp[PROBE, 443] = Reply("connected", 0.001)
    found = results(container)
    assert [name for name, result in found.items() if result[0] != "ok"] == ["unlisted-host-blocked"]


def test_check_that_raises_has_failed(container: Container) -> None:
    container.real("/proc/self/status").unlink()
    found = results(container)
    assert found["no-capabilities"][0] == "fail"
    assert "FileNotFoundError" in found["no-capabilities"][1]
    assert found["no-docker-socket:/run/docker.sock"][0] == "ok"


def test_check_that_hangs_has_failed_and_holds_up_nothing(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr(container, "ask_netfilter", never.wait)
    try:
        found = results(container, wait=0.5)
        left = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
        assert left
        assert all(thread.daemon for thread in left)
    finally:
        never.set()
    assert found["iptables-refused"] == ("fail", "did not end within 0.5 s")
    assert found["host-service:8081"][0] == "ok"


def test_unknown_check_of_a_profile_fails(container: Container) -> None:
    found = results(container, {**BODY, "profile": [{"kind": "levitates", "target": "/x"}]})
    assert found["levitates:/x"][0] == "fail"


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        "text",
        {},
        {**BODY, "surprise": 1},
        {key: value for key, value in BODY.items() if key != "probe"},
        {**BODY, "probe": {"address": PROBE}},
        {**BODY, "probe": None},
        {**BODY, "uid": "root"},
        {**BODY, "home": "relative"},
        {**BODY, "home": None},
        {**BODY, "mounts_rw": [7]},
        {**BODY, "mounts_ro": ["/a\0b"]},
        {**BODY, "shadows": [".env"]},
        {**BODY, "names": []},
        {**BODY, "host_services": ["http"]},
        {**BODY, "profile": ["runs"]},
        {**BODY, "limits": {"disks": 1}},
        {**BODY, "limits": {"pids": "many"}},
        {**BODY, "peers": [PROBE]},
    ],
)
def test_expectations_that_cannot_be_used_fail(container: Container, body: Any) -> None:
    found = results(container, body)
    assert list(found) == ["expectations"]
    assert found["expectations"][0] == "fail"


def test_paths_are_taken_in_their_plain_form() -> None:
    assert Expectations({**BODY, "home": "/home//zoe/"}).home == "/home/zoe"


def test_output_is_one_object_per_line_and_the_code_says_it_all(
    container: Container, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([json.dumps(BODY)], container) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(set(line) == {"check", "status", "detail"} for line in lines)
    container.put("/usr/bin/sudo")
    assert main.run([json.dumps(BODY)], container) == 1
    assert main.run([json.dumps({**BODY, "env_file": None})], container) == 1


def test_skipped_check_is_no_failure(container: Container, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([json.dumps({**BODY, "env_file": None})], container) == 0
    assert '"skip"' in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["{"], ["{}", "{}"], ["[" * 100_000]])
def test_odd_arguments_are_a_failure_and_no_crash(
    container: Container, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert main.run(argv, container) == 1
    assert json.loads(capsys.readouterr().out)["check"] == "expectations"


def test_tasks_run_at_the_same_time_and_keep_their_order() -> None:
    barrier = threading.Barrier(3, timeout=10)
    tasks = [lambda name=name: (barrier.wait(), name)[1] for name in "abc"]
    assert together(tasks, 10) == ["a", "b", "c"]


def test_late_task_without_a_substitute_fails() -> None:
    never = threading.Event()
    try:
        with pytest.raises(Failed, match="1 of 2"):
            together([lambda: 1, lambda: never.wait() or 2], 0.05)
    finally:
        never.set()


def test_what_a_task_raises_arrives() -> None:
    def broken() -> int:
        raise OSError(24, "Too many open files")

    with pytest.raises(OSError, match="Too many"):
        together([broken], 10)


def test_packed_checker_runs_as_a_program(tmp_path: Path) -> None:
    program = tmp_path / "corral-verify"
    program.write_bytes(executable("verify"))
    argv = [sys.executable, "-IS", program, json.dumps({**BODY, "home": "relative"})]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert json.loads(done.stdout)["check"] == "expectations"
    assert (done.returncode, done.stderr) == (1, "")


def test_packed_checker_has_equal_bytes_for_equal_sources(tmp_path: Path) -> None:
    assert executable("verify") == executable("verify")
    (tmp_path / "x").write_bytes(executable("verify"))
    with zipfile.ZipFile(tmp_path / "x") as archive:
        assert "__main__.py" in archive.namelist()
        assert all(entry.date_time == (1980, 1, 1, 0, 0, 0) for entry in archive.infolist())
        assert not any(name.endswith(".pyc") for name in archive.namelist())


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_files_of_the_image_need_python_3_9_and_its_standard_library_only(source: Path) -> None:
    tree = ast.parse(source.read_text(), feature_version=(3, 9))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        for name in names:
            assert name.partition(".")[0] in sys.stdlib_module_names, f"{source.name} imports {name}"
    if tree.body[1:]:
        futures = [
            node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        ]
        assert futures, "annotations would be evaluated"
