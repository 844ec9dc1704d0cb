"""The reference of the command line, once: docs/cli.md and the manual pages. Pure but for main.

python -m corral.clireference      write docs/cli.md and docs/man/ anew
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral import __version__

PAGE = Path("docs/cli.md")
COMMANDS = Path("docs/man/corral.1")
POLICY = Path("docs/man/corral.yaml.5")

EXIT_CODES = (
    ("0", "succeeded"),
    ("1", "the operation failed or was refused; verify: a check failed"),
    ("2", "the policy or the arguments are invalid; nothing was created"),
    ("other", "run and shell pass on the exit code of what ran inside"),
)
ANSWERS = (
    "With --json a command prints one object; corral logs and corral denied --follow print one on each line. "
    "Its first field, schema, is a number: within it fields are only added. Everything else is on stderr. A "
    "command that fails prints no answer. The fields of each command: docs/json.md in corral's sources."
)
FILES = (
    ("corral.yaml", "the policy, in the project's directory; found from the directories below it"),
    ("~/.config/corral/enforcer.toml", "settings of the host service"),
    ("~/.local/share/corral", "approved policies and state of sandboxes; cannot be mounted"),
)
ENVIRONMENT = (
    ("CORRAL_DEBUG", "set to anything: the same as --verbose"),
    ("CORRAL_DETACH_KEYS", "keys that leave a session running, where --detach-keys does not say it"),
    ("CORRAL_SANDBOX_IMAGE", "image: of the policy, for this command; it has to be approved like the file's"),
    ("CORRAL_SESSION_ID", "is set inside a session: its name, or its id when it has none"),
    ("DOCKER_HOST, DOCKER_CONTEXT", "the engine; one that is not on this machine is refused"),
    ("DOCKER_CONFIG", "where Docker's contexts and proxies are configured; default ~/.docker"),
    ("DOCKER_BUILDKIT", "0: images are built by the engine's older builder"),
    ("NO_COLOR", "set to anything: no colours"),
    ("COLUMNS", "how wide lines about progress are, where that is less than the terminal is"),
    ("TERM, COLORTERM", "which colours are written, and what a session's terminal is"),
    ("LANG, LC_ALL, TZ", "language, and time zone, of what runs in a session"),
    ("HOME, PATH", "your home directory, and where programs are found"),
    ("XDG_CONFIG_HOME", "instead of ~/.config"),
    ("XDG_DATA_HOME", "instead of ~/.local/share: approved policies and state of sandboxes"),
    ("XDG_RUNTIME_DIR", "instead of /run/user/UID: the socket of the host service, and of rootless Docker"),
    ("GIT_CONFIG_GLOBAL, GIT_CONFIG_SYSTEM", "Git's configuration that a session must not change unseen"),
    (
        "http_proxy, https_proxy, no_proxy",
        "proxies of a build, also in capitals; build.proxy of the policy goes first",
    ),
    (
        "PIP_CONFIG_FILE, PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, npm_config_*",
        "registries and mirrors of this machine, for builds and egress.from_host",
    ),
    (
        "NODE_EXTRA_CA_CERTS, SSL_CERT_FILE, REQUESTS_CA_BUNDLE, CURL_CA_BUNDLE, PIP_CERT, GIT_SSL_CAINFO",
        "certificates of authorities that this machine trusts; images get them too",
    ),
)


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    ``usage``: what follows the program's name. ``help``: paragraphs, with line ends where they must stay.
    ``rows``: (argument or option, meaning).
    """

    path: str
    usage: str
    help: tuple[str, ...]
    rows: tuple[tuple[str, str], ...]


def commands(root: Any, prefix: str = "corral") -> Iterator[Command]:
    """Yield every command that is shown in the help, groups before what they hold.

    ``root``: what typer.main.get_command returns. Its classes are Click's, or typer's copy of them.
    """
    import typer

    from corral.parser import record

    context = typer.Context(root, info_name=prefix)
    rows = [row for one in root.get_params(context) if (row := record(one, context)) is not None]
    # Every command has them; they are told once.
    left_out = ("--help",) if prefix == "corral" else ("--help", "--verbose")
    words = " ".join(piece for piece in root.collect_usage_pieces(context) if piece)
    paragraphs = re.split(r"\n\s*\n", (root.help or "").strip())
    yield Command(
        prefix,
        words,
        tuple(_paragraph(text) for text in paragraphs if text.strip()),
        tuple(row for row in rows if not row[0].endswith(left_out)),
    )
    if hasattr(root, "list_commands"):
        for name in root.list_commands(context):
            below = root.get_command(context, name)
            if below is not None and not below.hidden:
                yield from commands(below, f"{prefix} {name}")


def _paragraph(text: str) -> str:
    if "\b" in text:  # left as it is by Click
        return "\n".join(line.strip() for line in text.replace("\b", "").splitlines() if line.strip())
    return " ".join(text.split())


