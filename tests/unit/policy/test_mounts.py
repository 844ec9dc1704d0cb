from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.credentials import CREDENTIALS, EVERYWHERE, EXECUTED, RELOCATED, SYSTEM
from policy.mounts import Finding, Guard, RealProbe, Refusal, check, expand, is_within

if TYPE_CHECKING:
    from conftest import FakeProbe

HOME = "/home/zach"
PROJECT = "/home/zach/Projects/demo"
Probes = Any
REAL_GUARD = Guard(HOME, {}, RealProbe())


def guard(probe: FakeProbe, environ: dict[str, str] | None = None, own: tuple[str, ...] = ()) -> Guard:
    return Guard(HOME, environ or {}, probe, own)


def refusal(path: str, probe: FakeProbe, environ: dict[str, str] | None = None) -> str | None:
    refused = guard(probe, environ).refuse(probe.resolve(path))
    return refused.what if refused else None


def run(
    probe: FakeProbe,
    rw: list[str],
    ro: list[str],
    *,
    mounted: bool = True,
) -> tuple[tuple[str, ...], tuple[str, ...], list[Finding]]:
    return check(rw, ro, project=PROJECT, project_mounted=mounted, home=HOME, guard=guard(probe))


def test_home_is_refused_with_exactly_this_sentence(fake_probe: Probes) -> None:
    refused = guard(fake_probe()).refuse(HOME)
    assert refused is not None
    expected = "corral: policy error: refusing to mount your home directory (/home/zach)"
    assert refused.error().render() == expected
    assert refused.error().exit_code == 2


@pytest.mark.parametrize(
    "text", ["~", "~/", "$HOME", "${HOME}", "/home/zach", "/home/zach/", "~/Projects/..", "/home/./zach"]
)
def test_every_way_to_write_home_is_home(fake_probe: Probes, text: str) -> None:
    _, _, (finding,) = run(fake_probe(), [text], [])
    assert finding.refusal.what == "refusing to mount your home directory (/home/zach)"


@pytest.mark.parametrize("place", [*CREDENTIALS, *EXECUTED], ids=lambda p: p.path)
def test_credentials_and_executed_files_are_refused(fake_probe: Probes, place: Any) -> None:
    path = f"{HOME}/{place.path}"
    what = refusal(path, fake_probe())
    assert what is not None
    assert path in what
    assert refusal(f"{path}/below", fake_probe()) is not None
    assert refusal(f"{path}-other", fake_probe()) is None


@pytest.mark.parametrize("place", [*CREDENTIALS, *EXECUTED], ids=lambda p: p.path)
def test_what_contains_a_credential_is_refused(fake_probe: Probes, place: Any) -> None:
    parent = os.path.dirname(f"{HOME}/{place.path}")
    assert refusal(parent, fake_probe()) is not None


@pytest.mark.parametrize("place", SYSTEM, ids=lambda p: p.path)
def test_system_directories_are_refused(fake_probe: Probes, place: Any) -> None:
    assert refusal(place.path, fake_probe()) is not None
    assert refusal(f"{place.path}/below", fake_probe()) is not None
    assert refusal(f"{place.path}-other", fake_probe()) is None


@pytest.mark.parametrize("variable", RELOCATED)
def test_credentials_moved_by_a_variable_are_refused(fake_probe: Probes, variable: str) -> None:
    environ = {variable: "/data/moved"}
    what = refusal("/data/moved", fake_probe(), environ)
    assert what is not None
    assert variable in what or "/data/moved" in what
    assert refusal("/data", fake_probe(), environ) is not None
    assert refusal("/data/other", fake_probe(), environ) is None


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({}, f"{HOME}/.local/share/corral/demo-01234567/build"),
        ({"XDG_DATA_HOME": "/data/share"}, "/data/share/corral"),
        ({"XDG_DATA_HOME": "/data/share"}, f"{HOME}/.local/share/corral"),
        ({"XDG_CONFIG_HOME": "/data/config"}, "/data/config/corral/enforcer.toml"),
        ({"XDG_CONFIG_HOME": "/data/config"}, "/data/config/gh"),
        ({"XDG_CONFIG_HOME": "/data/config"}, "/data/config"),
        ({"XDG_RUNTIME_DIR": "/data/run"}, "/data/run/corral"),
        ({"KUBECONFIG": "/data/a:/data/b"}, "/data/b"),
        ({"KRB5CCNAME": "FILE:/data/ticket"}, "/data/ticket"),
    ],
)
def test_places_that_the_environment_moves_are_refused(
    fake_probe: Probes, environ: dict[str, str], path: str
) -> None:
    assert refusal(path, fake_probe(), environ) is not None


