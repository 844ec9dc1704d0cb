"""The model server as a service of the lab's box, and what it heard."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab import Box

PORT = 8090
FINAL = "All steps are done."


@dataclass
class Model:
    """A running server."""

    box: Box
    log: str

    def requests(self) -> list[dict[str, Any]]:
        """Return what was asked: {"method", "path", "protocol", "tools", "results", "accepted"} each."""
        return [json.loads(line) for line in self.box.read(self.log).splitlines()]


@contextmanager
def serving(
    box: Box, commands: Sequence[str], *, key: str = "", plain: str = "", port: int = PORT
) -> Iterator[Model]:
    """Run the server on the box's loopback; see ``tests.models.server`` for what it says."""
    directory = f"{box.home}/model-{port}"
    script = {"commands": list(commands), "final": FINAL, "key": key, "plain": plain}
    box.write(f"{directory}/server.py", (Path(__file__).parent / "server.py").read_text())
    box.write(f"{directory}/script.json", json.dumps(script))
    box.run(["rm", "-f", f"{directory}/log"])
    process: subprocess.Popen[Any] = box.popen(
        ["python3", f"{directory}/server.py", str(port), f"{directory}/script.json", f"{directory}/log"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield Model(box, f"{directory}/log")
    finally:
        box.kill(process)
