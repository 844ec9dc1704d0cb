"""Finding corral.yaml, reading it, and everything that can be said about it before anything is created."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from policy import profiles, savedfile
from policy.connection import OWN, connection, contradictions
from policy.container import WORKSPACE, Mount
from policy.declaration import Declaration
from policy.errors import PolicyError
from policy.explain import explain, known_keys, shown_text
from policy.hostclient import HostFiles, RealFiles, suite_of
from policy.hostnames import FromHost, declared, from_host
from policy.identity import Sandbox, sandbox_for
from policy.mounts import Finding, Guard, Probe, RealProbe, Refusal, check, expand, is_within
from policy.problems import Location, Problem, to_error
from policy.profiles import BakedFile, Profile, ProfileOptions
from policy.records import dataclass
from policy.schema import Policy, effective_declaration
from policy.yamltree import Document, parse

FILE = "corral.yaml"
MAX_SIZE = 65536
DAEMON = Path("/etc/docker/daemon.json")


@dataclass(frozen=True)
class LoadedPolicy:
    """A valid policy and what it means on this host.

    All paths are absolute and without symbolic links; ``sha256`` is the hex digest of the file's bytes.
    ``policy.build.ca_certificates`` is resolved too.
    """

    policy: Policy
    path: Path
    project: Path
    sha256: str
    sandbox: Sandbox
    profile: Profile
    options: ProfileOptions
    declaration: Declaration
    rw: tuple[Path, ...] = ()
    ro: tuple[Path, ...] = ()
    env_file: Path | None = None
    from_host: FromHost = field(default_factory=FromHost)

    @property
    def name(self) -> str:
        """The sandbox's name: as in the file, or the name of the project directory."""
        return sandbox_name(self.policy.name, self.project)

    @property
    def baked(self) -> tuple[BakedFile, ...]:
        """The root-owned files of the image that the profile makes of its options."""
        return self.profile.baked_files(self.options)

    @property
    def connection(self) -> str:
        """How its containers are connected: see ``policy.connection``."""
        return connection(self.policy.egress.mode)

    @property
    def workspace(self) -> bool:
        """Whether the sandbox has a directory of its own to write to, because its project is read-only."""
        return self.policy.mode == "run" and self.policy.mounts.project == "ro"

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """What the policy mounts: the project (in run mode), then rw, then ro; same path on both sides."""
        project = (self.project,) if self.policy.mode == "run" else ()
        return (
            *(Mount(str(path), str(path), read_only=self.workspace) for path in project),
            *(Mount(str(path), str(path)) for path in self.rw),
            *(Mount(str(path), str(path), read_only=True) for path in self.ro),
        )


def sandbox_name(name: str | None, project: Path) -> str:
    """Return the name of a sandbox: as given, or that of its project directory."""
    return name if name is not None else project.name


def find(start: Path) -> Path:
    """Return the nearest corral.yaml in ``start`` or a directory above it.

    Raises:
        PolicyError: there is none, or a directory cannot be searched.
    """
    directory = Path(os.path.realpath(start))
    for candidate in (directory, *directory.parents):
        try:
            if (candidate / FILE).is_file():
                return candidate / FILE
        except OSError as error:
            raise PolicyError(f"cannot look for {FILE} in {candidate}: {error.strerror}") from error
    raise PolicyError(f"no {FILE} in {directory} or above it", "corral init")


def load(
    path: Path,
    *,
    home: Path,
    environ: Mapping[str, str],
    uid: int,
    probe: Probe | None = None,
    own: Iterable[str] | None = None,
    files: HostFiles | None = None,
) -> LoadedPolicy:
    """Read and validate a policy file.

    Args:
        path: the file; its directory is the project.
        home: home directory of the user, which ``~`` stands for.
        environ: the user's environment; says where state and credentials were moved to.
        uid: the user, owner of the sandbox.
        probe: the file system that mounts are checked on (not the one ``path`` is read from).
        files: where the host's clients keep their configuration, for ``egress.from_host``.
        own: further directories that are part of corral; by default the environment it is installed in.

    Raises:
        PolicyError: with every problem of the file, one a line.
    """
    file, project = Path(os.path.abspath(path)), Path(os.path.realpath(path.parent))  # noqa: PTH100
    raw = _read(file, uid)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise to_error(
            str(file), [Problem((), "not UTF-8 text", fix="save it as UTF-8", line=line)]
        ) from error
    document = parse(text)
    reading = _Reading(document, project, str(home), guard(home, environ, probe, own))
    policy = reading.run()
    if policy is None or reading.profile is None or reading.options is None:
        raise to_error(str(file), reading.problems)
    written = (str(project), *map(str, reading.rw))
    found = from_host(
        policy.egress.from_host if connection(policy.egress.mode) == OWN else (),
        policy.build,
        home,
        environ,
        _Outside(files or RealFiles(), written),
        suite_of(policy.build.base_image),
    )
    return LoadedPolicy(
        policy=policy,
        path=file,
        project=project,
        sha256=hashlib.sha256(raw).hexdigest(),
        sandbox=sandbox_for(uid, project, sandbox_name(policy.name, project)),
        profile=reading.profile.shaped(reading.options),
        options=reading.options,
        declaration=declared(effective_declaration(policy, reading.profile), found),
        from_host=found,
        rw=reading.rw,
        ro=reading.ro,
        env_file=reading.env_file,
    )


