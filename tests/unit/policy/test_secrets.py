from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy import profiles
from policy.errors import PolicyError
from policy.secrets import MAX_VALUE, changes_behaviour, check_stat, parse_env_file, read_env_file

SECRET = "hunter2-and-more"


def values(text: str) -> dict[str, str]:
    return parse_env_file(text, "demo.env")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("KEY=value", "value"),
        ("  KEY=value  ", "value"),
        ("\texport\tKEY=value", "value"),
        ("export KEY=value", "value"),
        ("KEY=", ""),
        ("KEY=''", ""),
        ('KEY=""', ""),
        ("KEY=a=b=c", "a=b=c"),
        ("KEY=dGVzdA==", "dGVzdA=="),
        ("KEY=value # comment", "value"),
        ("KEY=value#not-a-comment", "value#not-a-comment"),
        ("KEY='a b # c $D \\n \"'", 'a b # c $D \\n "'),
        ('KEY="a b # c"', "a b # c"),
        ('KEY="a\\nb\\t\\"\\\\\\$"', 'a\nb\t"\\$'),
        ('KEY="x" # comment', "x"),
        ("KEY='x'   ", "x"),
        ("KEY=$HOME/${X}", "$HOME/${X}"),
        ("KEY=value\r", "value"),
        ("KEY=ünïcode", "ünïcode"),
        ("_k1=x", "x"),
    ],
    ids=ascii,
)
def test_line_is_read_as_documented(line: str, expected: str) -> None:
    assert list(values(line).values()) == [expected]


def test_file_with_comments_and_blank_lines() -> None:
    text = "\ufeff# head\n\nOPENAI_API_KEY=a\n  # note\nexport ANTHROPIC_API_KEY='b'\n"
    assert values(text) == {"OPENAI_API_KEY": "a", "ANTHROPIC_API_KEY": "b"}


