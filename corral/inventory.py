"""What Docker holds of corral, found by labels: every version puts them, whatever it names things."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from corral.engine import container_name, errors, remove_container
from policy.declaration import LABEL, LABEL_SANDBOX, LABEL_SCHEMA, LABEL_UID
from policy.errors import EngineError

if TYPE_CHECKING:
    from docker.api.client import APIClient

# Seconds a container has to end by itself before it is killed.
GRACE = 10
ALIVE = frozenset({"created", "running", "paused", "restarting"})
LABEL_INPUTS, LABEL_IMAGE = LABEL + "inputs", LABEL + "image"
_TAG = re.compile(r"corral/([^:/]+):")


@dataclass(frozen=True)
class Container:
    """A sandbox's container; ``alive`` says that a session is in it, or about to be."""

    ident: str
    name: str
    uid: int | None
    sandbox: str
    schema: str
    alive: bool


@dataclass(frozen=True)
class Network:
    """A sandbox's network."""

    ident: str
    name: str
    uid: int | None
    sandbox: str


@dataclass(frozen=True)
class Image:
    """An image that corral built. Whose it is only the sandboxes tell that its tags name.

    ``built_as`` is the tag that it was built with, which a later build may have taken.
    """

    ident: str
    tags: tuple[str, ...]
    built_as: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """What can be removed of it: the tags that corral gave it, or itself when it has none at all."""
        own = tuple(tag for tag in self.tags if _TAG.match(tag))
        return own if self.tags else (self.ident,)

    @property
    def sandboxes(self) -> frozenset[str]:
        """Ids of the sandboxes it was built for."""
        every = (*self.tags, self.built_as)
        return frozenset(match[1] for tag in every if (match := _TAG.match(tag)))


@dataclass(frozen=True)
class Inventory:
    """Everything of corral in one engine, of all users."""

    containers: tuple[Container, ...] = ()
    networks: tuple[Network, ...] = ()
    images: tuple[Image, ...] = ()

    @property
    def uids(self) -> frozenset[int]:
        """Who has a container or a network."""
        found = [*(c.uid for c in self.containers), *(n.uid for n in self.networks)]
        return frozenset(uid for uid in found if uid is not None)


def take(api: APIClient) -> Inventory:
    """Return everything of corral that the engine has.

    Raises:
        EngineError: it does not answer.
    """
    with errors("listing containers"):
        containers = api.containers(all=True, filters={"label": [LABEL_UID]})
    with errors("listing networks"):
        networks = api.networks(filters={"label": [LABEL_UID]})
    return Inventory(
        tuple(_container(row) for row in containers),
        tuple(_network(row) for row in networks),
        images(api),
    )


def images(api: APIClient) -> tuple[Image, ...]:
    """Return the images that corral built or named, of all users.

    Raises:
        EngineError: the engine does not answer.
    """
    with errors("listing images"):
        rows = [
            *api.images(filters={"label": [LABEL_INPUTS]}),
            # Not ours but for this one name of theirs.
            *api.images(filters={"reference": ["corral/*:base"]}),
        ]
    found = {str(row["Id"]): row for row in rows}
    return tuple(
        Image(ident, tags_of(row), str((row.get("Labels") or {}).get(LABEL_IMAGE, "")))
        for ident, row in found.items()
    )


def _container(row: Mapping[str, Any]) -> Container:
    labels = row.get("Labels") or {}
    return Container(
        str(row["Id"]),
        container_name(row),
        _uid(labels),
        str(labels.get(LABEL_SANDBOX, "")),
        str(labels.get(LABEL_SCHEMA, "")),
        str(row.get("State")) in ALIVE,
    )


def _network(row: Mapping[str, Any]) -> Network:
    labels = row.get("Labels") or {}
    return Network(str(row["Id"]), str(row["Name"]), _uid(labels), str(labels.get(LABEL_SANDBOX, "")))


def _uid(labels: Mapping[str, Any]) -> int | None:
    text = str(labels.get(LABEL_UID, ""))
    return int(text) if text.isdecimal() else None


def tags_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a list entry."""
    return tuple(str(tag) for tag in row.get("RepoTags") or () if tag != "<none>:<none>")


def end(api: APIClient, container: Container) -> None:
    """Stop a container, kill it when it takes long, and remove it; one that is gone is fine.

    Raises:
        EngineError: Docker cannot.
    """
    from docker.errors import NotFound

    with errors(f"stopping {container.name}"), contextlib.suppress(NotFound):
        api.stop(container.ident, timeout=GRACE)
    remove_container(api, container.ident)


def remove_network(api: APIClient, network: Network) -> tuple[str, ...]:
    """Remove a network; return who had to be disconnected from it.

    Raises:
        EngineError: Docker cannot.
    """
    from docker.errors import NotFound

    disconnected = []
    with errors(f"removing the network {network.name}"), contextlib.suppress(NotFound):
        for ident, row in (api.inspect_network(network.ident).get("Containers") or {}).items():
            with contextlib.suppress(NotFound):
                api.disconnect_container_from_network(ident, network.ident, force=True)
                disconnected.append(str(row.get("Name") or ident[:12]))
        api.remove_network(network.ident)
    return tuple(disconnected)


def remove_image(api: APIClient, image: Image) -> bool:
    """Remove an image, as far as corral named it; False when something else still needs it.

    Raises:
        EngineError: Docker went away.
    """
    return remove_names(api, image.names)


def remove_names(api: APIClient, names: Iterable[str]) -> bool:
    """Remove images by tag or id; False when something else still needs one.

    Raises:
        EngineError: Docker went away.
    """
    from docker.errors import APIError, NotFound

    try:
        with errors("removing an image"), contextlib.suppress(NotFound):
            for what in names:
                api.remove_image(what)
    except EngineError as error:
        if isinstance(error.__cause__, APIError) and error.__cause__.status_code == 409:
            return False
        raise
    return True
