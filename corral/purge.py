"""``corral down --purge``: after containers and network, what else a sandbox has on this host goes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from corral import inventory, trees, units
from corral.context import Invocation
from corral.down import chosen as chosen_sandbox
from corral.down import down, of_directory, report
from corral.process import ProgramError
from policy import holding
from policy.errors import CorralError
from policy.identity import Sandbox, StatePaths

# How long a command may take whose session was ended.
PATIENCE, PAUSE = 15.0, 0.1
WHAT = (
    "what its harness remembers, its approval, its workspace, its sessions, its image and the files it is "
    "built from"
)


def purge(
    invocation: Invocation,
    given: str | None,
    *,
    ask: Callable[[str], bool] | None,
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """End everything of this directory's sandboxes and remove all of it; return what was removed.

    Args:
        invocation: who and where.
        given: id of the only sandbox, from whatever directory.
        ask: asked before anything is done; None: it is agreed.
        tell: gets what ``corral down`` says.
        clock, sleep: seconds, monotonic.

    Raises:
        CorralError: it was not agreed, somebody works with it, or something could not be removed.
        PolicyError, EngineError: see ``down.down``.
    """
    sandboxes = [chosen_sandbox(given)] if given is not None else of_directory(invocation)
    there = [one for one in sandboxes if os.path.lexists(invocation.data / one.id)]
    if ask is not None:
        names = ", ".join(one.id for one in sandboxes)
        if not ask(f"remove {names} for good: {WHAT}?"):
            raise CorralError("nothing was removed")
    tell(report(down(invocation, given)))
    for sandbox in sandboxes:
        _disable(invocation, sandbox)
    removed = [name for sandbox in sandboxes for name in _images(invocation, sandbox, tell)]
    for sandbox in there:
        removed.append(str(_state(invocation.data / sandbox.id, clock, sleep)))
    return removed


def _disable(invocation: Invocation, sandbox: Sandbox) -> None:
    """A unit would make it again at the next boot."""
    with contextlib.suppress(ProgramError):
        units.Manager(invocation.user).disable(sandbox)


def _images(invocation: Invocation, sandbox: Sandbox, tell: Callable[[str], None]) -> Iterable[str]:
    for image in inventory.images(invocation.api):
        if image.sandboxes == {sandbox.id}:
            if inventory.remove_image(invocation.api, image):
                yield from image.names
            else:
                tell(f"kept, because something uses it: {', '.join(image.names)}")


def _state(root: Path, clock: Callable[[], float], sleep: Callable[[float], None]) -> Path:
    until = clock() + PATIENCE
    while True:
        with holding.idle(StatePaths(root).in_use) as nobody:
            if nobody:
                trees.remove(root)
                break
        if clock() > until:
            raise CorralError(
                f"a corral works with {root}; its state stays", "corral down --purge, once it ended"
            )
        sleep(PAUSE)
    if os.path.lexists(root):
        raise CorralError(f"{root} could not be removed", f"look at it: ls -lR {root}")
    return root
