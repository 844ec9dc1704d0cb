"""What the pages say of tests is so: each test they name exists, each fault has its row, each case its test."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
CASES = {*range(1, 20), *range(21, 28)}


@cache
def marks(path: Path) -> dict[str, dict[str, set[object]]]:
    """Return test -> mark -> the first arguments it is marked with, of one file; one of its parameters counts."""
    found: dict[str, dict[str, set[object]]] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            mine = found.setdefault(node.name, {})
            for call in (inner for decorator in node.decorator_list for inner in ast.walk(decorator)):
                if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args):
                    continue
                if isinstance(call.args[0], ast.Constant):
                    mine.setdefault(call.func.attr, set()).add(call.args[0].value)
    return found


def rows() -> list[tuple[str, str, str]]:
    """Return (fault, file, test) of each row of the fault table."""
    text = (ROOT / "docs" / "faults.md").read_text()
    found = re.findall(r"^\| ([^|]+?) \| `([^`]+)::(\w+)` \| [^|]+ \|$", text, re.MULTILINE)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(found) == len(lines) - 1, "a row without exactly one test and what is measured"
    return found


@pytest.mark.parametrize("page", ["faults.md", "threat-model.md"])
def test_every_test_that_a_page_names_exists(page: str) -> None:
    named = NAMED.findall((ROOT / "docs" / page).read_text())
    assert len(named) > 20
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (ROOT / file).is_file() or test not in marks(ROOT / file)
    ]
    assert missing == []


def test_every_mention_of_a_test_on_these_pages_is_looked_up() -> None:
    for page in ("faults.md", "threat-model.md"):
        text = (ROOT / "docs" / page).read_text()
        assert text.count("::") == len(NAMED.findall(text)), page


@pytest.mark.parametrize(("fault", "file", "test"), rows(), ids=lambda value: value if " " in value else "")
def test_every_row_of_the_fault_table_is_marked_at_its_test(fault: str, file: str, test: str) -> None:
    assert fault in marks(ROOT / file)[test].get("fault", set())


def test_every_fault_of_the_fault_tests_has_a_row() -> None:
    listed = {fault for fault, _, _ in rows()}
    files = [*ROOT.glob("tests/system/test_fault*.py"), *ROOT.glob("tests/system/test_cases*.py")]
    files.append(ROOT / "tests" / "system" / "test_reboot.py")
    shown = {
        str(name) for file in files for test in marks(file).values() for name in test.get("fault", set())
    }
    assert shown - listed == set()


def test_every_field_case_of_the_fence_is_shown_by_a_test() -> None:
    files = [*ROOT.glob("tests/system/test_*.py"), *ROOT.glob("tests/contract/test_*.py")]
    shown = {number for file in files for test in marks(file).values() for number in test.get("case", set())}
    assert CASES - shown == set()