@pytest.mark.parametrize("value", ["/", HOME, "/home", "relative", ""])
def test_variable_that_names_a_whole_home_does_not_forbid_every_project(
    fake_probe: Probes, value: str
) -> None:
    assert refusal(PROJECT, fake_probe(), {"CODEX_HOME": value}) is None


@pytest.mark.parametrize("name", EVERYWHERE)
@pytest.mark.parametrize("base", ["/home/other", "/root", "/srv/backup/home"])
def test_credential_directory_is_refused_wherever_it_lies(fake_probe: Probes, base: str, name: str) -> None:
    assert refusal(f"{base}/{name}", fake_probe()) is not None
    assert refusal(f"{base}/{name}/below", fake_probe()) is not None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/", "root of the file system"),
        ("/home", "every user"),
        ("/tmp", "every user"),
        ("/var/tmp", "every user"),
        ("/home/agent", "agent's home"),
        ("/var", "contains /var/"),
        ("/var/lib", "contains /var/lib/"),
        ("/etc/passwd", "system configuration"),
        ("/run/docker.sock", "sockets"),
        ("/data/\x07bell", "control character"),
        ("/data/line\nbreak", "control character"),
        ("/data/\udcff", "undecodable"),
        ("/data/" + "x/" * 2100, "too long"),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_single_paths_are_refused_with_their_reason(fake_probe: Probes, path: str, message: str) -> None:
    what = guard(fake_probe()).refuse(path)
    assert what is not None
    assert message in what.what


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "there is no /data/x"),
        ("socket", "it is a socket"),
        ("fifo", "neither a directory nor a file"),
        ("device", "neither a directory nor a file"),
        ("unreadable", "cannot be examined"),
    ],
)
def test_only_directories_and_files_are_mounted(fake_probe: Probes, kind: Any, message: str) -> None:
    what = refusal("/data/x", fake_probe(kinds={"/data/x": kind}))
    assert what is not None
    assert message in what
    assert refusal("/data/x", fake_probe(kinds={"/data/x": "file"})) is None


def test_own_program_is_refused_and_so_is_a_project_around_it(fake_probe: Probes) -> None:
    probe = fake_probe()
    own = guard(probe, own=("/opt/corral/venv",))
    assert own.refuse("/opt/corral/venv/bin") is not None
    assert own.refuse("/opt/corral") is not None
    assert own.refuse("/opt/other") is None


def test_symbolic_link_is_what_it_leads_to(fake_probe: Probes) -> None:
    links = {f"{HOME}/innocent": f"{HOME}/.ssh", "/data/home": HOME, f"{HOME}/shared": "/data/shared"}
    rw, _, findings = run(fake_probe(links=links), ["~/innocent", "/data/home", "~/shared"], [])
    assert rw == ("/data/shared",)
    assert [f.index for f in findings] == [0, 1]
    assert "SSH keys" in findings[0].refusal.what
    assert "your home directory (/home/zach)" in findings[1].refusal.what


def test_credentials_behind_a_link_are_protected_at_both_names(fake_probe: Probes) -> None:
    probe = fake_probe(links={f"{HOME}/.aws": "/data/vault/aws"})
    assert refusal("/data/vault/aws", probe) is not None
    assert refusal("/data/vault", probe) is not None
    assert refusal(f"{HOME}/.aws", probe) is not None


def test_home_behind_a_link_is_home(fake_probe: Probes) -> None:
    probe = fake_probe(links={HOME: "/export/users/zach"})
    refused = guard(probe).refuse("/export/users/zach")
    assert refused is not None
    assert refused.what == "refusing to mount your home directory (/export/users/zach)"


@pytest.mark.parametrize(
    ("path", "refused"),
    [
        ("/mnt/h", True),
        ("/mnt/h/.ssh", True),
        ("/mnt/h/.config/gcloud/logs", True),
        ("/mnt/h/.config", True),
        ("/mnt/h/Projects/shared", False),
    ],
)
def test_bind_mount_of_home_under_another_name_is_recognised(
    fake_probe: Probes, path: str, refused: bool
) -> None:
    assert (refusal(path, fake_probe(same={"/mnt/h": HOME})) is not None) is refused