def markdown(found: Sequence[Command]) -> str:
    """Return docs/cli.md."""
    lines = [
        "# Commands",
        "",
        "<!-- made by python -m corral.clireference -->",
        "",
        "What `corral COMMAND --help` says, for all of them. "
        "Every command works without a terminal, and takes `-v`. "
        "What `--json` prints is described in [json.md](json.md).",
        "",
    ]
    for command in found:
        lines += [f"## {command.path}", "", "```", f"{command.path} {command.usage}".rstrip(), "```", ""]
        for paragraph in command.help:
            lines += [paragraph.replace("\n", "  \n"), ""]
        if command.rows:
            lines += ["| | |", "|---|---|"]
            lines += [f"| `{_cell(name)}` | {_cell(meaning)} |" for name, meaning in command.rows]
            lines.append("")
    lines += ["## Exit codes", "", "| code | meaning |", "|---|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES]
    lines += ["", "## Environment", "", "| variable | meaning |", "|---|---|"]
    lines += [f"| `{_cell(name)}` | {_cell(meaning)} |" for name, meaning in ENVIRONMENT]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def manual(found: Sequence[Command]) -> str:
    """Return the manual page corral(1), in man's own macros."""
    lines = [
        _title("CORRAL", 1),
        ".SH NAME",
        roff("corral - run AI coding agents in containers, inside a fence you can prove"),
        ".SH SYNOPSIS",
        ".B corral",
        roff("[OPTIONS] COMMAND [ARGS]..."),
        ".SH DESCRIPTION",
        roff("One file,"),
        ".BR corral.yaml (5),",
        roff(
            "says which paths, names, host services and secrets an agent may touch. A service on the host "
            "makes the network part true in the kernel; the container holds no capability at all."
        ),
        ".SH COMMANDS",
    ]
    for command in found:
        lines += [".SS " + roff(command.path), f".B {roff(command.path)}", roff(command.usage)]
        for paragraph in command.help:
            lines += [".PP", *"\n.br\n".join(roff(line) for line in paragraph.split("\n")).split("\n")]
        lines += _tagged(command.rows)
    lines += [".SH EXIT STATUS", *_tagged(EXIT_CODES)]
    lines += [".SH ANSWERS FOR PROGRAMS", roff(ANSWERS)]
    lines += [".SH ENVIRONMENT", *_tagged(ENVIRONMENT)]
    lines += [".SH FILES", *_tagged(FILES)]
    lines += [".SH SEE ALSO", ".BR corral.yaml (5),", ".BR docker (1)"]
    return "\n".join(line for line in lines if line) + "\n"


def policy_manual(
    meaning: Sequence[tuple[str, str]], entries: Sequence[tuple[str, str]], example: str
) -> str:
    """Return the manual page corral.yaml(5): keys, their meaning, what may be allowed, and an example."""
    lines = [
        _title("CORRAL.YAML", 5),
        ".SH NAME",
        roff("corral.yaml - what an agent may touch"),
        ".SH DESCRIPTION",
        roff(
            "What is not listed is denied. Unknown keys, duplicate keys, anchors, aliases and tags are "
            "errors; all problems are told at once, with file, line and column. A policy that allows more "
            "than its user approved starts nothing."
        ),
        ".SH KEYS",
        *_tagged(tuple((key, text.replace("`", "")) for key, text in meaning)),
        ".SH ENTRIES OF EGRESS.ALLOW",
        *_tagged(entries),
        ".SH EXAMPLE",
        ".nf",
        *(roff(line) if line else ".sp" for line in example.rstrip("\n").split("\n")),
        ".fi",
        ".SH SEE ALSO",
        ".BR corral (1)",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _title(name: str, section: int) -> str:
    return f'.TH {name} {section} "" "corral {__version__}" "corral"'


def _tagged(rows: Sequence[tuple[str, str]]) -> list[str]:
    return [line for name, meaning in rows for line in (".TP", f".B {roff(name)}", roff(meaning))]


def roff(text: str) -> str:
    """Return text as man reads it: nothing in it is a request or an escape."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    for char, name in (("…", "\\&..."), ("→", "->"), ("≥", ">="), ("≤", "<=")):
        escaped = escaped.replace(char, name)
    return f"\\&{escaped}" if escaped[:1] in {".", "'"} else escaped


def pages() -> dict[Path, str]:
    """Return what each file holds today."""
    import typer

    from corral.sessioncommands import app
    from policy import init, reference

    found = list(commands(typer.main.get_command(app)))
    told = [
        tuple(cell.strip(" `") for cell in line.split("|")[1:3]) for line in reference.table().split("\n")[2:]
    ]
    example = init.starter("opencode", "myproject")
    return {
        PAGE: markdown(found),
        COMMANDS: manual(found),
        POLICY: policy_manual([(key, text) for key, text in told], reference.ENTRIES, example),
    }


def main() -> None:
    """Write the pages anew."""
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