class _Outside:
    """The host's files but for those that a sandbox may write: what it configures is not the host's wish."""

    def __init__(self, files: HostFiles, written: tuple[str, ...]) -> None:
        self._files = files
        self._written = written

    def read(self, path: str) -> str | None:
        resolved = self._files.resolve(path)
        inside = any(is_within(place, directory) for place in (path, resolved) for directory in self._written)
        return None if inside else self._files.read(path)

    def names(self, directory: str) -> list[str]:
        return self._files.names(directory)

    def resolve(self, path: str) -> str:
        return self._files.resolve(path)


def guard(
    home: Path, environ: Mapping[str, str], probe: Probe | None = None, own: Iterable[str] | None = None
) -> Guard:
    """Return what refuses single paths for this user; see ``load``."""
    if own is None:
        base = environ.get("XDG_CONFIG_HOME", "")
        rootless = (Path(base) if base.startswith("/") else home / ".config") / "docker" / DAEMON.name
        programs: Iterable[str] = (*_own_programs(), *docker_roots(DAEMON), *docker_roots(rootless))
    else:
        programs = own
    return Guard(str(home), environ, probe or RealProbe(), programs)


def docker_roots(configuration: Path) -> tuple[str, ...]:
    """Return where Docker keeps its files when that was moved; what cannot be read moved nothing."""
    try:
        body = savedfile.value(configuration)
        found = [body.get(key) for key in ("data-root", "graph", "exec-root")]
    except (OSError, ValueError, AttributeError):
        return ()
    return tuple(path for path in found if isinstance(path, str) and path.startswith("/"))


def _own_programs() -> tuple[str, ...]:
    return (sys.prefix,) if sys.prefix != sys.base_prefix else ()


def _read(file: Path, uid: int) -> bytes:
    """Return the bytes of a policy file that nobody but the user or root wrote."""
    try:
        # O_NONBLOCK: opening a FIFO must not wait for its writer.
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise PolicyError(f"{file} is not a regular file")
            raw = stream.read(MAX_SIZE + 1)
    except FileNotFoundError as error:
        raise PolicyError(f"there is no {file}", "corral init") from error
    except OSError as error:
        raise PolicyError(f"cannot read {file}: {error.strerror}") from error
    if status.st_uid not in {uid, 0}:
        raise PolicyError(
            f"{file} belongs to uid {status.st_uid}, not to you", f"read it, then: sudo chown {uid} {file}"
        )
    if status.st_mode & stat.S_IWOTH:
        raise PolicyError(f"every user of this host can write {file}", f"chmod o-w {file}")
    if len(raw) > MAX_SIZE:
        raise PolicyError(f"{file} is larger than {MAX_SIZE} bytes")
    return raw


