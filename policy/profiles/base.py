"""What one agent harness needs: a profile is data, the rest of corral interprets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from policy.container import HOME


class ProfileOptions(BaseModel):
    """Base of what ``profile_options.<profile>`` may hold; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


@dataclass(frozen=True)
class NpmTarball:
    """A platform package of the npm registry that holds one ready binary; installing it executes nothing.

    ``integrity`` is the registry's own form (``sha512-<base64>``); ``member`` is the path of the binary in
    the tarball and ``target`` the absolute path it gets in the image.
    """

    name: str
    version: str
    integrity: str
    member: str
    target: str

    @property
    def key(self) -> str:
        """The name that `npm pack` takes, and the key of a lock: ``name@version``."""
        return f"{self.name}@{self.version}"


@dataclass(frozen=True)
class BakedFile:
    """A file that belongs to root in the image; its directory is created root-owned, 0755, when missing."""

    path: str
    content: str = ""
    mode: int = 0o644


@dataclass(frozen=True)
class ManagedDir:
    """A directory below HOME that is mounted read-only, with ``files`` (name -> content) and nothing else."""

    path: str
    files: Mapping[str, str]


@dataclass(frozen=True)
class SeedFile:
    """A file put once into the sandbox's state when it is not there; ``path`` is relative to HOME."""

    path: str
    content: str
    mode: int = 0o600


@dataclass(frozen=True)
class VerifyCheck:
    """A check that `corral verify` makes in addition for this harness.

    root-owned: the path belongs to root and the agent cannot write it. exec-dir: a program in that directory
    can be executed. runs: ``target`` is a program that exits 0 with ``--version``.
    """

    kind: Literal["root-owned", "exec-dir", "runs"]
    target: str

    @property
    def name(self) -> str:
        """How the check is listed."""
        return f"{self.kind}:{self.target}"


def _empty() -> Mapping[str, str]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Profile:
    """One harness.

    Args:
        name: as in ``profile:`` of corral.yaml.
        title: for people.
        packages: what the image's builder stage fetches, checks and copies.
        interactive: argv of an interactive session.
        one_shot: argv that a prompt is appended to.
        resume: argv that continues the last session.
        daemon: argv of a session that is always on, at a terminal that nobody may be attached to; it is
            started again after a reboot and has to continue what it did. Empty: the profile has none.
        options: model of ``profile_options.<name>``.
        modes: values of ``mode`` it supports.
        background: values of ``background`` it supports.
        env: fixed environment; a secret must not replace any of it.
        ca_env: variables that must hold the path of a CA bundle for the harness to trust a private CA.
        state_dirs: directories below HOME that outlive a session, relative to HOME.
        seeds: files put once into that state.
        shadow: paths relative to HOME that are covered by an empty read-only file.
        managed_dirs: directories below HOME that are mounted read-only.
        owned_dirs: absolute directories that belong to root in the image, besides those of baked files.
        project_files: what the harness of the host executes or obeys below a project, all below a name that
            ends in '/': an agent that writes it acts outside.
        debian_packages: Debian packages it needs at run time.
        default_egress: names added to the allowlist unless egress.profile_defaults is false.
        base_urls: per provider, the variable or setting that points the harness at another base URL.
        detach_keys: keys that detach from a session, which the harness does not use (corral.detachkeys).
        verify: further checks.
    """

    name: str
    title: str
    packages: tuple[NpmTarball, ...]
    interactive: tuple[str, ...]
    one_shot: tuple[str, ...]
    resume: tuple[str, ...]
    options: type[ProfileOptions]
    modes: frozenset[str] = frozenset({"run"})
    daemon: tuple[str, ...] = ()
    background: frozenset[str] = frozenset()
    env: Mapping[str, str] = field(default_factory=_empty)
    ca_env: tuple[str, ...] = ()
    state_dirs: tuple[str, ...] = ()
    seeds: tuple[SeedFile, ...] = ()
    shadow: tuple[str, ...] = ()
    managed_dirs: tuple[ManagedDir, ...] = ()
    owned_dirs: tuple[str, ...] = ()
    project_files: tuple[str, ...] = ()
    debian_packages: tuple[str, ...] = ()
    default_egress: tuple[str, ...] = ()
    base_urls: Mapping[str, str] = field(default_factory=_empty)
    # Not Ctrl+P, Docker's first key: it is history-up in shells and opens palettes.
    detach_keys: str = "ctrl-],ctrl-q"
    verify: tuple[VerifyCheck, ...] = ()

    def one_shot_argv(self, prompt: str) -> tuple[str, ...]:
        """Return the argv that answers ``prompt`` and exits."""
        # A prompt is data: one that begins with '-' must not be read as an option.
        return (*self.one_shot, *(("--",) if prompt.startswith("-") else ()), prompt)

    def state_path(self, directory: str) -> str:
        """Return where a state directory is inside the container."""
        return f"{HOME}/{directory}"

    def baked_files(self, options: ProfileOptions) -> tuple[BakedFile, ...]:
        """Return the root-owned files of the image, in a stable order; none unless a profile says so."""
        return ()

    def with_approvals(self, options: ProfileOptions, approvals: str) -> ProfileOptions:
        """Return the options with the harness's own switch for asking its user: "ask", "auto" or "off".

        Raises:
            ValueError: the harness has none, or the options say it already; the text says what is wrong.
        """
        raise ValueError(f"the {self.name} profile has no approvals")

    def parse_options(self, raw: Mapping[str, Any]) -> ProfileOptions:
        """Validate ``profile_options.<name>``.

        Raises:
            pydantic.ValidationError: with locations relative to the mapping.
        """
        return self.options.model_validate(raw)
