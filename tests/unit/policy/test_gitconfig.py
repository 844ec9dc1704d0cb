"""What in a Git configuration makes Git run something: compared with Git's own reading of the file."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.gitconfig import UNREADABLE, differences, entries, executing

CLEAN = """\
[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = false
[branch "main"]
\tremote = origin
\tmerge = refs/heads/main
[alias]
\tst = status
[user]
\tname = "A # not a comment"
"""


def test_an_ordinary_configuration_executes_nothing() -> None:
    assert executing(CLEAN) == {}


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
        ("[core\nx = y\n", UNREADABLE),
        ("[core]\n= y\n", UNREADABLE),
    ],
)
def test_what_executes_is_found(text: str, key: str) -> None:
    assert key in executing(text)
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


@pytest.mark.skipif(shutil.which("git") is None, reason="compares with Git")
@settings(max_examples=400, deadline=None)
@given(st.lists(WORDS, max_size=14).map("".join))
def test_git_reads_what_is_read_here(text: str) -> None:
    import tempfile

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
        assert list(entries(text))[-1][0] == UNREADABLE  # Git refuses the whole file
        return
    theirs = [entry.partition("\n") for entry in done.stdout.split("\0") if entry]
    ours = list(entries(text))
    assert [key for key, _, _ in theirs] == [key for key, _ in ours]
    assert [value for _, sign, value in theirs if sign] == [
        value for (key, value), (_, sign, _) in zip(ours, theirs, strict=True) if sign
    ]