class _Reading:
    """One pass over a document; collects every problem instead of stopping at the first."""

    def __init__(self, document: Document, project: Path, home: str, guard: Guard) -> None:
        self.document = document
        self.project = str(project)
        self.home = home
        self.guard = guard
        self.problems: list[Problem] = list(document.problems)
        self.profile: Profile | None = None
        self.options: ProfileOptions | None = None
        self.rw: tuple[Path, ...] = ()
        self.ro: tuple[Path, ...] = ()
        self.env_file: Path | None = None
        self.ca_certificates: tuple[str, ...] = ()
        self.pre_launch: tuple[str, ...] = ()

    def run(self) -> Policy | None:
        """Return the policy, or None when there are problems."""
        if not isinstance(self.document.value, dict):
            if not self.problems:
                what = "is empty" if self.document.value is None else "must be a mapping"
                self.add((), what, "corral init writes one to start from")
            return None
        tree = _without_nulls(self.document.value)
        policy: Policy | None = None
        try:
            policy = Policy.model_validate(tree)
        except ValidationError as error:
            self.problems += [explain(self.document, entry) for entry in error.errors(include_url=False)]
        # The rest looks at the plain tree, so that it has its say although something else is wrong.
        self.check_profile(tree)
        for at, what, fix in contradictions(tree):
            self.add(at, what, fix)
        self.check_mounts(tree)
        self.check_env_file(tree)
        self.check_certificates(tree)
        self.check_hooks(tree)
        self.check_approvals(tree)
        if policy is None or self.problems:
            return None
        build = policy.build.model_copy(update={"ca_certificates": self.ca_certificates})
        hooks = policy.hooks.model_copy(update={"pre_launch": self.pre_launch})
        return policy.model_copy(update={"build": build, "hooks": hooks})

    def check_profile(self, tree: Mapping[str, Any]) -> None:
        name = tree.get("profile")
        if not isinstance(name, str) or name not in profiles.names():
            return
        profile = self.profile = profiles.get(name)
        mode = tree.get("mode")
        if mode in ("run", "daemon") and mode not in profile.modes:
            self.add(("mode",), f"the {name} profile has no {mode} mode", f"use {' or '.join(profile.modes)}")
        for index, value in enumerate(_texts(tree.get("background"))):
            if value is not None and value not in profile.background:
                fix = (
                    f"use {', '.join(sorted(profile.background))}"
                    if profile.background
                    else "remove background"
                )
                self.add(("background", index), f"the {name} profile has no such background service", fix)
        options = tree.get("profile_options")
        options = options if isinstance(options, dict) else {}
        for other in options:
            if other not in profiles.names():
                fix = f"available: {', '.join(profiles.names())}"
                what = "not available yet" if other in profiles.planned() else "unknown profile"
                self.add(("profile_options", other), what, fix)
        try:
            self.options = profile.parse_options(options.get(name) or {})
        except ValidationError as error:
            for entry in error.errors(include_url=False):
                problem = explain(self.document, entry, ("profile_options", name), profile.options)
                self.problems.append(problem)
        if (
            mode == "daemon"
            and mode in profile.modes
            and self.options
            and not profile.shaped(self.options).daemon
        ):
            fix = f"profile_options.{name}.daemon: [program, argument]"
            self.add(("mode",), "nothing says what an agent that is always on runs", fix)

    def check_mounts(self, tree: Mapping[str, Any]) -> None:
        run_mode = tree.get("mode", "run") != "daemon"
        if run_mode:
            refusal = self.guard.refuse(self.project)
            if refusal is not None:
                self.add_refusal((), refusal)
        mounts = tree.get("mounts")
        mounts = mounts if isinstance(mounts, dict) else {}
        # What is not text was reported by the schema; its place stays taken so that indices are right.
        rw, ro = (list(_texts(mounts.get(access))) for access in ("rw", "ro"))
        accepted_rw, accepted_ro, findings = check(
            [text or "" for text in rw],
            [text or "" for text in ro],
            project=self.project,
            project_mounted=run_mode,
            home=self.home,
            guard=self.guard,
        )
        self.rw, self.ro = tuple(map(Path, accepted_rw)), tuple(map(Path, accepted_ro))
        self.problems += [
            problem
            for finding in findings
            if (rw if finding.access == "rw" else ro)[finding.index] is not None
            for problem in (self.finding(finding),)
        ]

        if run_mode and mounts.get("project") == "ro":
            self.check_workspace()

    def check_workspace(self) -> None:
        for path in (self.project, *map(str, (*self.rw, *self.ro))):
            if is_within(path, WORKSPACE) or is_within(WORKSPACE, path):
                what = f"{path} would meet {WORKSPACE}, where this sandbox writes"
                self.add(("mounts", "project"), what, f"move what lies in {WORKSPACE}, or use rw")

    def check_env_file(self, tree: Mapping[str, Any]) -> None:
        secrets = tree.get("secrets")
        text = secrets.get("env_file") if isinstance(secrets, dict) else None
        if not isinstance(text, str):
            return
        at: Location = ("secrets", "env_file")
        expanded = expand(text, self.home)
        if isinstance(expanded, Refusal):
            self.add(at, expanded.what, expanded.fix)
            return
        path = self.guard.probe.resolve(expanded)
        mounted = [*map(str, (*self.rw, *self.ro))]
        if tree.get("mode", "run") != "daemon":
            mounted.append(self.project)
        inside = next((directory for directory in mounted if is_within(path, directory)), None)
        if inside is not None:
            fix = "move it to ~/.config/corral/, for example"
            self.add(at, f"the file lies in {inside}, where the agent could read it", fix)
        self.env_file = Path(path)

    def check_certificates(self, tree: Mapping[str, Any]) -> None:
        build = tree.get("build")
        entries = build.get("ca_certificates") if isinstance(build, dict) else None
        found: list[str] = []
        for index, text in enumerate(_texts(entries)):
            if text is None:
                continue
            expanded = expand(text, self.home)
            at: Location = ("build", "ca_certificates", index)
            if isinstance(expanded, Refusal):
                self.add(at, expanded.what, expanded.fix, text)
                continue
            path = self.guard.probe.resolve(expanded)
            if self.guard.probe.kind(path) != "file":
                self.add(at, "not a file", "name a PEM file", text)
            inside = self.writable(tree, path)
            if inside is not None:
                self.add(at, f"lies in {inside}, where the agent could replace it", "move it elsewhere", text)
            found.append(path)
        self.ca_certificates = tuple(found)

    def _writable_places(self, tree: Mapping[str, Any]) -> list[str]:
        mounts = tree.get("mounts")
        project = mounts.get("project", "rw") if isinstance(mounts, dict) else "rw"
        places = [*map(str, self.rw)]
        if tree.get("mode", "run") != "daemon" and project != "ro":
            places.append(self.project)
        return places

    def writable(self, tree: Mapping[str, Any], path: str) -> str | None:
        """Return the directory an agent can write that ``path`` lies in."""
        return next((place for place in self._writable_places(tree) if is_within(path, place)), None)

    def _named(self, tree: Mapping[str, Any], word: str) -> str | None:
        """Return the directory an agent can write that an argument names, as a path or within a text."""
        for text in (word, word.partition("=")[2]):
            expanded = expand(text, self.home)
            inside = (
                None
                if isinstance(expanded, Refusal)
                else self.writable(tree, self.guard.probe.resolve(expanded))
            )
            if inside is not None:
                return inside
        return next((place for place in self._writable_places(tree) if place in word), None)

    def check_hooks(self, tree: Mapping[str, Any]) -> None:
        """Resolve the program of a hook: it runs on this host, so no agent may have written it."""
        hooks = tree.get("hooks")
        words = list(_texts(hooks.get("pre_launch"))) if isinstance(hooks, dict) else []
        if not words or any(word is None for word in words):
            return
        at: Location = ("hooks", "pre_launch", 0)
        expanded = expand(words[0] or "", self.home)
        if isinstance(expanded, Refusal):
            self.add(at, f"the program is {expanded.what}", expanded.fix)
            return
        path = self.guard.probe.resolve(expanded)
        if self.guard.probe.kind(path) != "file":
            self.add(at, "not a file", "name the program of this host by its whole path")
        inside = self.writable(tree, path)
        if inside is not None:
            self.add(at, f"lies in {inside}, where the agent could replace it", "move it elsewhere")
        for index, word in enumerate(words[1:], 1):
            inside = self._named(tree, word or "")
            if inside is not None:
                what = f"leads into {inside}, and what is there the agent can replace"
                self.add(
                    ("hooks", "pre_launch", index), what, "keep it elsewhere; the hook knows CORRAL_PROJECT"
                )
        self.pre_launch = (path, *(word or "" for word in words[1:]))

    def check_approvals(self, tree: Mapping[str, Any]) -> None:
        wanted = tree.get("approvals")
        if self.profile is None or self.options is None or wanted not in ("ask", "auto", "off"):
            return
        try:
            self.options = self.profile.with_approvals(self.options, wanted)
        except ValueError as error:
            self.add(("approvals",), str(error), "leave approvals out, or what it contradicts")

    def finding(self, finding: Finding) -> Problem:
        at: Location = ("mounts", finding.access, finding.index)
        return self.refused(at, finding.refusal)

    def add_refusal(self, at: Location, refusal: Refusal) -> None:
        self.problems.append(replace(self.refused(at, refusal), offending=None))

    def refused(self, at: Location, refusal: Refusal) -> Problem:
        _, mark = self.document.place(at)
        headline = refusal.what if refusal.sentence else None
        return Problem(at, refusal.what, mark.text, refusal.fix, mark.line, mark.column, headline)

    def add(self, at: Location, what: str, fix: str | None = None, offending: str | None = None) -> None:
        _, mark = self.document.place(at)
        shown = shown_text(at, mark.text if offending is None and at else offending)
        self.problems.append(Problem(at, what, shown, fix, mark.line, mark.column))


def _texts(value: Any) -> Iterator[str | None]:
    """Yield the entries of a list of texts, None for each that is something else; nothing for a non-list."""
    if isinstance(value, list):
        for entry in value:
            yield entry if isinstance(entry, str) else None


def _without_nulls(tree: dict[str, Any], at: Location = ()) -> dict[str, Any]:
    """Return the tree without known keys that have no value, such as a section whose lines are all comments.

    A key that nobody knows stays, and is reported.
    """
    known = known_keys(at)
    return {
        key: _without_nulls(value, (*at, key))
        if isinstance(value, dict) and key != "profile_options"
        else value
        for key, value in tree.items()
        if value is not None or key not in known
    }
