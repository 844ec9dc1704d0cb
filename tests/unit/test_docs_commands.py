"""What README and the pages tell to type is what the program takes, and the policies they show are policies."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from corral.sessioncommands import app
from policy.loader import LoadedPolicy, load
from policy.yamltree import parse as parse_yaml

ROOT = Path(__file__).parents[2]
# docs/cli.md is made from the commands themselves; the decisions say what was so when they were taken.
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in {"cli.md"}),
]
SHELL = {"", "sh", "bash", "console"}
# Words that stand for others, where what they stand for is looked at by the parser itself.
STAND_INS = {"COMMAND": "status", "CODE": "7"}
OPERATORS = set("();<>|&")


def fences(text: str) -> list[tuple[str, str]]:
    """Return (language, content) of the blocks of a page."""
    return [(found[1], found[2]) for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)]


def spans(text: str) -> list[str]:
    """Return what a page has in backquotes, on one line each; the blocks are left out."""
    prose = re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.M | re.S)
    return [" ".join(found.replace("\\|", "|").split()) for found in re.findall(r"`([^`]+)`", prose)]


def typed(line: str) -> Iterator[list[str]]:
    """Yield the words after each ``corral`` that a line of a shell runs."""
    # Comments by hand: within a word, as in a URL, # begins none.
    lexer = shlex.shlex(re.sub(r"(^|\s)#.*", "", line), posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words, begins = list(lexer), True
    for at, word in enumerate(words):
        if begins and word == "corral":
            rest = words[at + 1 :]
            end = next((number for number, one in enumerate(rest) if set(one) <= OPERATORS), len(rest))
            yield rest[:end]
        begins = set(word) <= OPERATORS or (begins and ("=" in word or word in {"sudo", "$"}))


def variants(words: list[str]) -> Iterator[list[str]]:
    """Yield what a line of a page stands for: brackets mean a part may be left out, | means one of them."""
    plain = [STAND_INS.get(bare, bare) for word in words if (bare := re.sub(r"[\[\]…]", "", word))]
    for at, word in enumerate(plain):
        # The command inside and what it is given are anything.
        if "|" in word and "--" not in plain[:at]:
            for one in word.split("|"):
                yield from variants([*plain[:at], one, *plain[at + 1 :]])
            return
    yield plain


@cache
def program() -> Any:
    return typer.main.get_command(app)


def parse(words: list[str], *, mention: bool) -> str | None:
    """Have the program's own parser read these words, and run nothing; return what it has against them.

    ``mention``: in a sentence a command may be named without what it wants: a value is missing, nothing is wrong.
    """
    command, name, rest, outer = program(), "corral", words, None
    try:
        while True:
            context = command.make_context(name, list(rest), parent=outer)
            left = [*getattr(context, "_protected_args", ()), *context.args]
            if not hasattr(command, "resolve_command") or not left:
                return None
            name, command, rest = command.resolve_command(context, left)
            outer = context
    except typer.Exit:
        return None
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            return None
        said = getattr(error, "format_message", lambda: None)()
        if said is None:
            raise
        if mention and (type(error).__name__ == "MissingParameter" or "requires an argument" in said):
            return None
        return str(said)


def blocks() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for language, content in fences(page.read_text()):
            if language in SHELL:
                yield from ((page.name, line) for line in content.replace("\\\n", " ").splitlines())


def mentions() -> Iterator[tuple[str, str]]:
    """Yield (page, words after corral) of each span of code that is a command, or one's words with an option."""
    for page in PAGES:
        for span in spans(page.read_text()):
            first, _, rest = span.partition(" ")
            if first == "corral" and rest:
                yield page.name, rest
            elif first in program().commands and rest.startswith("--"):
                yield page.name, span


def test_every_command_in_a_block_of_the_pages_is_one_that_the_program_takes() -> None:
    wrong = [
        (page, line, said)
        for page, line in blocks()
        if not line.lstrip().startswith("corral (")  # a drawing
        for words in typed(line)
        for variant in variants(words)
        if (said := parse(variant, mention=False)) is not None
    ]
    assert wrong == []
    assert sum(1 for _, line in blocks() for _ in typed(line)) > 12


