"""Packs a package of agent_image/files into one executable file: one thing for root to own and to check."""

from __future__ import annotations

import functools
import io
import zipfile
from importlib import resources

# -I: no environment variable and no directory of the agent's has a say; -S: neither has dist-packages.
INTERPRETER = b"#!/usr/bin/python3 -IS\n"
EPOCH = (1980, 1, 1, 0, 0, 0)


@functools.cache
def executable(package: str) -> bytes:
    """Return an executable zip of ``agent_image.files.<package>`` that calls its ``main.main()``.

    Equal sources give equal bytes.
    """
    root = resources.files("agent_image.files").joinpath(package)
    members = {"__main__.py": f"from {package}.main import main\n\nmain()\n".encode()}
    for entry in root.iterdir():
        if entry.name.endswith(".py"):
            members[f"{package}/{entry.name}"] = entry.read_bytes()
    buffer = io.BytesIO()
    buffer.write(INTERPRETER)
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(members):
            information = zipfile.ZipInfo(name, EPOCH)
            information.create_system = 3  # Unix, wherever this runs
            information.external_attr = 0o100644 << 16
            archive.writestr(information, members[name])
    return buffer.getvalue()
