"""Everything that decides what an agent's image contains, checked once, before anything is rendered.

Values end up in a Dockerfile's shell lines, so each one has to match a narrow form. Nothing here is secret:
proxies, which may carry a password, are given to the build itself (builder.py).
"""

from __future__ import annotations

import re

from agent_image.foreign import Foreign
from agent_image.harnesses import artifact, client, wheels
from policy.errors import PolicyError
from policy.profiles import BakedFile
from policy.records import dataclass
from policy.urls import UrlError, split_http

DEFAULT_BASE = "debian:bookworm-slim"
MAX_ID = 2**31 - 1
# The kernel's overflow id: whatever has no owner in a user namespace belongs to it.
NOBODY = 65534

# What an agent's shell work needs on top of a bare Debian; ripgrep is a harness's own search tool.
PACKAGES = (
    "curl",
    "file",
    "git",
    "jq",
    "less",
    "patch",
    "procps",
    "python3",
    "ripgrep",
    "unzip",
    "xz-utils",
)
FORBIDDEN_PACKAGES = frozenset({"sudo", "sudo-ldap", "sudo-rs", "doas", "opendoas", "pkexec", "policykit-1"})

_REFERENCE = re.compile(
    r"[a-z0-9][a-z0-9._-]*(?::[0-9]+)?(?:/[a-z0-9][a-z0-9._-]*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+(?:=[A-Za-z0-9.+:~-]+)?")
_ABSOLUTE = re.compile(r"(?:/[A-Za-z0-9_.][A-Za-z0-9._-]*)+")
_APT_OPTION = re.compile(r"[A-Za-z]+(?:::[A-Za-z-]+)+=[A-Za-z0-9.-]+")
_URL = re.compile(r"https?://[A-Za-z0-9.-]+(?::[0-9]+)?(?:/[A-Za-z0-9._~/%+,=-]*)?")

# Directories a file of root's may be baked into: nothing that the system's own programs live in.
# Not below HOME: a session mounts its own over it.
_BAKED_ROOTS = ("/etc/", "/opt/", "/usr/local/")


@dataclass(frozen=True)
class ImageSpec:
    """The inputs of one image. All paths are absolute in the container.

    uid, gid: the host user's; never 0.
    rootless: the engine is the user's own and calls that user 0, which the agent then is.
    architecture: of the engine, in Docker's words (``client.version()["Arch"]``): amd64 or arm64.
    baseline: its processor has no AVX2.
    harness: the name of a profile.
    base: a Debian-based image the engine has or can pull.
    packages: Debian packages in addition to PACKAGES.
    lines: instructions RUN and ENV of the user's own, executed before corral's own files come.
    owned_dirs: directories that belong to root.
    baked_files: files that belong to root.
    ca_certificates: PEM texts (bundles allowed) that the build and the agent trust in addition to Debian's.
    apt_mirror: replaces the archive ("https://mirror.example/debian"); the security archive is replaced by
        apt_security_mirror, by default the same with "-security" at its end.
    apt_options: (name, value) of apt.conf for the build ("Acquire::Check-Valid-Until", "false").
    npm_registry: where the build's npm client asks; None is the client's own default.
    foreign: the image that corral adds its layer to, instead of making one; the harness is still fetched in
        stages of ``base``.
    pip_index: where the build's pip asks, and, in /etc/pip.conf, the agent's; None is pip's own default.

    Raises:
        PolicyError: a value cannot be used.
        EngineError: the harness is not available for the architecture.
    """

    uid: int
    gid: int
    architecture: str
    harness: str = "opencode"
    base: str = DEFAULT_BASE
    packages: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    owned_dirs: tuple[str, ...] = ()
    baked_files: tuple[BakedFile, ...] = ()
    ca_certificates: tuple[bytes, ...] = ()
    apt_mirror: str | None = None
    apt_security_mirror: str | None = None
    apt_options: tuple[tuple[str, str], ...] = ()
    npm_registry: str | None = None
    pip_index: str | None = None
    rootless: bool = False
    foreign: Foreign | None = None
    baseline: bool = False

    def __post_init__(self) -> None:
        _check_ids(self.uid, self.gid)
        artifact(self.harness, self.architecture, baseline=self.baseline)
        client(self.architecture)
        if self.foreign is not None and wheels(self.harness) is not None:
            raise PolicyError(
                f"{self.harness} cannot be added to an existing image: its packages are for one Python only",
                "leave image out, or install it in the image and use the profile generic",
            )
        if len(self.base) > 255 or not _REFERENCE.fullmatch(self.base):
            raise PolicyError(
                f"{self.base!r} is not the name of an image", "for example: debian:bookworm-slim"
            )
        for package in self.packages:
            _check_package(package)
        for path in self.owned_dirs:
            _check_path(path, _BAKED_ROOTS)
        for file in self.baked_files:
            _check_path(file.path, _BAKED_ROOTS)
            if file.mode not in {0o644, 0o755}:
                raise PolicyError(f"{file.path}: a baked file has the mode 0644 or 0755, not {file.mode:04o}")
        for option in self.apt_options:
            if not _APT_OPTION.fullmatch("=".join(option)):
                raise PolicyError(f"{option[0]!r} is not an option of apt with a plain value")
        for name in ("apt_mirror", "apt_security_mirror", "npm_registry", "pip_index"):
            _check_url(name, getattr(self, name))

    @property
    def ids(self) -> tuple[int, int]:
        """The agent's uid and gid as the engine counts."""
        return (0, 0) if self.rootless else (self.uid, self.gid)

    @property
    def all_packages(self) -> tuple[str, ...]:
        """Every Debian package of the final stage, sorted; a version that was asked for wins."""
        asked = {package.partition("=")[0] for package in self.packages}
        return tuple(sorted({*self.packages, *(name for name in PACKAGES if name not in asked)}))

    @property
    def security_mirror(self) -> str | None:
        """The mirror of the security archive, given or derived."""
        if self.apt_security_mirror or not self.apt_mirror:
            return self.apt_security_mirror
        return self.apt_mirror.rstrip("/") + "-security"


def _check_ids(uid: int, gid: int) -> None:
    for name, value in (("uid", uid), ("gid", gid)):
        if value == 0:
            raise PolicyError(
                f"refusing to build an image whose agent has {name} 0 (root)",
                "run corral as an ordinary user who is a member of the group docker",
            )
        if not 0 < value <= MAX_ID or value == NOBODY:
            raise PolicyError(f"{name} {value} cannot be the agent's")


def _check_package(package: str) -> None:
    if not _PACKAGE.fullmatch(package):
        raise PolicyError(f"{package!r} is not the name of a Debian package", "for example: ripgrep")
    if package.partition("=")[0] in FORBIDDEN_PACKAGES:
        raise PolicyError(
            f"refusing the package {package}: a sandbox has no way to become root",
            "install what the agent needs when the image is built",
        )


def _check_path(path: str, roots: tuple[str, ...]) -> None:
    if not _ABSOLUTE.fullmatch(path) or {".", ".."} & set(path.split("/")):
        raise PolicyError(
            f"{path!r} is not an absolute path of letters, digits, dots, dashes and underscores"
        )
    if not path.startswith(roots):
        raise PolicyError(f"{path} must lie below one of: {', '.join(roots)}")


def _check_url(name: str, url: str | None) -> None:
    if url is None:
        return
    try:
        # An image's history would show credentials.
        split_http(url, credentials=False)
    except UrlError as error:
        raise PolicyError(f"{name}: {error}", "give an http or https address that needs no login") from error
    if not _URL.fullmatch(url):
        raise PolicyError(f"{name}: {url!r} holds a character that no package mirror needs")
