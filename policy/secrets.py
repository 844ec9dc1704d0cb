"""The env_file of a policy: KEY=VALUE lines whose values become environment of the sandbox.

One line, one variable::

    # a comment
    export OPENAI_API_KEY=sk-...        # an inline comment needs a space before it
    GREETING="two words, \\n and \\" escaped"
    LITERAL='nothing is special here'

Nothing is expanded. Messages name the file, the line and the key, never a value.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from policy.errors import PolicyError
from policy.problems import Problem, to_error

MAX_SIZE = 262144
MAX_VALUE = 65536  # well below what one execve() argument can hold

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LINE = re.compile(r"(?:export[ \t]+)?([^=\s]*)(\s*)=(.*)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "$": "$", "`": "`"}

# Variables that change what programs do instead of telling them a secret. A sandbox sets these itself where
# it needs them; a secrets file that sets one is a mistake or an attack.
BEHAVIOUR = {
    # Which code is loaded or executed.
    "PATH": "where programs are found",
    "HOME": "where programs keep their files",
    "SHELL": "which shell runs",
    "USER": "who programs think they run as",
    "LOGNAME": "who programs think they run as",
    "PWD": "the working directory",
    "ENV": "what a shell executes first",
    "BASH_ENV": "what a shell executes first",
    "PROMPT_COMMAND": "what a shell executes",
    "PS4": "what a shell executes",
    "SHELLOPTS": "how a shell behaves",
    "BASHOPTS": "how a shell behaves",
    "IFS": "how a shell behaves",
    "CDPATH": "how a shell behaves",
    "GLOBIGNORE": "how a shell behaves",
    "ZDOTDIR": "what a shell executes first",
    "EDITOR": "which program is executed",
    "VISUAL": "which program is executed",
    "PAGER": "which program is executed",
    "MANPAGER": "which program is executed",
    "BROWSER": "which program is executed",
    "LESSOPEN": "which program is executed",
    "LESSCLOSE": "which program is executed",
    "SUDO_ASKPASS": "which program is executed",
    "SSH_ASKPASS": "which program is executed",
    "SSH_AUTH_SOCK": "which SSH agent is used",
    "NODE_OPTIONS": "what code Node.js loads",
    "NODE_PATH": "what code Node.js loads",
    "BUN_OPTIONS": "what code Bun loads",
    "PERL5LIB": "what code Perl loads",
    "PERL5OPT": "what code Perl loads",
    "PERL5DB": "what code Perl loads",
    "RUBYLIB": "what code Ruby loads",
    "RUBYOPT": "what code Ruby loads",
    "LUA_PATH": "what code Lua loads",
    "LUA_CPATH": "what code Lua loads",
    "LUA_INIT": "what code Lua loads",
    "CLASSPATH": "what code Java loads",
    "JAVA_TOOL_OPTIONS": "what code Java loads",
    "_JAVA_OPTIONS": "what code Java loads",
    "JDK_JAVA_OPTIONS": "what code Java loads",
    "MAVEN_OPTS": "what code Java loads",
    "GRADLE_OPTS": "what code Java loads",
    "DOTNET_STARTUP_HOOKS": "what code .NET loads",
    "RUSTC_WRAPPER": "which program is executed",
    "GCONV_PATH": "what code the C library loads",
    "LOCPATH": "what the C library loads",
    "NLSPATH": "what the C library loads",
    "GETCONF_DIR": "what the C library executes",
    "TMPDIR": "where temporary files go",
    "BUN_TMPDIR": "where temporary files go",
    # How names are resolved and where traffic goes.
    "HOSTALIASES": "how names are resolved",
    "LOCALDOMAIN": "how names are resolved",
    "RES_OPTIONS": "how names are resolved",
    "RESOLV_HOST_CONF": "how names are resolved",
    "HTTP_PROXY": "where traffic goes",
    "HTTPS_PROXY": "where traffic goes",
    "FTP_PROXY": "where traffic goes",
    "ALL_PROXY": "where traffic goes",
    "SOCKS_PROXY": "where traffic goes",
    "NO_PROXY": "where traffic goes",
    "NODE_USE_ENV_PROXY": "where traffic goes",
    "NPM_CONFIG_PROXY": "where traffic goes",
    "NPM_CONFIG_HTTPS_PROXY": "where traffic goes",
    "CONTAINER_HOST": "which container engine is used",
    # Whom TLS trusts.
    "SSL_CERT_FILE": "whom TLS trusts",
    "SSL_CERT_DIR": "whom TLS trusts",
    "REQUESTS_CA_BUNDLE": "whom TLS trusts",
    "CURL_CA_BUNDLE": "whom TLS trusts",
    "AWS_CA_BUNDLE": "whom TLS trusts",
    "NODE_EXTRA_CA_CERTS": "whom TLS trusts",
    "NODE_TLS_REJECT_UNAUTHORIZED": "whom TLS trusts",
    "PYTHONHTTPSVERIFY": "whom TLS trusts",
    "CODEX_CA_CERTIFICATE": "whom TLS trusts",
    "HERMES_CA_BUNDLE": "whom TLS trusts",
    "SSLKEYLOGFILE": "where TLS keys are written",
    "OPENSSL_CONF": "how TLS works",
    "OPENSSL_MODULES": "what code OpenSSL loads",
}
PREFIXES = {
    "LD_": "what code every program loads",
    "DYLD_": "what code every program loads",
    "GLIBC_": "how the C library works",
    "MALLOC_": "how the C library works",
    "BASH_FUNC_": "what a shell executes",
    "PYTHON": "what code Python loads",
    "DOCKER_": "which container engine is used",
    "XDG_": "where programs keep their files",
    "CORRAL_": "how corral works",
    "GIT_CONFIG": "what Git executes",
    "HERMES_MANAGED_": "what configuration rules the harness",
}
# Git runs what these name; GIT_AUTHOR_NAME and the like are harmless.
_GIT = re.compile(
    r"GIT_(SSH(_COMMAND|_VARIANT)?|ASKPASS|EXEC_PATH|EXTERNAL_DIFF|PAGER|EDITOR|SEQUENCE_EDITOR|PROXY_COMMAND"
    r"|TEMPLATE_DIR|DIR|WORK_TREE|INDEX_FILE|OBJECT_DIRECTORY|ALTERNATE_OBJECT_DIRECTORIES|SSL_.*|TRACE.*"
    r"|ALLOW_PROTOCOL|ATTR_.*)"
)


def changes_behaviour(key: str) -> str | None:
    """Return what a variable of this name changes, or None when it only carries data."""
    upper = key.upper()
    if upper in BEHAVIOUR:
        return BEHAVIOUR[upper]
    if _GIT.fullmatch(upper):
        return "what Git executes"
    return next((what for prefix, what in PREFIXES.items() if upper.startswith(prefix)), None)


class _BadLine(ValueError):
    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix


def parse_env_file(text: str, file: str, reserved: Iterable[str] = ()) -> dict[str, str]:
    """Parse the text of an env_file.

    Args:
        text: the whole file.
        file: its path, for messages.
        reserved: further keys that must not be set, such as those a profile fixes.

    Raises:
        PolicyError: with every problem, each as ``file:line:column: key: what; fix``.
    """
    values: dict[str, str] = {}
    first: dict[str, int] = {}
    problems: list[Problem] = []
    taken = frozenset(reserved)
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        stripped = line.removesuffix("\r").strip(" \t")
        if not stripped or stripped.startswith("#"):
            continue
        key = ""
        try:
            key, rest = _split(stripped)
            _check_key(key, taken)
            if key in first:
                raise _BadLine(f"key given twice, first in line {first[key]}", "keep one of them")
            first[key] = number
            values[key] = _value(rest)
        except _BadLine as error:
            at = (key,) if key else ()
            problems.append(Problem(at, error.what, fix=error.fix, line=number, column=1))
    if problems:
        raise to_error(file, problems)
    return values


def _split(line: str) -> tuple[str, str]:
    # Whatever is not clearly a key may be a piece of a secret, and stays out of the message.
    match = _LINE.fullmatch(line)
    # The end of base64 looks like a key with '=' for a value.
    if match is None or match[3] == "=":
        raise _BadLine("not KEY=VALUE", "write KEY=VALUE, or put # before a comment")
    key, space, rest = match.groups()
    if not _KEY.fullmatch(key):
        raise _BadLine("what stands before '=' is not a variable name", "use letters, digits and '_'")
    if space or rest[:1] in {" ", "\t"}:
        raise _BadLine("a space beside '='", "write KEY=VALUE without spaces around '='")
    return key, rest


def _check_key(key: str, reserved: frozenset[str]) -> None:
    what = changes_behaviour(key)
    if what is not None:
        raise _BadLine(f"sets {what}; that is not a secret", f"remove {key}")
    if key in reserved:
        raise _BadLine("is set by the profile", f"remove {key}")


def _value(text: str) -> str:
    if any(
        char == "\0" or (ord(char) < 32 and char != "\t") or "\ud800" <= char <= "\udfff" for char in text
    ):
        raise _BadLine(
            "a control character in the value", 'write it as an escape in double quotes, such as "\\n"'
        )
    if text[:1] == "'":
        body, closed, tail = text[1:].partition("'")
        value = body
    elif text[:1] == '"':
        value, closed, tail = _double_quoted(text[1:])
    else:
        return _checked(_unquoted(text))
    if not closed:
        raise _BadLine("a quote that is not closed on the line", "close it; a line break is written \\n")
    if tail.strip(" \t") and not re.match(r"[ \t]+#", tail):
        raise _BadLine("text after the closing quote", "quote the whole value")
    return _checked(value)


def _double_quoted(text: str) -> tuple[str, str, str]:
    """Return the value, the closing quote or nothing, and what follows it."""
    value: list[str] = []
    position = 0
    while position < len(text):
        char = text[position]
        if char == '"':
            return "".join(value), '"', text[position + 1 :]
        if char == "\\":
            position += 1
            escape = text[position : position + 1]
            if escape not in _ESCAPES:
                raise _BadLine(
                    "an unknown escape after a backslash", "double the backslash or use single quotes"
                )
            char = _ESCAPES[escape]
        value.append(char)
        position += 1
    return "", "", ""


def _unquoted(text: str) -> str:
    value = re.split(r"[ \t]+#", text, maxsplit=1)[0].rstrip(" \t")
    if text.startswith("#"):
        raise _BadLine("a value that begins with #", "quote the value")
    if re.search(r"[\s'\"\\`]", value):
        raise _BadLine(
            "a space, quote or backslash in a value without quotes", "put the value in single quotes"
        )
    return value


def _checked(value: str) -> str:
    if len(value.encode("utf-8")) > MAX_VALUE:
        raise _BadLine(f"a value longer than {MAX_VALUE} bytes", "shorten it")
    return value


def check_stat(status: os.stat_result, file: str, uid: int) -> None:
    """Check that only its owner can read an env_file.

    Raises:
        PolicyError: not a regular file, not owned by ``uid`` or root, or open to group or others.
    """
    if not stat.S_ISREG(status.st_mode):
        raise PolicyError(f"{file} is not a regular file", "name a file of KEY=VALUE lines")
    if status.st_uid not in {uid, 0}:
        raise PolicyError(
            f"{file} belongs to uid {status.st_uid}, not to you", f"read it, then: sudo chown {uid} {file}"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise PolicyError(f"others than you may read or write {file} (mode {mode:04o})", f"chmod 600 {file}")


def read_env_file(path: Path, uid: int, reserved: Iterable[str] = ()) -> Mapping[str, str]:
    """Read, check and parse an env_file; the open file is checked, so it cannot be exchanged in between.

    Raises:
        PolicyError: missing, unreadable, or anything `check_stat` and `parse_env_file` refuse.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as stream:
            check_stat(os.fstat(stream.fileno()), str(path), uid)
            raw = stream.read(MAX_SIZE + 1)
    except FileNotFoundError as error:
        fix = f"install -D -m 600 /dev/null {path}, then write KEY=VALUE lines into it"
        raise PolicyError(f"secrets.env_file: there is no {path}", fix) from error
    except OSError as error:
        raise PolicyError(f"secrets.env_file: cannot read {path}: {error.strerror}") from error
    if len(raw) > MAX_SIZE:
        raise PolicyError(f"{path} is larger than {MAX_SIZE} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise to_error(
            str(path), [Problem((), "not UTF-8 text", fix="save it as UTF-8", line=line)]
        ) from None
    return parse_env_file(text, str(path), reserved)