def test_good_mounts_are_resolved_in_order(fake_probe: Probes) -> None:
    rw, ro, findings = run(fake_probe(), ["~/Projects/shared", "/data/x/"], ["$HOME/Documents/notes"])
    assert findings == []
    assert rw == (f"{HOME}/Projects/shared", "/data/x")
    assert ro == (f"{HOME}/Documents/notes",)


@pytest.mark.parametrize("access", ["rw", "ro"])
def test_listed_project_is_refused_in_run_mode(fake_probe: Probes, access: str) -> None:
    lists = {"rw": [PROJECT], "ro": []} if access == "rw" else {"rw": [], "ro": ["~/Projects/demo/"]}
    _, _, (finding,) = run(fake_probe(), lists["rw"], lists["ro"])
    assert finding.access == access
    assert finding.refusal.what == (
        f"in run mode the project directory is mounted rw automatically; don't list it here ({PROJECT})"
    )
    assert run(fake_probe(), lists["rw"], lists["ro"], mounted=False)[2] == []


@pytest.mark.parametrize(
    ("rw", "ro", "message"),
    [
        (["~/Projects/demo/src"], [], "lies in the project directory"),
        ([], ["~/Projects/demo/vendor"], "lies in the project directory"),
        (["~/Projects"], [], "contains the project directory"),
        ([], ["~/Projects"], "contains the project directory"),
        (["/data/x"], ["/data/x"], "/data/x (ro) overlaps /data/x (rw)"),
        (["/data/x"], ["/data/x/y"], "/data/x/y (ro) overlaps /data/x (rw)"),
        (["/data/x/y"], ["/data/x"], "/data/x (ro) overlaps /data/x/y (rw)"),
        (["/data/x", "/data/x/y"], [], "overlaps"),
        (["/data/x", "/data/x/"], [], "listed twice"),
        ([], ["/data/x", "/data/./x"], "listed twice"),
    ],
)
def test_overlaps_are_refused(fake_probe: Probes, rw: list[str], ro: list[str], message: str) -> None:
    _, _, (finding,) = run(fake_probe(), rw, ro)
    assert message in finding.refusal.what


def test_neighbour_with_a_common_prefix_is_no_overlap(fake_probe: Probes) -> None:
    assert run(fake_probe(), ["/data/x", "/data/xy", "~/Projects/demo2"], ["/data/x.y"])[2] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("relative/path", "not an absolute path"),
        ("./here", "not an absolute path"),
        ("../there", "not an absolute path"),
        ("", "not an absolute path"),
        ("~other/x", "another user's home"),
        ("$OTHER/x", "not an absolute path"),
        ("$HOMEX", "not an absolute path"),
        ("/data/a\nb", "control character"),
        ("~/a\nb", "control character"),
        ("~/\ud800", "control character"),
        ("/data/a\u202eb", "control character"),
    ],
    ids=ascii,
)
def test_entry_that_is_not_a_plain_absolute_path_is_refused(text: str, message: str) -> None:
    refused = expand(text, HOME)
    assert isinstance(refused, Refusal)
    assert message in refused.what


@given(st.lists(st.sampled_from(["a", "b", "..", ".", ".ssh", "Projects", "x y"]), max_size=6))
def test_no_spelling_of_a_path_reaches_a_credential(parts: list[str]) -> None:
    path = os.path.normpath("/".join([HOME, *parts]))
    refused = REAL_GUARD.refuse(path) is not None
    if path in ("/", "/home", HOME) or "/.ssh" in path:
        assert refused


@pytest.mark.parametrize(
    ("path", "directory", "expected"),
    [
        ("/a/b", "/a", True),
        ("/a", "/a", True),
        ("/ab", "/a", False),
        ("/a", "/a/b", False),
        ("/a", "/", True),
    ],
)
def test_is_within(path: str, directory: str, expected: bool) -> None:
    assert is_within(path, directory) is expected


