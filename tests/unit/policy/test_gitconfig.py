"""What in a Git configuration makes Git run something: compared with Git's own reading of the file."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policy.gitconfig import UNREADABLE, differences, entries, harmless, suspect

CLEAN = """\
[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = false
[branch "main"]
\tremote = origin
\tmerge = refs/heads/main
[pull]
\trebase = true
[color]
\tui = auto
[user]
\tname = "A # not a comment"
"""


def test_an_ordinary_configuration_is_not_suspect() -> None:
    assert suspect(CLEAN) == {}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[core]\nfsmonitor = ./x\n", "core.fsmonitor"),
        ("[CORE]\n\tHooksPath=/tmp/x\n", "core.hookspath"),
        ("[core] sshCommand = x\n", "core.sshcommand"),
        ("[core]\npager = less\n", "core.pager"),
        ("[core]\neditor = vi\n", "core.editor"),
        ("[pager]\nlog = x\n", "pager.log"),
        ('[filter "a.b"]\nsmudge = x\n', "filter.a.b.smudge"),
        ('[filter "A\\"b"]\nclean = x\n', 'filter.A"b.clean'),
        ('[filter "lfs"]\nprocess = x\n', "filter.lfs.process"),
        ("[diff]\nexternal = x\n", "diff.external"),
        ('[diff "pdf"]\ntextconv = x\n', "diff.pdf.textconv"),
        ('[merge "ours"]\ndriver = x\n', "merge.ours.driver"),
        ('[mergetool "m"]\ncmd = x\n', "mergetool.m.cmd"),
        ("[gpg]\nprogram = x\n", "gpg.program"),
        ('[gpg "ssh"]\nprogram = x\n', "gpg.ssh.program"),
        ("[credential]\nhelper = !x\n", "credential.helper"),
        ('[credential "https://example.com"]\nhelper = x\n', "credential.https://example.com.helper"),
        ("[include]\npath = x\n", "include.path"),
        ('[includeIf "gitdir:/x"]\npath = x\n', "includeif.gitdir:/x.path"),
        ("[alias]\nst = !sh\n", "alias.st"),
        ('[submodule "x"]\nupdate = !sh\n', "submodule.x.update"),
        ('[remote "o"]\nuploadpack = x\n', "remote.o.uploadpack"),
        ('[remote "o"]\nurl = ext::sh -c x\n', "remote.o.url"),
        ("[core]\nfsmonitor = a\\\nb\n", "core.fsmonitor"),
        ("[core]fsmonitor\n", "core.fsmonitor"),
        ("\ufeff[core]\r\n\tfsmonitor = x\r\n", "core.fsmonitor"),
        ("[core]\n; c\n# c\\\nfsmonitor = x # c\n", "core.fsmonitor"),
        ("[alias]\nst = status\n", "alias.st"),
        ('[alias "st"]\ncommand = status\n', "alias.st.command"),
        ("[core]\nworktree = /\n", "core.worktree"),
        ("[core]\nprotectNTFS = false\n", "core.protectntfs"),
        ('[branch "m"]\npushRemote = x\n', "branch.m.pushremote"),
        ('[branch "m"]\nremote = ../x\n', "branch.m.remote"),
        ('[branch "m"]\nremote = host:x\n', "branch.m.remote"),
        ('[branch "m"]\nremote = ..\n', "branch.m.remote"),
        ('[branch "m"]\nremote = --upload-pack=x\n', "branch.m.remote"),
        ("[remote]\npushDefault = x\n", "remote.pushdefault"),
        ("[gc]\nrecentObjectsHook = x\n", "gc.recentobjectshook"),
        ("[imap]\ntunnel = x\n", "imap.tunnel"),
        ("[lfs]\nurl = x\n", "lfs.url"),
        ('[lfs "customtransfer.x"]\npath = x\n', "lfs.customtransfer.x.path"),
        ("[submodule]\nrecurse = true\n", "submodule.recurse"),
        ("[http]\nproxy = x\n", "http.proxy"),
        ("[some]\nkey = of a later release\n", "some.key"),
        ("[core\nx = y\n", UNREADABLE),
        ("[core]\n= y\n", UNREADABLE),
    ],
)
def test_whatever_is_not_known_to_be_harmless_is_found(text: str, key: str) -> None:
    assert key in suspect(text)
    assert differences(CLEAN, CLEAN + text)
    assert not differences(text, text + "[user]\nname = x\n")


def test_a_difference_shows_both_values() -> None:
    assert differences("[core]\npager = a\n", "[core]\npager = b\n") == [
        "- core.pager = a",
        "+ core.pager = b",
    ]
    assert differences("[core]\npager = a\n", "") == ["- core.pager = a"]


WORDS = st.sampled_from(
    (
        "[core]",
        '[filter "x"]',
        '[remote "a b"]',
        "[alias]",
        "[",
        "]",
        "core.",
        "fsmonitor",
        "clean",
        "url",
        "name",
        "=",
        " ",
        "\t",
        "\n",
        "\n",
        "\n",
        "\r\n",
        "\\\n",
        '"',
        "#",
        ";",
        "!sh",
        "a\\\\b",
        '\\"',
        "\\n",
        "\\q",
        "x y",
    )
)


GIT = pytest.mark.skipif(shutil.which("git") is None, reason="compares with Git")


def read_by_git(text: str) -> list[tuple[str, str]] | None:
    """Return Git's own reading of a file, None when it refuses it. A key alone has the value "true"."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "config")
        file.write_text(text)
        done = subprocess.run(
            ["git", "config", "--file", str(file), "--null", "--list"],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        return None
    parts = [entry.partition("\n") for entry in done.stdout.split("\0") if entry]
    return [(key, value if sign else "true") for key, sign, value in parts]


def plain(value: str) -> str:
    """Return a value as every Git reads it: before 2.45 a tab within it became a space."""
    return value.replace("\t", " ")


@GIT
@settings(max_examples=400, deadline=None)
@example("[]")
@given(st.lists(WORDS, max_size=14).map("".join))
def test_git_reads_what_is_read_here(text: str) -> None:
    theirs = read_by_git(text)
    if theirs is None:
        assert list(entries(text))[-1][0] == UNREADABLE  # Git refuses the whole file
    else:
        assert [(key, plain(value)) for key, value in entries(text)] == [(k, plain(v)) for k, v in theirs]


@GIT
@settings(max_examples=200, deadline=None)
@example("", "fsmonitor=[core]\t[core]")
@given(st.lists(WORDS, max_size=10).map("".join), st.lists(WORDS, max_size=14).map("".join))
def test_what_git_reads_anew_is_told_unless_it_is_harmless(before: str, after: str) -> None:
    old, new = read_by_git(before), read_by_git(after)
    if old is None or new is None:
        return
    fresh = [(key, value) for key, value in new if (key, value) not in old and not harmless(key, value)]
    told = [plain(line) for line in differences(before, after)]
    assert all(plain(f"+ {key} = {value}") in told for key, value in fresh)


@GIT
def test_of_the_keys_that_git_knows_none_that_names_a_program_or_a_place_is_harmless() -> None:
    done = subprocess.run(["git", "help", "--config"], capture_output=True, text=True, check=True)
    known = [re.sub(r"<[^>]*>|\*", "x", line).lower() for line in done.stdout.split()]
    assert len(known) > 300
    word = re.compile(
        r"command|cmd|program|path|hook|helper|editor|pager|driver|process|tunnel|proxy|url|file$|dir$"
        r"|worktree|ssh|askpass|external|textconv|browser|server|instead|alias|include|remote|fsmonitor|allow"
    )
    suspicious = [key for key in known if word.search(key) and not key.startswith(("advice.", "color."))]
    assert len(suspicious) > 100
    # These two only spell alike.
    spelled = {"core.quotepath", "push.autosetupremote"}
    assert {key for key in suspicious if harmless(key, "../x")} <= spelled


def test_where_a_branch_comes_from_is_harmless_by_a_plain_name() -> None:
    assert harmless("branch.m.remote", "origin")
    assert harmless("branch.m.remote", ".")
