"""Names of everything that belongs to one sandbox, derived from who owns it and where its project lives.

A sandbox is identified by (uid, real path of the project, name). Eight hex digits of a SHA-256 over the three
go into every kernel object, so two names that share forty characters or differ only in what a slug drops stay
distinct.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from pathlib import Path

from policy.records import dataclass

BRIDGE_PREFIX = "corral-"
# Of a container on several networks, Docker takes the default route from the one whose name sorts first, byte
# by byte. A sandbox that somebody connects to another network keeps its own, therefore: "0-" sorts before
# letters and before all other digits.
NETWORK_PREFIX = "0-corral-"
BRIDGE = re.compile(r"corral-[0-9a-f]{8}")
SANDBOX_ID = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?-[0-9a-f]{8}")
SESSION_ID = re.compile(r"[0-9a-f]{8}")


def slug(name: str) -> str:
    """Return a readable piece of an identifier: [a-z0-9-], at most 24 characters, never empty."""
    ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    cleaned = re.sub(r"[^a-z0-9]+", "-", ascii_name.lower()).strip("-")[:24].strip("-")
    return cleaned or "sandbox"


@dataclass(frozen=True)
class Sandbox:
    """The identity of one sandbox. ``id`` is ``<slug>-<8 hex>``."""

    id: str

    def __post_init__(self) -> None:
        if not SANDBOX_ID.fullmatch(self.id):
            raise ValueError(f"not a sandbox id: {self.id!r}")

    @property
    def token(self) -> str:
        """The eight hex digits that kernel objects carry."""
        return self.id[-8:]

    @property
    def bridge(self) -> str:
        """Name of the bridge interface, 15 characters."""
        return BRIDGE_PREFIX + self.token

    @property
    def network(self) -> str:
        """Name of the Docker network."""
        return NETWORK_PREFIX + self.id

    @property
    def image(self) -> str:
        """Tag of the image built for this sandbox."""
        return f"corral/{self.id}:latest"

    def container(self, service: str, session: str) -> str:
        """Name of the container of one session of one service."""
        return f"{BRIDGE_PREFIX}{self.id}-{service}-{session}"


def sandbox_for(uid: int, project: Path, name: str) -> Sandbox:
    """Return the identity of the sandbox ``name`` of user ``uid`` in the *resolved* directory ``project``."""
    digest = hashlib.sha256(f"{uid}\0{project}\0{name}".encode()).hexdigest()
    return Sandbox(f"{slug(name)}-{digest[:8]}")


@dataclass(frozen=True)
class StatePaths:
    """Where one sandbox keeps its files, all below ``root`` (~/.local/share/corral/<sandbox id>)."""

    root: Path

    @property
    def build(self) -> Path:
        """Build context: generated, disposable."""
        return self.root / "build"

    @property
    def home(self) -> Path:
        """State of the agent that outlives a session; parts of it are mounted below /home/agent."""
        return self.root / "home"

    def session(self, session: str) -> Path:
        """Directory of one session; holds its hosts file."""
        return self.root / "sessions" / session

    def session_home(self, session: str) -> Path:
        """The agent's home directory during one session."""
        return self.session(session) / "home"

    @property
    def in_use(self) -> Path:
        """Locked by whoever works with the sandbox; see policy.holding."""
        return self.root / "use.lock"

    @property
    def managed(self) -> Path:
        """What the profile puts below the agent's home and the agent cannot change."""
        return self.root / "managed"

    @property
    def workspace(self) -> Path:
        """Where the agent writes when the project is mounted read-only."""
        return self.root / "workspace"

    @property
    def dial(self) -> Path:
        """Directory of the socket through which the sandbox's proxy asks for names; see policy.proxying."""
        return self.root / "proxy"

    def hosts(self, session: str) -> Path:
        """The hosts file that the enforcer publishes and the container reads."""
        return self.session(session) / "hosts"


def data_home(home: Path, environ: dict[str, str]) -> Path:
    """Return corral's state directory of a user: $XDG_DATA_HOME/corral or ~/.local/share/corral."""
    base = environ.get("XDG_DATA_HOME", "")
    return (Path(base) if base.startswith("/") else home / ".local" / "share") / "corral"


def state_paths(home: Path, environ: dict[str, str], sandbox: Sandbox) -> StatePaths:
    """Return where ``sandbox`` keeps its files for the user with that home and environment."""
    return StatePaths(data_home(home, environ) / sandbox.id)
