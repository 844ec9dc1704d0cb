from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.agent_image.container import Container


@pytest.fixture
def container(tmp_path: Path) -> Container:
    root = tmp_path / "container"
    root.mkdir()
    return Container(root)
