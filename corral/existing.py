"""An existing image as a sandbox's: which one its name means, and that it stays the one that was looked at.

A name may be given to another image at any time. What it meant at the first build is kept in the sandbox's
state, and is what is used until the user asks for the new one: `corral build --force`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral import oserrors
from corral.engine import errors, missing
from policy import savedfile
from policy.errors import CorralError, EngineError
from policy.records import dataclass

if TYPE_CHECKING:
    from docker.api.client import APIClient

    from agent_image.foreign import Foreign
    from policy.identity import Sandbox

FILE = "image.json"
FORCE = "corral build --force"
SHORT = 19  # sha256: and twelve digits


@dataclass(frozen=True)
class Pin:
    """What a name was when the sandbox was built on it."""

    reference: str
    ident: str


def warning(reference: str, ident: str) -> str:
    """Return what checks cannot hold for in an image that corral did not make."""
    return (
        f"the image {reference} ({ident[:SHORT]}) is not corral's: the entrypoint and the checks inside run "
        "on its Python and C library and say what these let them say; rules, mounts, user, capabilities and "
        "limits are the host's and hold all the same"
    )


def choose(reference: str, now: str | None, pin: Pin | None, there: bool, *, force: bool) -> tuple[str, str]:
    """Decide which image a build is made on. Pure.

    Args:
        reference: as the policy names it.
        now: id of what the name means now; None: the engine has no such image.
        pin: what was built on before.
        there: whether the pinned image still is.
        force: the user asked for the new one.

    Returns:
        its id, and what to tell, perhaps nothing.

    Raises:
        CorralError: there is none, or only another one than before.
    """
    if pin is None or pin.reference != reference or force:
        if now is None:
            raise CorralError(f"there is no image {reference}", f"docker pull {reference}")
        moved = pin is not None and pin.reference == reference and pin.ident != now
        told = (
            f"{reference} was {pin.ident[:SHORT]} and is {now[:SHORT]} from now on" if moved and pin else ""
        )
        return now, told
    if now == pin.ident:
        return now, ""
    what = f"{now[:SHORT]} now" if now is not None else "gone"
    if not there:
        raise CorralError(
            f"the image {reference} is {what}; the one this sandbox was built on, {pin.ident[:SHORT]}, is "
            "not there any more",
            f"look at what the name means now, then: {FORCE}" if now else f"docker pull {reference}",
        )
    return pin.ident, (
        f"the image {reference} is {what}; this sandbox keeps the one it was built on, {pin.ident[:SHORT]}; "
        f"for the other one: {FORCE}"
    )


def read(root: Path, *, force: bool = False) -> Pin | None:
    """Return what is kept in a sandbox's state; None when nothing is.

    Args:
        root: the sandbox's state.
        force: the user asked for what the name means now; then what is damaged is nothing.

    Raises:
        CorralError: it is damaged, so that nobody knows which image was looked at.
    """
    file = root / FILE
    try:
        body = savedfile.value(file)
        return Pin(str(body["reference"]), str(body["image"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if force:
            return None
        raise CorralError(
            f"{file}, which says what the image of this sandbox was, cannot be read ({error})",
            f"look at what the name means now, then: {FORCE}",
        ) from error


def write(root: Path, pin: Pin) -> None:
    """Keep it.

    Raises:
        CorralError: the disk refuses.
    """
    file = root / FILE
    partial = file.with_name(FILE + ".new")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(json.dumps({"reference": pin.reference, "image": pin.ident}) + "\n")
            stream.flush()
            os.fsync(stream.fileno())  # empty after a power cut, it would be refused
        partial.replace(file)
    except OSError as error:
        raise CorralError(f"cannot write {file}: {error.strerror}", oserrors.hint(error)) from error


def find(
    api: APIClient, reference: str, sandbox: Sandbox, root: Path, tell: Callable[[str], None], *, force: bool
) -> Foreign:
    """Return the image that a sandbox is built on; nothing is changed.

    Raises:
        CorralError: there is none, only another one than before, or it cannot be used.
        EngineError: Docker does not answer.
    """
    from agent_image.foreign import examine

    now, pin = look(api, reference), read(root, force=force)
    same = pin is not None and now is not None and str(now["Id"]) == pin.ident
    held = now if same or pin is None else look(api, pin.ident)
    ident, told = choose(
        reference, None if now is None else str(now["Id"]), pin, held is not None, force=force
    )
    if told:
        tell(told)
    found = now if now is not None and str(now["Id"]) == ident else held
    return examine(reference, tag(sandbox), found or {})


def stands_on(api: APIClient, image: str, base: Foreign) -> None:
    """Refuse an image that was not made of the one that was looked at.

    A builder that is not the engine's own, in a container, knows nothing of the engine's names: it would look
    for one of the same name elsewhere.

    Raises:
        CorralError: it was made of something else.
        EngineError: Docker does not answer.
    """
    layers = [
        ((look(api, what) or {}).get("RootFS") or {}).get("Layers") or [] for what in (image, base.ident)
    ]
    made, below = layers
    if not below or made[: len(below)] != below:
        raise CorralError(
            f"the builder did not make the image on {base.reference} ({base.ident[:SHORT]}), but on another",
            "docker buildx use default, then corral build",
        )


def tag(sandbox: Sandbox) -> str:
    """Return what the image is called for the build of the sandbox's own.

    It stays: a pinned image that has lost its name would else be nobody's, and gone with the next cleaning.
    """
    return f"{sandbox.image.rpartition(':')[0]}:base"


def look(api: APIClient, image: str) -> dict[str, Any] | None:
    """Return the engine's account of an image, None when it has none of that name or id."""
    with errors(f"looking at the image {image}"):
        try:
            found: dict[str, Any] = api.inspect_image(image)  # type: ignore[no-untyped-call]
        except Exception as error:
            if missing(error):
                return None
            raise
        return found


def pull(api: APIClient, reference: str, progress: Callable[[str], None]) -> None:
    """Fetch an image that the engine has not.

    Raises:
        EngineError: the registry or the engine refused.
    """
    name, at, digest = reference.partition("@")
    name, colon, version = (name, ":", digest) if at else name.rpartition(":")
    if not colon or "/" in version:
        name, version = reference, "latest"
    progress(f"pulling {reference}")
    with errors(f"pulling {reference}"):
        for row in api.pull(name, tag=version, stream=True, decode=True):
            if "error" in row:
                raise EngineError(f"cannot pull {reference}: {row['error']}", "docker login, or another name")
