"""What one agent harness needs: a profile is data, the rest of corral interprets it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field, replace
from types import MappingProxyType
from typing import Any, Literal

from policy.container import HOME
from policy.profiles.config import (
    Approval,
    ConfigFile,
    HarnessOptions,
    ProfileOptions,
    Wiring,
    content,
    with_approval,
)
from policy.records import dataclass

# Docker's words for architectures, and amd64 without AVX2.
PLATFORMS = ("amd64", "amd64-baseline", "arm64")
BASELINE = "-baseline"


@dataclass(frozen=True)
class NpmTarball:
    """One tarball of the npm registry. It is unpacked; nothing of it is executed to install it.

    ``package`` is its name; ``variant`` is what its version ends in where one package has a version for each
    platform ("-linux-x64"). ``files`` are pairs of a path in the tarball and the absolute one it gets in the
    image; both end in '/' when they are directories.
    """

    package: str
    files: tuple[tuple[str, str], ...]
    variant: str = ""


@dataclass(frozen=True)
class Install:
    """What the image's builder fetches, checks and copies; versions and hashes are in the lock.

    Args:
        program: absolute path of what is started.
        tarballs: by platform; one that is missing is not to be had. "amd64-baseline" is for processors
            without AVX2, where there is such a build.
        node: absolute path that node gets in the image, of the npm client's own wheel. Empty: none.
        python: the Python package that is installed with all it needs below ``directory``.
        directory: see ``python``.
        links: symbolic links, as pairs of path and target.
    """

    program: str
    tarballs: Mapping[str, NpmTarball] = field(default_factory=lambda: MappingProxyType({}))
    node: str = ""
    python: str = ""
    directory: str = ""
    links: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class BakedFile:
    """A file that belongs to root in the image; its directory is created root-owned, 0755, when missing."""

    path: str
    content: str = ""
    mode: int = 0o644


@dataclass(frozen=True)
class ManagedDir:
    """A directory below HOME that is mounted read-only, with ``files`` (name -> content) and nothing else.

    ``word``: where ``from_host`` of the options has it, what the user has in the same directory comes along;
    ``files`` are there all the same.
    """

    path: str
    files: Mapping[str, str]
    word: str = ""


@dataclass(frozen=True)
class SeedFile:
    """A file put once into the sandbox's state when it is not there; ``path`` is relative to HOME.

    ``{project}`` in its content becomes the project's path, as it stands between the quotes of JSON or TOML.
    """

    path: str
    content: str
    mode: int = 0o600

    def text(self, project: str) -> str:
        """Return what is written for a project, whose path is absolute."""
        return self.content.replace("{project}", json.dumps(project, ensure_ascii=False)[1:-1])


@dataclass(frozen=True)
class Switch:
    """A variable that ends one kind of contact which is not the model; ``ends`` says which."""

    variable: str
    value: str
    ends: str


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


Argv = tuple[str, ...]
Start = Literal["interactive", "one_shot", "prompted", "resume", "daemon"]


def _empty() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Profile:
    """One harness.

    Args:
        name: as in ``profile:`` of corral.yaml.
        title: for people.
        install: what is fetched. None: the user's own lines of the image bring it.
        interactive: argv of an interactive session.
        one_shot: argv that a prompt is appended to; to its last word when that ends in '='.
        prompted: argv of an interactive session that begins with the prompt, appended as in ``one_shot``.
        resume: argv that continues the last session.
        daemon: argv of a session at a terminal that nobody may be attached to; it is started again after a
            reboot and has to continue what it did. Empty: the profile has none.
        options: model of ``profile_options.<name>``.
        config: the harness's own configuration, root-owned in the image.
        approvals: what ``approvals: ask|auto|off`` means to the harness; none: it has no such switch.
        endpoint: what ``base_url`` of the options means to it.
        model: what ``model`` of the options means to it.
        modes: values of ``mode`` it supports.
        background: values of ``background`` it supports.
        fixed: environment that follows from how corral runs it; a secret must not replace any of it.
        switches: environment that keeps it from contacting anything but models; fixed, too.
        ca_env: variables that must hold the path of a CA bundle for the harness to trust a private CA.
        proxy_env: variables it takes a proxy from.
        keys: variables it takes a credential of its provider from, one of which env_file has to set.
        state_dirs: directories below HOME that outlive a session, relative to HOME.
        seeds: files put once into that state.
        host_files: by what ``from_host`` of the options may name, a file below the user's home that is copied
            once to the same place below HOME, which has to lie in a state directory.
        shadow: paths relative to HOME that are covered by an empty read-only file.
        managed_dirs: directories below HOME that are mounted read-only.
        baked: root-owned files of the image, besides ``config``.
        owned_dirs: absolute directories that belong to root in the image, besides those of baked files.
        project_files: what the harness of the host executes or obeys below a project, all below a name that
            ends in '/': an agent that writes it acts outside.
        debian_packages: Debian packages it needs at run time.
        image_lines: instructions of a Dockerfile, RUN or ENV, that root's files of corral come after.
        default_egress: names added to the allowlist unless egress.profile_defaults is false.
        contacts: hosts it tries to reach all the same, with when; no switch is known.
        detach_keys: keys that detach from a session, which the harness does not use (corral.detachkeys).
        verify: further checks.
    """

    name: str
    title: str
    install: Install | None
    interactive: Argv
    one_shot: Argv
    resume: Argv
    prompted: Argv = ()
    options: type[ProfileOptions] = HarnessOptions
    daemon: Argv = ()
    config: ConfigFile | None = None
    approvals: Mapping[str, Approval] = field(default_factory=_empty)
    endpoint: Wiring | None = None
    model: Wiring | None = None
    modes: frozenset[str] = frozenset({"run"})
    background: frozenset[str] = frozenset()
    fixed: Mapping[str, str] = field(default_factory=_empty)
    switches: tuple[Switch, ...] = ()
    ca_env: tuple[str, ...] = ()
    proxy_env: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    state_dirs: tuple[str, ...] = ()
    seeds: tuple[SeedFile, ...] = ()
    host_files: Mapping[str, str] = field(default_factory=_empty)
    shadow: tuple[str, ...] = ()
    managed_dirs: tuple[ManagedDir, ...] = ()
    baked: tuple[BakedFile, ...] = ()
    owned_dirs: tuple[str, ...] = ()
    project_files: tuple[str, ...] = ()
    debian_packages: tuple[str, ...] = ()
    image_lines: tuple[str, ...] = ()
    default_egress: tuple[str, ...] = ()
    contacts: Mapping[str, str] = field(default_factory=_empty)
    # Not Ctrl+P, Docker's first key: it is history-up in shells and opens palettes.
    detach_keys: str = "ctrl-],ctrl-q"
    verify: tuple[VerifyCheck, ...] = ()

    @property
    def env(self) -> Mapping[str, str]:
        """The environment that no option changes and no secret replaces."""
        return MappingProxyType({**self.fixed, **{switch.variable: switch.value for switch in self.switches}})

    def environment(self, options: ProfileOptions) -> Mapping[str, str]:
        """Return the fixed environment with what the options make of it."""
        made = dict(self.env)
        if isinstance(options, HarnessOptions):
            for wiring in (self.endpoint, self.model):
                made.update(wiring.variables(options) if wiring is not None else {})
            if options.approvals is not None:
                made.update(self.approvals[options.approvals].env)
        return MappingProxyType(made)

    def argv(self, start: Start, options: ProfileOptions) -> Argv:
        """Return what is started; empty: the harness cannot do that."""
        words: Argv = getattr(self, start)
        if isinstance(options, HarnessOptions) and options.approvals is not None and words:
            words = (words[0], *self.approvals[options.approvals].argv, *words[1:])
        return words

    def one_shot_argv(self, prompt: str, options: ProfileOptions | None = None) -> Argv:
        """Return the argv that answers ``prompt`` and exits."""
        words = self.one_shot if options is None else self.argv("one_shot", options)
        # A prompt is data: one that begins with '-' must not be read as an option.
        if words and words[-1].endswith("="):
            return (*words[:-1], words[-1] + prompt)
        return (*words, *(("--",) if prompt.startswith("-") else ()), prompt)

    def state_path(self, directory: str) -> str:
        """Return where a state directory is inside the container."""
        return f"{HOME}/{directory}"

    def baked_files(self, options: ProfileOptions) -> tuple[BakedFile, ...]:
        """Return the root-owned files of the image, in a stable order."""
        if self.config is None or not isinstance(options, HarnessOptions):
            return self.baked
        wirings = [wiring for wiring in (self.endpoint, self.model) if wiring is not None]
        return (BakedFile(self.config.path, content(self.config, options, wirings)), *self.baked)

    def carried(self, options: ProfileOptions) -> tuple[str, ...]:
        """Return what of the user's own comes along, relative to the home, whether it is there or not."""
        words = getattr(options, "from_host", ())
        directories = (managed.path for managed in self.managed_dirs if managed.word in words)
        return (*directories, *(self.host_files[word] for word in words if word in self.host_files))

    def with_approvals(self, options: ProfileOptions, approvals: str) -> ProfileOptions:
        """Return the options with the harness's own switch for asking its user: "ask", "auto" or "off".

        Raises:
            ValueError: the harness has none, or the options say it already; the text says what is wrong.
        """
        if not self.approvals or not isinstance(options, HarnessOptions):
            raise ValueError(f"the {self.name} profile has no approvals")
        if approvals not in self.approvals:
            known = " and ".join(self.approvals)
            raise ValueError(f"{self.title} has no setting that means {approvals}, only {known}")
        return with_approval(self.name, options, approvals, self.approvals[approvals], self.config)

    def parse_options(self, raw: Mapping[str, Any]) -> ProfileOptions:
        """Validate ``profile_options.<name>``.

        Raises:
            pydantic.ValidationError: with locations relative to the mapping.
        """
        return self.options.model_validate(raw, context=self.config)

    def shaped(self, options: ProfileOptions) -> Profile:
        """Return the profile with what its options say of it (see ``ProfileOptions.shape``)."""
        return replace(self, **options.shape())
