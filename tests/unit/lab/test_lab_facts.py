"""Names, paths, keys, texts: everything of the lab that can be decided without making one."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.lab import box, layout, machine, network, product, provision, state, trees
from tests.lab.__main__ import main
from tests.lab.execute import LabError, Process
from tests.lab.layout import Layout
from tests.lab.state import State

MOUNTINFO = """\
22 1 254:0 / / rw,relatime - ext4 /dev/root rw
31 29 0:27 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
70 22 0:50 / /run/corral-lab/main/root rw - overlay corral-lab rw,lowerdir=/c/box-1,upperdir=/u,workdir=/w
71 70 0:51 / /run/corral-lab/main/root/a\\040b rw - tmpfs tmpfs rw
72 22 0:52 / /run/corral-lab/mainly/root rw - overlay corral-lab rw,lowerdir=/c/box-2,upperdir=/u,workdir=/w
"""


@pytest.mark.parametrize("name", ["Main", "a-", "-a", "", "../x", "1st", "a" * 25, "a b", "a_b"])
def test_odd_names_of_labs_are_refused(name: str) -> None:
    if name:
        with pytest.raises(LabError, match="cannot be the name"):
            Layout.of(name, {})
    else:
        assert Layout.of(name, {}).name == "main"


def test_hyphens_are_part_of_plain_names() -> None:
    assert Layout.of("a-b2", {}).box_netns == "corral-a-b2-box"


def test_name_comes_from_the_call_then_the_environment() -> None:
    assert Layout.of("mine", {"CORRAL_LAB_NAME": "other"}).name == "mine"
    assert Layout.of(None, {"CORRAL_LAB_NAME": "other"}).name == "other"


def test_big_things_lie_in_the_users_cache() -> None:
    assert Layout.of(None, {"HOME": "/home/u"}).disk == Path("/home/u/.cache/corral-lab/boxes/main")
    assert Layout.of(None, {"HOME": "/home/u", "XDG_CACHE_HOME": "/c"}).cache == Path("/c/corral-lab")


def test_labs_share_neither_namespaces_nor_directories() -> None:
    one, two = Layout.of("one", {}), Layout.of("two", {})
    for fact in ("run", "lock", "disk", "box_netns", "inet_netns", "cgroup"):
        assert getattr(one, fact) != getattr(two, fact)


def test_tree_key_depends_on_every_ingredient() -> None:
    assert layout.tree_key("a", ("b",)) == layout.tree_key("a", ("b",))
    assert len({layout.tree_key("a", ("b",)), layout.tree_key("a", ("c",)), layout.tree_key("ab")}) == 3


def test_code_key_depends_on_the_code(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    before = layout.code_key(tmp_path)
    (tmp_path / "a.py").write_text("2")
    assert layout.code_key(tmp_path) != before


def test_no_name_shares_an_address_with_the_forbidden_one() -> None:
    reached = [name for name, addresses in layout.NAMES.items() if layout.FORBIDDEN in addresses]
    assert reached == ["forbidden.corral.example"]


def test_mounts_of_a_lab_are_its_own_deepest_first() -> None:
    assert state.mounts_below([Path("/run/corral-lab/main")], MOUNTINFO) == [
        Path("/run/corral-lab/main/root/a b"),
        Path("/run/corral-lab/main/root"),
    ]


def test_trees_under_an_overlay_are_in_use() -> None:
    assert state.overlay_lowers(MOUNTINFO) == {"/c/box-1", "/c/box-2"}


def test_lock_is_held_against_others_and_names_the_holder(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from pathlib import Path
from tests.lab.state import locked
with locked(Path({str(tmp_path / "lock")!r}), "it"):
    print("held", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(LabError, match=f"it is in use by process {holder.pid}"):
            with state.locked(tmp_path / "lock", "it"):
                pass
        holder.kill()
        holder.wait()
        with state.locked(tmp_path / "lock", "it"):
            pass


def state_in(directory: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    monkeypatch.setattr(Layout, "run", property(lambda _: directory))
    return State(Layout.of("unit", {}))


def test_state_survives_the_process_that_wrote_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state_in(tmp_path, monkeypatch).put("dns", Process(1, 2), dns_port="5301")
    again = state_in(tmp_path, monkeypatch)
    assert again.get("dns") == Process(1, 2)
    assert again.note("dns_port") == "5301"
    again.drop("dns")
    assert again.get("dns") is None
    assert again.note("dns_port") == "5301"


def test_torn_state_file_reads_as_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state.json").write_text('{"processes": {"dns"')
    assert state_in(tmp_path, monkeypatch).processes() == {}


def test_login_environment_has_what_a_user_service_needs() -> None:
    found = box.login_environment("dev", {"EXTRA": "1", "HTTP_PROXY": ""})
    assert found["HOME"] == "/home/dev"
    assert found["XDG_RUNTIME_DIR"] == "/run/user/1000"
    assert found["PATH"].startswith("/home/dev/.local/bin:")
    assert found["EXTRA"] == "1"
    assert "HTTP_PROXY" not in found
    assert found["http_proxy"] == found["https_proxy"]
    assert "TERM" not in found


def test_root_has_no_session_of_the_user() -> None:
    assert "XDG_RUNTIME_DIR" not in box.login_environment("root")


def test_kernel_limits_are_put_back(tmp_path: Path) -> None:
    (tmp_path / "fs").mkdir()
    for name in ("nr_open", "file-max"):
        (tmp_path / "fs" / name).write_text("1048576\n")
    with pytest.raises(LabError), box.kernel_limits_kept(tmp_path):
        (tmp_path / "fs/nr_open").write_text("1073741816\n")
        raise LabError("the boot failed")
    assert (tmp_path / "fs/nr_open").read_text() == "1048576\n"


def test_proxy_variables_come_in_both_cases_and_spare_the_labs_own_names() -> None:
    found = provision.proxy_environment()
    assert set(found) == {"http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"}
    assert {"localhost", ".corral.example", "openrouter.ai"} <= set(found["no_proxy"].split(","))


def test_sources_have_security_only_where_the_machine_has() -> None:
    with_security = trees.apt_sources("bookworm", "http://m.example/debian", "http://m.example/security")
    assert "Suites: bookworm-security\n" in with_security
    assert "Suites: bookworm bookworm-updates\n" in with_security
    assert "security" not in trees.apt_sources("bookworm", "http://m.example/debian", None)


def test_a_suite_that_is_not_released_has_one_archive() -> None:
    text = trees.apt_sources("sid", "http://m.example/debian", "http://m.example/security", released=False)
    assert [line for line in text.splitlines() if line.startswith("Suites")] == ["Suites: sid"]


def test_libraries_are_the_dependencies_that_are_libraries() -> None:
    text = "dnsmasq-base\n  Depends: adduser\n  Depends: libc6\n |Depends: libdbus-1-3\n"
    assert machine.wanted_libraries(text) == ["libc6", "libdbus-1-3"]


def test_full_disk_is_refused_with_the_fix(tmp_path: Path) -> None:
    machine.check_room(tmp_path / "not" / "yet", 1)
    with pytest.raises(LabError, match=r"GiB free, the lab needs \d+ GiB there\n  hint: .*XDG_CACHE_HOME"):
        machine.check_room(tmp_path / "not" / "yet", 1 << 60)


def test_counting_comes_before_steering() -> None:
    rules = network.ruleset(5301)
    assert rules.index("update @ports4") < rules.index("jump steer")
    assert "udp dport 53 udp dport set 5301" in rules


def test_constraints_are_the_pins_without_hashes() -> None:
    lock = "a-b==1.0 \\\n    --hash=sha256:00\nc.d==2.1.post1 ; python_version < '3.12' \\\n"
    assert product.constraints(lock) == "a-b==1.0\nc.d==2.1.post1\n"


def wheel(path: Path, content: str, when: int) -> Path:
    path.mkdir()
    file = path / "corral-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo("corral/cli.py", (when, 1, 1, 0, 0, 0)), content)
    return file


def test_wheel_is_known_by_content_not_by_time(tmp_path: Path) -> None:
    first = product.wheel_key(wheel(tmp_path / "1", "one", 2001))
    assert product.wheel_key(wheel(tmp_path / "2", "one", 2002)) == first
    assert product.wheel_key(wheel(tmp_path / "3", "two", 2001)) != first


def test_source_key_ignores_what_python_leaves_behind(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / name).write_text(name)
    (tmp_path / "corral" / "__pycache__").mkdir(parents=True)
    (tmp_path / "corral" / "cli.py").write_text("1")
    before = product.source_key(tmp_path)
    (tmp_path / "corral" / "__pycache__" / "cli.pyc").write_text("x")
    assert product.source_key(tmp_path) == before
    (tmp_path / "corral" / "cli.py").write_text("2")
    assert product.source_key(tmp_path) != before


def test_command_line_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["sideways"])
    assert caught.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


def test_attaching_to_a_lab_that_is_down_names_the_fix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["install-corral", "--name", "nosuchlab"]) == 1
    assert "lab nosuchlab is not up\n  hint: make lab" in capsys.readouterr().err
    assert main(["--name", "nosuchlab", "status"]) == 1
    assert capsys.readouterr().out == "lab: nosuchlab: down\n"
