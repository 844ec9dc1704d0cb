"""The environment variables that the pages tell of are those that the program reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral import clireference, units
from corral.session import SESSION_VARIABLE
from policy.hostclient import CA_VARIABLES

ROOT = Path(__file__).parents[3]
# What runs in the container is no part of the program on the host, and of the service it has what it imports.
OURS = [
    *(ROOT / "corral").rglob("*.py"),
    *(ROOT / "policy").rglob("*.py"),
    *(ROOT / "agent_image").glob("*.py"),
    *(ROOT / "enforcer" / name for name in ("client.py", "config.py", "rootless.py")),
]
# A program of systemd's gets it from systemd; no user sets it.
NOT_THE_USERS = {"NOTIFY_SOCKET"}
# Names that are not in the source, by what they are read for.
DYNAMIC = {
    ("corral/variables.py", "name"): "run -e NAME: whatever its user names",
    ("corral/carried.py", "variable"): "XDG_DATA_HOME, XDG_CONFIG_HOME",
    ("corral/units.py", "name"): "units.KEPT",
    ("policy/clientfiles.py", "match[1]"): "whatever an .npmrc names",
    ("policy/hostclient.py", "variable"): "CA_VARIABLES",
    ("policy/hostclient.py", "name"): "http_proxy, https_proxy, no_proxy",
    ("policy/hostclient.py", "name.upper()"): "the same in capitals",
}


def constants() -> dict[str, str]:
    """Return the texts that modules have as constants."""
    found: dict[str, str] = {}
    for file in OURS:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                for target in node.targets:
                    if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                        found[f"{file}:{target.id}"] = node.value.value
                        found.setdefault(target.id, node.value.value)
    return found


def is_environment(node: ast.expr) -> bool:
    return ast.unparse(node).split(".")[-1] in {"environ", "_environ"}


def keys(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield what an environment is asked for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "get" and is_environment(node.func.value):
                yield node.args[0]
        elif isinstance(node, ast.Subscript):
            if isinstance(node.ctx, ast.Load) and is_environment(node.value):
                yield node.slice
        elif (
            isinstance(node, ast.Compare)
            and isinstance(node.ops[0], ast.In | ast.NotIn)
            and is_environment(node.comparators[0])
        ):
            yield node.left


def read() -> tuple[set[str], set[tuple[str, str]]]:
    """Return the names that are read, and (file, expression) of those that are not in the source."""
    known, names, dynamic = constants(), set(), set()
    for file in OURS:
        for key in keys(ast.parse(file.read_text())):
            if isinstance(key, ast.Constant):
                names.add(str(key.value))
            elif isinstance(key, ast.Name) and key.id.isupper():
                names.add(known.get(f"{file}:{key.id}") or known[key.id])
            else:
                dynamic.add((str(file.relative_to(ROOT)), ast.unparse(key)))
    return names, dynamic


def told() -> set[str]:
    return {name for names, _ in clireference.ENVIRONMENT for name in names.split(", ")}


def test_every_variable_that_is_read_is_told_and_none_that_is_not() -> None:
    names, _ = read()
    assert {"CORRAL_DETACH_KEYS", "CORRAL_SANDBOX_IMAGE", "XDG_DATA_HOME", "DOCKER_HOST"} <= names
    by_rule = {"http_proxy", "https_proxy", "no_proxy", "npm_config_*"}
    assert told() - by_rule - {SESSION_VARIABLE} == (names | {*CA_VARIABLES, *units.KEPT}) - NOT_THE_USERS


def test_variables_whose_names_are_not_in_the_source_are_known() -> None:
    _, dynamic = read()
    assert dynamic == set(DYNAMIC)


@pytest.mark.parametrize("page", [clireference.PAGE, clireference.COMMANDS], ids=str)
def test_both_pages_tell_of_all_of_them(page: Path) -> None:
    text = clireference.pages()[page]
    for name in told():
        assert re.search(rf"(?<![A-Z_]){re.escape(name)}(?![A-Z_])", text.replace("\\", "")), name