@pytest.mark.parametrize(
    ("line", "message", "key_shown"),
    [
        (SECRET, "not KEY=VALUE", False),
        (f"{SECRET}=", "not a variable name", False),
        (f"1KEY={SECRET}", "not a variable name", False),
        (f"my-key={SECRET}", "not a variable name", False),
        (f"={SECRET}", "not a variable name", False),
        ("aHVudGVyMg==", "not KEY=VALUE", False),
        (f"KEY ={SECRET}", "a space beside '='", False),
        (f"KEY= {SECRET}", "a space beside '='", False),
        (f"KEY: {SECRET}", "not KEY=VALUE", False),
        (f"KEY=two {SECRET}", "without quotes", True),
        (f"KEY='{SECRET}", "not closed", True),
        (f'KEY="{SECRET}', "not closed", True),
        (f'KEY="{SECRET}\\', "unknown escape", True),
        (f'KEY="{SECRET}\\q"', "unknown escape", True),
        (f"KEY='a'{SECRET}", "after the closing quote", True),
        (f"KEY='a' {SECRET}", "after the closing quote", True),
        (f"KEY='a'#{SECRET}", "after the closing quote", True),
        (f"KEY={SECRET}'", "without quotes", True),
        (f"KEY={SECRET}\\n", "without quotes", True),
        (f"KEY=`{SECRET}`", "without quotes", True),
        (f"KEY=#{SECRET}", "begins with #", True),
        (f"KEY='{SECRET}\x00'", "control character", True),
        (f"KEY='{SECRET}\x1b[0m'", "control character", True),
        (f"KEY={SECRET}" + "x" * MAX_VALUE, "longer than", True),
        (f"PATH={SECRET}", "where programs are found", True),
        (f"export LD_PRELOAD={SECRET}", "what code every program loads", True),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_bad_line_is_named_by_place_and_key_and_never_by_value(
    line: str, message: str, key_shown: bool
) -> None:
    with pytest.raises(PolicyError) as caught:
        values(f"GOOD=1\n{line}\n")
    text = caught.value.render()
    assert message in text
    assert "demo.env:2:1: " in text
    assert SECRET not in text
    assert "aHVudGVyMg" not in text
    key = line.removeprefix("export ").partition("=")[0].strip()
    assert (f"demo.env:2:1: {key}: " in text) is key_shown


def test_key_given_twice_is_an_error_with_both_lines() -> None:
    with pytest.raises(PolicyError, match=r"demo\.env:3:1: KEY: key given twice, first in line 1"):
        values("KEY=a\nB=1\nexport KEY=b\n")


def test_every_bad_line_is_reported() -> None:
    with pytest.raises(PolicyError) as caught:
        values("PATH=a\nx y\nKEY='\n")
    assert [line.split(":")[1] for line in caught.value.message.splitlines()[1:]] == ["1", "2", "3"]


@pytest.mark.parametrize(
    "key",
    [
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "PATH",
        "HOME",
        "BASH_ENV",
        "BASH_FUNC_x",
        "PYTHONPATH",
        "PYTHONSTARTUP",
        "NODE_OPTIONS",
        "NODE_EXTRA_CA_CERTS",
        "GIT_SSH_COMMAND",
        "GIT_CONFIG_COUNT",
        "GIT_CONFIG_KEY_0",
        "GIT_EXEC_PATH",
        "GIT_SSL_NO_VERIFY",
        "DOCKER_HOST",
        "DOCKER_CONFIG",
        "HTTP_PROXY",
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "NO_PROXY",
        "SSL_CERT_FILE",
        "RES_OPTIONS",
        "XDG_CONFIG_HOME",
        "CORRAL_SESSION",
        "TMPDIR",
        "npm_config_proxy",
    ],
)
def test_variable_that_changes_behaviour_is_refused(key: str) -> None:
    assert changes_behaviour(key)
    with pytest.raises(PolicyError, match="that is not a secret"):
        values(f"{key}=x")


@pytest.mark.parametrize(
    "key",
    [
        "OPENAI_API_KEY",
        "ANTHROPIC_API_KEY",
        "GITHUB_TOKEN",
        "GIT_TOKEN",
        "GIT_AUTHOR_NAME",
        "DATABASE_URL",
        "LANG",
    ],
)
def test_variable_that_only_carries_data_is_accepted(key: str) -> None:
    assert changes_behaviour(key) is None
    assert values(f"{key}=x") == {key: "x"}


def test_variable_that_the_profile_fixes_is_refused() -> None:
    reserved = profiles.get("opencode").env
    with pytest.raises(PolicyError, match="is set by the profile"):
        parse_env_file("OPENCODE_DISABLE_AUTOUPDATE=0", "demo.env", reserved)


def status(mode: int, uid: int) -> os.stat_result:
    return os.stat_result((mode, 1, 1, 1, uid, uid, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "uid", "message"),
    [
        (stat.S_IFREG | 0o600, 1000, None),
        (stat.S_IFREG | 0o400, 1000, None),
        (stat.S_IFREG | 0o600, 0, None),
        (stat.S_IFREG | 0o640, 1000, "mode 0640"),
        (stat.S_IFREG | 0o604, 1000, "mode 0604"),
        (stat.S_IFREG | 0o620, 1000, "mode 0620"),
        (stat.S_IFREG | 0o601, 1000, "mode 0601"),
        (stat.S_IFREG | 0o600, 1001, "belongs to uid 1001"),
        (stat.S_IFDIR | 0o700, 1000, "not a regular file"),
        (stat.S_IFIFO | 0o600, 1000, "not a regular file"),
    ],
)
def test_only_the_owner_may_read_the_file(mode: int, uid: int, message: str | None) -> None:
    if message is None:
        check_stat(status(mode, uid), "demo.env", 1000)
    else:
        with pytest.raises(PolicyError, match=message) as caught:
            check_stat(status(mode, uid), "demo.env", 1000)
        assert caught.value.hint


def test_file_is_read_when_it_is_private(tmp_path: Path) -> None:
    path = tmp_path / "demo.env"
    path.write_text("KEY=x\n")
    path.chmod(0o600)
    assert read_env_file(path, os.getuid()) == {"KEY": "x"}
    path.chmod(0o644)
    with pytest.raises(PolicyError) as caught:
        read_env_file(path, os.getuid())
    assert caught.value.hint == f"chmod 600 {path}"


def test_missing_fifo_and_binary_files_are_errors_and_nothing_waits(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="there is no"):
        read_env_file(tmp_path / "none.env", os.getuid())
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(PolicyError, match="not a regular file"):
        read_env_file(tmp_path / "fifo", os.getuid())
    binary = tmp_path / "binary"
    binary.touch(0o600)
    binary.write_bytes(b"A=1\nKEY=" + SECRET.encode() + b"\xff\n")
    with pytest.raises(PolicyError) as caught:
        read_env_file(binary, os.getuid())
    assert ":2:1: not UTF-8" in caught.value.message
    assert SECRET not in repr(caught.value.__cause__) + caught.value.render()


@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        parsed = values(text)
    except PolicyError as error:
        assert "demo.env" in error.message
    else:
        assert all("\0" not in value for value in parsed.values())


@given(st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=200))
def test_single_quotes_keep_every_value_as_it_is(value: str) -> None:
    if "'" not in value and "\u2028" not in value:
        assert values(f"KEY='{value}'") == {"KEY": value}
