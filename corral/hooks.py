"""``hooks.pre_launch``: a program of the user's that runs on this host before a session, such as a backup."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from corral import process
from policy.errors import CorralError
from policy.loader import LoadedPolicy

TIMEOUT = 600.0


def environment(environ: Mapping[str, str], loaded: LoadedPolicy, session: str) -> dict[str, str]:
    """Return the user's environment, and what the program is run for."""
    return {
        **environ,
        "CORRAL_PROJECT": str(loaded.project),
        "CORRAL_SANDBOX": loaded.sandbox.id,
        "CORRAL_SESSION_ID": session,
    }


def pre_launch(loaded: LoadedPolicy, *, environ: Mapping[str, str], home: Path, session: str) -> None:
    """Run the hook to its end, if there is one.

    It runs in the home directory and not in the project, where an agent may have left a file that a program
    reads first.

    Raises:
        CorralError: it failed or took too long; no session must start.
    """
    argv = loaded.policy.hooks.pre_launch
    if not argv:
        return
    try:
        process.run(argv, environ=environment(environ, loaded, session), cwd=home, timeout=TIMEOUT)
    except process.ProgramError as error:
        raise CorralError(
            f"hooks.pre_launch: {error.message}", "nothing was started; see what the program needs"
        ) from error