def test_every_command_in_the_sentences_of_the_pages_is_one_that_the_program_takes() -> None:
    wrong = [
        (page, text, said)
        for page, text in mentions()
        for variant in variants(shlex.split(text))
        if (said := parse(variant, mention=True)) is not None
    ]
    assert wrong == []
    assert sum(1 for page, _ in mentions() if page == "README.md") >= 20
    assert sum(1 for _ in mentions()) > 150


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("corral frobnicate", "No such command"),
        ("corral policy frobnicate", "No such command"),
        ("corral run --detatch", "No such option"),
        ("corral status extra", "unexpected extra argument"),
        ("corral verify --explain", "requires an argument"),
        ("corral revert", "Missing argument"),
        ("cd x && FOO=1 corral down --purg", "No such option"),
        ("x=$(corral policy hsah)", "No such command"),
    ],
)
def test_what_the_program_does_not_take_is_found(line: str, said: str) -> None:
    (words,) = typed(line)
    assert said in str(parse(words, mention=False))


def test_a_page_is_taken_apart_as_it_is_meant() -> None:
    assert list(typed('corral a --b "c d" < x; corral e # corral f')) == [["a", "--b", "c d"], ["e"]]
    assert list(typed("git clone x/corral corral; pipx install corral")) == []
    assert list(variants(["completion", "bash|zsh"])) == [["completion", "bash"], ["completion", "zsh"]]
    assert list(variants(["run", "[--", "COMMAND…]"])) == [["run", "--", "status"]]
    assert spans("a `corral\nps` b\n```sh\n`x`\n```\n") == ["corral ps"]
    # An odd number of backquotes would turn a page inside out.
    for page in PAGES:
        prose = re.sub(r"^```\w*\n.*?^```$", "", page.read_text(), flags=re.M | re.S)
        assert prose.count("`") % 2 == 0, page


def test_every_target_of_make_on_the_pages_is_in_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    told = {
        (page.name, target)
        for page in PAGES
        for text in [
            *spans(page.read_text()),
            *(
                line
                for kind, content in fences(page.read_text())
                if kind in SHELL
                for line in content.splitlines()
            ),
        ]
        for target in re.findall(r"^make ([a-z][\w-]*)", text)
    }
    assert {"demo", "test", "lab"} <= {target for _, target in told}
    assert sorted(one for one in told if one[1] not in targets) == []


def policies() -> list[tuple[str, str]]:
    return [
        (page.name, content) for page in PAGES for kind, content in fences(page.read_text()) if kind == "yaml"
    ]


def loaded(home: Path, text: str) -> LoadedPolicy:
    """Load a policy in a home that has what it mounts."""
    project = home / "Projects" / "myproject"
    project.mkdir(parents=True)
    for paths in (parse_yaml(text).value.get("mounts") or {}).values():
        for path in paths:
            (home / path.removeprefix("~/")).mkdir(parents=True, exist_ok=True)
    (project / "corral.yaml").write_text(text)
    return load(project / "corral.yaml", home=home, environ={}, uid=os.getuid(), own=())


@pytest.mark.parametrize(("page", "text"), policies(), ids=lambda text: text if len(text) < 20 else "")
def test_every_policy_on_the_pages_is_one(tmp_path: Path, page: str, text: str) -> None:
    found = loaded(tmp_path, text)
    told = parse_yaml(text).value
    assert found.profile.name == told["profile"], page
    names = {one.host for one in found.declaration.names}
    for entry in (told.get("egress") or {}).get("allow") or ():
        assert (entry if isinstance(entry, str) else entry["host"]) in names, page
    # What is commented out is for somebody to take the # away.
    offered = re.sub(r"^( +)# (- )", r"\1\2", text, flags=re.M)
    if offered != text:
        loaded(tmp_path / "offered", offered)


def test_the_policies_are_those_of_readme_profiles_and_sessions() -> None:
    assert {"README.md", "profiles.md", "sessions.md"} <= {page for page, _ in policies()}