def test_real_probe_sees_what_is_there(tmp_path: Path) -> None:
    probe = RealProbe()
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "fifo")
    os.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("sock")
        kinds = {name: probe.kind(str(tmp_path / name)) for name in ("file", "fifo", "sock", "loop", "none")}
    assert kinds == {
        "file": "file",
        "fifo": "fifo",
        "sock": "socket",
        "loop": "unreadable",
        "none": "missing",
    }
    assert probe.kind(str(tmp_path)) == "directory"
    assert probe.kind("/dev/null") == "device"
    assert probe.kind(str(tmp_path / "file" / "x")) == "missing"
    assert probe.resolve(str(tmp_path / "link")) == str((tmp_path / "file").resolve())
    assert probe.identity(str(tmp_path / "link")) == probe.identity(str(tmp_path / "file"))
    assert probe.identity(str(tmp_path / "none")) is None
    assert probe.kind("/\ud800") == "unreadable"
    assert probe.resolve("/a/../\ud800") == "/\ud800"


# Where each browser keeps what logs its user in, as its own documentation has it.
BROWSERS = {
    "Firefox": ".mozilla/firefox/abcd.default/logins.json",
    "Firefox (new)": ".config/mozilla/firefox/abcd.default/cookies.sqlite",
    "Firefox (snap)": "snap/firefox/common/.mozilla/firefox/abcd.default/key4.db",
    "Firefox (Flatpak)": ".var/app/org.mozilla.firefox/.mozilla/firefox/abcd.default/key4.db",
    "SeaMonkey": ".mozilla/seamonkey/abcd.default/key4.db",
    "IceCat": ".mozilla/icecat/abcd.default/key4.db",
    "LibreWolf": ".librewolf/abcd.default/key4.db",
    "Waterfox": ".waterfox/abcd.default/key4.db",
    "Floorp": ".floorp/abcd.default/key4.db",
    "Zen": ".zen/abcd.default/key4.db",
    "Pale Moon": ".moonchild productions/pale moon/abcd.default/key3.db",
    "Tor Browser": ".local/share/torbrowser/tbb/x86_64/tor-browser/Browser/TorBrowser/Data/Browser/profile.default",
    "Chrome": ".config/google-chrome/Default/Login Data",
    "Chrome (beta)": ".config/google-chrome-beta/Default/Cookies",
    "Chrome (dev)": ".config/google-chrome-unstable/Default/Cookies",
    "Chromium": ".config/chromium/Default/Cookies",
    "Chromium (snap)": "snap/chromium/common/chromium/Default/Cookies",
    "Brave": ".config/BraveSoftware/Brave-Browser/Default/Login Data",
    "Edge": ".config/microsoft-edge/Default/Cookies",
    "Vivaldi": ".config/vivaldi/Default/Cookies",
    "Opera": ".config/opera/Cookies",
    "Yandex": ".config/yandex-browser/Default/Cookies",
    "Thorium": ".config/thorium/Default/Cookies",
    "Helium": ".config/net.imput.helium/Default/Cookies",
    "GNOME Web": ".local/share/epiphany/cookies.sqlite",
    "Falkon": ".config/falkon/profiles/default/cookies.db",
    "qutebrowser": ".local/share/qutebrowser/webengine/Cookies",
    "Konqueror": ".local/share/konqueror/bookmarks.xml",
    "Midori": ".config/midori/cookies.db",
    "Min": ".config/Min/Partitions/webcontent/Cookies",
    "Ladybird": ".local/share/Ladybird/Ladybird.db",
    "Nyxt": ".local/share/nyxt/default/cookies",
    "luakit": ".local/share/luakit/cookies.db",
    "surf": ".surf/cookies.txt",
    "w3m": ".w3m/cookie",
}


@pytest.mark.parametrize("browser", BROWSERS)
def test_no_part_of_a_browser_s_profile_is_mounted(fake_probe: Probes, browser: str) -> None:
    parts = f"{HOME}/{BROWSERS[browser]}".split("/")
    for depth in range(4, len(parts) + 1):
        assert refusal("/".join(parts[:depth]), fake_probe()) is not None, parts[:depth]
    assert refusal(f"{HOME}/Projects/{browser}", fake_probe()) is None


def test_no_place_is_listed_twice() -> None:
    for table in (CREDENTIALS, EXECUTED, SYSTEM):
        paths = [place.path for place in table]
        assert sorted(paths) == sorted(set(paths))
