"""Linters are tests: what they find fails the build like anything else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"], ["lint-imports"]],
    ids=lambda words: "-".join(words[:2]),
)
def test_the_linter_finds_nothing(command: list[str]) -> None:
    done = subprocess.run(
        [BIN / command[0], *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# What the product refuses or uses, and what documentation is made of.
KNOWN = re.compile(
    r"^(0\.|10\.|127\.|100\.(6[4-9]|[7-9]\d|1[01]\d|12[0-7])\.|100\.100\.100\.200|168\.63\.129\.16|169\.254\.|172\.(1[6-9]|2\d|3[01])\."
    r"|128\.0\.0\.0$|192\.(0\.[02]|88\.99|168)\.|198\.(1[89]|51\.100)\.|203\.0\.113\.|2(2[4-9]|[34]\d|5[0-5])\.)"
)
ADDRESS = re.compile(r"(?<![\w.\-])(\d{1,3}(?:\.\d{1,3}){3})(?![\w.])")


def test_no_address_outside_the_documentation_ranges_is_in_the_tree() -> None:
    found = []
    for path in tracked():
        if path.suffix == ".lock" or path.name == "host-vectors.json" or "tests" in path.parts:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            for address in ADDRESS.findall(line):
                if all(int(part) < 256 for part in address.split(".")) and not KNOWN.match(address):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {address}")
    assert not found


def test_no_path_of_this_machine_is_in_the_tree() -> None:
    needle = str(ROOT) + "/"
    found = [p for p in tracked() if needle in p.read_text(encoding="utf-8", errors="replace")]
    assert not found


def test_no_module_grows_past_a_second_idea() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in tracked()
        if path.suffix == ".py" and "tests" not in path.parts
        if (count := len(path.read_text().splitlines())) > 500
    }
    assert not long
