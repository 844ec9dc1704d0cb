"""The one place of this package that runs a program."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence

from agent_image.builder import MISSING

# First: an activated environment of a project is on the user's PATH, too, and an agent may be at work there.
SYSTEM = ("/usr/local/bin", "/usr/bin", "/bin")


class SubprocessRunner:
    """The Runner that really runs (see ``builder.Runner``). An interrupt ends the program as well."""

    def run(self, argv: Sequence[str], env: Mapping[str, str], on_line: Callable[[str], None]) -> int:
        """Run ``argv``; the program is looked up in the system's directories, then in ``env``'s PATH."""
        # A relative place would be one in the project, where an agent writes.
        places = [place for place in env.get("PATH", os.defpath).split(os.pathsep) if place.startswith("/")]
        program = shutil.which(argv[0], path=os.pathsep.join((*SYSTEM, *places)))
        if program is None:
            return MISSING
        with subprocess.Popen(
            [program, *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env),
            text=True,
            encoding="utf-8",
            errors="replace",
        ) as process:
            assert process.stdout is not None  # noqa: S101 - stdout=PIPE
            try:
                for line in process.stdout:
                    on_line(line.rstrip("\n"))
            except BaseException:
                process.terminate()
                raise
        return process.returncode
