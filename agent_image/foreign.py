"""An image that corral did not make: what of it would reach into a session, and what becomes of that.

Labels, user, entrypoint and command are corral's own again in the layer that it adds, a health check is
switched off, variables that change what programs do are emptied. What a later layer cannot undo is refused: a
volume would be a writable place that no policy names, a trigger would run in corral's build.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from policy.container import HOME, TMPFS, WORKSPACE
from policy.declaration import LABEL
from policy.errors import CorralError, EngineError
from policy.records import dataclass
from policy.secrets import changes_behaviour

PROGRAM_DIRS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
# Programs that a later layer runs, or that every session needs.
NEEDED = {"/bin/sh": ("/bin/sh",), "python3": tuple(f"{place}/python3" for place in PROGRAM_DIRS)}
# What they say lies in the image, and emptying it would not mean that it is not set.
KEPT = "whom TLS trusts"
_DIRECTORY = re.compile(r"(?:/[A-Za-z0-9._+-]+)+")
_IDENT = re.compile(r"sha256:[0-9a-f]{64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NO_PLACE = (HOME, WORKSPACE, *TMPFS, "/proc", "/sys", "/dev", "/run", "/home", "/root", "/mnt", "/media")


class Api(Protocol):
    """What is used of docker-py's low-level API."""

    def create_container_from_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Create a container and return its id."""

    def get_archive(self, container: str, path: str) -> tuple[Any, dict[str, Any]]:
        """Return a path of it; raises docker.errors.NotFound."""

    def remove_container(self, container: str, *, force: bool, v: bool) -> None:
        """Remove it."""


@dataclass(frozen=True)
class Foreign:
    """An image to build on.

    reference: as the policy names it. ident: the engine's id of it. tag: what the build calls it.
    path: directories of its PATH beside the usual ones. cleared: variables that are emptied.
    """

    reference: str
    ident: str
    tag: str
    path: tuple[str, ...] = ()
    cleared: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _IDENT.fullmatch(self.ident):
            raise EngineError(f"the engine calls {self.reference} {self.ident[:80]!r}, which is no image id")


def examine(reference: str, tag: str, inspect: Mapping[str, Any]) -> Foreign:
    """Return what an image is for a build, from the engine's account of it.

    Raises:
        CorralError: it cannot be used; with every reason.
    """
    config = inspect.get("Config") or {}
    problems = []
    volumes = sorted(config.get("Volumes") or ())
    if volumes:
        problems.append(f"it declares volumes ({', '.join(volumes)}): writable places that no policy names")
    if config.get("OnBuild"):
        problems.append("it has ONBUILD instructions, which would run in corral's build")
    own = sorted(name for name in config.get("Labels") or {} if str(name).startswith(LABEL))
    if own:
        problems.append(f"it has labels of corral's own ({', '.join(own)})")
    if inspect.get("Os") not in (None, "", "linux"):
        problems.append(f"it is made for {inspect.get('Os')}")
    if problems:
        raise CorralError(
            "\n".join([f"the image {reference} cannot be used:", *(f"  {text}" for text in problems)]),
            "make an image from it without them, or set build.base_image, a Debian, instead of image",
        )
    path, cleared = _environment(config.get("Env") or ())
    return Foreign(reference, str(inspect["Id"]), tag, path, cleared)


def _environment(rows: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    path: tuple[str, ...] = ()
    cleared = []
    for row in rows:
        name, _, value = str(row).partition("=")
        if name == "PATH":
            found = dict.fromkeys(value.split(":"))
            path = tuple(place for place in found if place not in PROGRAM_DIRS and _usable(place))
        elif not _VARIABLE.fullmatch(name):
            # No shell and no Dockerfile can name it, so it cannot be emptied either.
            raise CorralError(
                f"the image sets a variable with an odd name ({name[:40]!r})", "use an image without it"
            )
        elif (what := changes_behaviour(name)) is not None and what != KEPT:
            cleared.append(name)
    return path, tuple(sorted(cleared))


def _usable(place: str) -> bool:
    """Say whether a directory of PATH is the image's own, so that no agent can have put a program there."""
    plain = bool(_DIRECTORY.fullmatch(place)) and not {".", ".."} & set(place.split("/"))
    return plain and not any(place == other or place.startswith(other + "/") for other in _NO_PLACE)


def missing(api: Api, ident: str) -> list[str]:
    """Return what an image lacks of what every session needs; nothing of it is run.

    Raises:
        EngineError: the engine does not say.
    """
    import requests
    from docker.errors import DockerException, NotFound

    lacking = []
    try:
        config = {"Image": ident, "Cmd": ["/corral-looks"], "HostConfig": {"NetworkMode": "none"}}
        container = str(api.create_container_from_config(config)["Id"])
        try:
            for what, places in NEEDED.items():
                for place in places:
                    with contextlib.suppress(NotFound):
                        stream, _ = api.get_archive(container, place)
                        getattr(stream, "close", lambda: None)()
                        break
                else:
                    lacking.append(what)
        finally:
            api.remove_container(container, force=True, v=True)
    except (DockerException, requests.RequestException) as error:
        raise EngineError(f"Docker cannot look into the image: {error}") from error
    return lacking


def insist(api: Api, image: Foreign) -> None:
    """Refuse an image without what every session needs.

    Raises:
        CorralError: with what it lacks.
        EngineError: the engine does not say.
    """
    lacking = missing(api, image.ident)
    if lacking:
        raise CorralError(
            f"the image {image.reference} has no {' and no '.join(lacking)}, which the entrypoint needs",
            "install a shell and Python 3.9 or later in it, or use another image",
        )
