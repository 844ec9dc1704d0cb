"""Names, addresses and paths of a lab: facts only, nothing here touches the machine."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .execute import LabError

# The link between box and internet, and the servers' range, are documentation ranges (RFC 5737, RFC 3849).
GATEWAY = "198.51.100.1"
BOX = "198.51.100.2"
LINK_PREFIX = 24
SERVERS = "203.0.113.0/24"
RESOLVER = "203.0.113.53"
FORBIDDEN = "203.0.113.66"
GATEWAY6 = "2001:db8:1::1"
BOX6 = "2001:db8:1::2"
LINK_PREFIX6 = 64
SERVERS6 = "2001:db8:2::/64"
FORBIDDEN6 = "2001:db8:2::66"
PROXY_PORT = 3128
SINK_PORT = 9
"""UDP port (discard) on which every server address listens and says nothing."""
ECHO_PORT = 7
"""TCP and UDP port on which every server address sends back what it got."""

NAMES: dict[str, list[str]] = {
    "allowed1.corral.example": ["203.0.113.10"],
    "allowed2.corral.example": ["203.0.113.20"],
    "several.corral.example": ["203.0.113.30", "203.0.113.31", "203.0.113.32"],
    "forbidden.corral.example": [FORBIDDEN],
    "openrouter.ai": ["203.0.113.101"],
    "api.openai.com": ["203.0.113.102"],
    "api.anthropic.com": ["203.0.113.103"],
    "opencode.ai": ["203.0.113.104"],
    "models.opencode.ai": ["203.0.113.105"],
    "models.dev": ["203.0.113.106"],
    "generativelanguage.googleapis.com": ["203.0.113.107"],
    "chatgpt.com": ["203.0.113.108"],
    "auth.openai.com": ["203.0.113.109"],
    "console.anthropic.com": ["203.0.113.110"],
    "platform.claude.com": ["203.0.113.111"],
    "portal.nousresearch.com": ["203.0.113.112"],
}
"""What the internet serves at the start: its own names and the providers coding agents call by default."""

ADDRESSES = {
    "gateway": GATEWAY,
    "resolver": RESOLVER,
    "allowed1": "203.0.113.10",
    "allowed2": "203.0.113.20",
    "forbidden": FORBIDDEN,
    "forbidden6": FORBIDDEN6,
}

BASE_SUITE = "bookworm"
BASE_IMAGE = "debian:bookworm-slim"
USER = "dev"
UID = 1000

TREE_VERSION = 2
"""Raise it when trees.py builds something else from the same packages."""

_NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,22}[a-z0-9])?")


@dataclass(frozen=True)
class Layout:
    """Where everything of the lab `name` is. Big things lie in the cache, for /run is often a tmpfs."""

    name: str
    cache: Path

    @classmethod
    def of(cls, name: str | None = None, environ: Mapping[str, str] = os.environ) -> Layout:
        """Raises LabError when the name is not a plain one."""
        name = name or environ.get("CORRAL_LAB_NAME") or "main"
        if not _NAME.fullmatch(name):
            raise LabError(
                f"{name!r} cannot be the name of a lab",
                "1 to 24 lower-case letters, digits and hyphens, a letter first, no hyphen last",
            )
        home = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "/root")) / ".cache")
        return cls(name, Path(home) / "corral-lab")

    @property
    def run(self) -> Path:
        """State, logs and mount point of this lab."""
        return Path("/run/corral-lab") / self.name

    @property
    def lock(self) -> Path:
        return Path("/run/corral-lab") / f"{self.name}.lock"

    @property
    def state(self) -> Path:
        return self.run / "state.json"

    @property
    def root(self) -> Path:
        """Mount point of the box's root file system."""
        return self.run / "root"

    @property
    def disk(self) -> Path:
        """What the box writes: the overlay's upper layer and the engine's data."""
        return self.cache / "boxes" / self.name

    @property
    def box_netns(self) -> str:
        return f"corral-{self.name}-box"

    @property
    def inet_netns(self) -> str:
        return f"corral-{self.name}-inet"

    @property
    def cgroup(self) -> str:
        """Path below the mount point of every hierarchy."""
        return f"corral-lab/{self.name}"

    @property
    def files(self) -> Path:
        """What every server of the internet has below /files/."""
        return self.run / "files"

    @property
    def ca_certificate(self) -> Path:
        return self.run / "ca.crt"

    @property
    def ca_key(self) -> Path:
        return self.run / "ca.key"


def netns_path(name: str) -> Path:
    return Path("/run/netns") / name


def tree_key(*parts: object) -> str:
    """Content key of a cached tree: the same for the same ingredients."""
    return hashlib.sha256(repr((TREE_VERSION, parts)).encode()).hexdigest()[:16]


def code_key(directory: Path = Path(__file__).parent) -> str:
    """Content key of the lab's own code: a lab that is up is used again only by the code that made it."""
    digest = hashlib.sha256()
    for file in sorted(directory.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
