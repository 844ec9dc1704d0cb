"""One invocation of a command: who, where, which policy, and the two services it talks to."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral import __version__, oserrors, process, rootless
from corral.console import Console
from corral.membership import Membership, membership, writer_problem
from corral.user import User, check_same, current_user
from policy import holding, versions
from policy.errors import ArgumentError, CorralError, EnforcerError
from policy.identity import StatePaths, data_home, state_paths
from policy.loader import LoadedPolicy, find, guard, load
from policy.mounts import Guard
from policy.records import dataclass
from policy.schema import is_image

if TYPE_CHECKING:
    from docker.api.client import APIClient

    from corral.early import Early
    from corral.later import Later
    from enforcer.client import Client, Config

# Also what is defined where less is imported.
__all__ = ["Invocation", "User", "check_same", "current_user"]

_ZONEINFO = re.compile(r"(?:.*/)?zoneinfo/(?:posix/|right/)?(.+)")
IMAGE_VARIABLE = "CORRAL_SANDBOX_IMAGE"
_GIT_KEYS = ("name", "email")


def time_zone(environ: Mapping[str, str], localtime: Path = Path("/etc/localtime")) -> str:
    """Return the name of the user's time zone, or nothing."""
    if environ.get("TZ"):
        return environ["TZ"].removeprefix(":")
    try:
        match = _ZONEINFO.fullmatch(str(localtime.readlink()))
    except OSError:
        return ""
    return match.group(1) if match else ""


def parse_git_identity(output: str) -> dict[str, str]:
    """Return name and email from ``git config --null --get-regexp``; the last value of a key counts."""
    found = {}
    for entry in output.split("\0"):
        key, _, value = entry.partition("\n")
        short = key.removeprefix("user.")
        if short in _GIT_KEYS and value and value.isprintable():
            found[short] = value
    return found


def git_identity(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the user's Git name and email; nothing when Git is not there or does not know them."""
    argv = ("git", "config", "--global", "--includes", "--null", "--get-regexp", r"^user\.(name|email)$")
    try:
        done = process.run(argv, environ=environ, timeout=10, check=False)
    except process.ProgramError:
        return {}
    return parse_git_identity(done.stdout) if done.code == 0 else {}


def new_session() -> str:
    """Return a fresh session id: eight hex digits."""
    return secrets.token_hex(4)


def with_image(loaded: LoadedPolicy, image: str) -> LoadedPolicy:
    """Return a policy with the image that the environment names: to be approved like one in the file.

    Raises:
        ArgumentError: it is no image reference.
    """
    if not is_image(image):
        raise ArgumentError(
            f"{IMAGE_VARIABLE} is not an image reference", "write NAME:TAG or NAME@sha256:DIGEST"
        )
    return replace(loaded, policy=loaded.policy.model_copy(update={"image": image}))


@dataclass(frozen=True)
class Invocation:
    """See the module. Everything expensive is made when it is first asked for.

    ``accepted`` is the hash of a policy that its user named, ``ask`` puts a question to the user; None: there
    is none. ``early``, ``served``: the engine and the host service were asked for their versions already.
    """

    user: User
    cwd: Path
    console: Console
    accepted: str | None = None
    ask: Callable[[str], bool] | None = None
    early: Early | None = None
    served: Later[dict[str, Any]] | None = None

    @cached_property
    def loaded(self) -> LoadedPolicy:
        """The project's policy; PolicyError when there is none or it is invalid."""
        from corral import state

        user = self.user
        found = load(find(self.cwd), home=user.home, environ=dict(user.environ), uid=user.uid)
        state.refuse_another(data_home(user.home, dict(user.environ)), found.sandbox, found.project)
        image = self.user.environ.get(IMAGE_VARIABLE)
        return found if not image else with_image(found, image)

    @cached_property
    def approved(self) -> LoadedPolicy:
        """The project's policy, for what builds, starts or executes: its user has approved it.

        Raises:
            PolicyError: there is none, it is invalid, or it allows more than was approved.
            CorralError: the approval cannot be recorded.
        """
        from corral import approval

        loaded = self.loaded
        approval.approve(
            loaded,
            self.read_paths,
            accepted=self.accepted,
            ask=self.ask,
            tell=self.console.tell,
            # The state directory is made when there is something to record, not by looking.
            record=lambda found: approval.write(self.paths, found, loaded),
        )
        return loaded

    @property
    def guard(self) -> Guard:
        """What refuses mounts, with the file system as it is now."""
        return guard(self.user.home, dict(self.user.environ))

    @property
    def read_paths(self) -> StatePaths:
        """Where the sandbox keeps its files; nothing is made.

        Raises:
            CorralError: they are a newer corral's.
        """
        return StatePaths(self.data / self.loaded.sandbox.id)

    @cached_property
    def paths(self) -> StatePaths:
        """Where the sandbox keeps its files, for a command that writes there.

        Raises:
            CorralError: they are a newer corral's.
        """
        versions.open_state(self.data, __version__)
        return state_paths(self.user.home, dict(self.user.environ), self.loaded.sandbox)

    @cached_property
    def in_use(self) -> int:
        """What says, from now until this process ends, that somebody works with the sandbox.

        Raises:
            CorralError: the disk refuses.
        """
        file = self.paths.in_use
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return holding.share(file)
        except OSError as error:
            why = f"cannot open the lock {file}: {error.strerror}"
            raise CorralError(why, oserrors.hint(error)) from error

    @cached_property
    def data(self) -> Path:
        """Where corral keeps the files of all the user's sandboxes.

        Raises:
            CorralError: they are a newer corral's.
        """
        found = data_home(self.user.home, dict(self.user.environ))
        versions.check_state(found, __version__)
        return found

    @cached_property
    def api(self) -> APIClient:
        """The Docker Engine of this machine."""
        from corral.engine import connect

        return connect(self.user.environ, early=self.early)

    @cached_property
    def architecture(self) -> str:
        """What the engine calls the architecture of its images.

        Raises:
            EngineError: Docker does not answer.
        """
        from corral.engine import base_url, errors

        told = self.early.answer(base_url(self.user.environ)) if self.early is not None else None
        if told is not None:
            return told.architecture
        with errors("asking Docker for its architecture"):
            return str(self.api.version()["Arch"])

    @cached_property
    def enforcer(self) -> Client:
        """The host service; nothing is asked yet."""
        from enforcer.client import Client, socket_path

        return Client(socket_path(self.user.environ))

    @cached_property
    def config(self) -> Config:
        """The host service's configuration."""
        from enforcer.client import load_config

        return load_config(self.user.home, self.user.environ)

    def with_identity(self) -> User:
        """Return the user with what a session takes along: time zone, Git name and email."""
        environ = self.user.environ
        return replace(self.user, git=git_identity(environ), zone=time_zone(environ))

    def check_enforcer(self) -> None:
        """Refuse to go on unless something would be enforced.

        Raises:
            EnforcerError: the service does not run, its version or the writer's does not fit, or it cannot
                reach the kernel.
        """
        answer = self.served.result() if self.served is not None else self.enforcer.version()
        if answer.get("rootless", False) != self.user.rootless:
            kinds = {True: "your own (rootless) engine", False: "the system's engine"}
            raise EnforcerError(
                f"corral would use {kinds[self.user.rootless]}, and the enforcer watches "
                f"{kinds[not self.user.rootless]}, so nothing would be enforced",
                "corral install, which asks the engine that docker would use now",
            )
        if self.user.rootless:
            rootless.daemon(self.user.environ)
        check_versions(answer, membership(self.user.uid))


def check_versions(answer: Mapping[str, Any], found: Membership) -> None:
    """Compare the enforcer's answer with this program, and insist on the writer.

    Args:
        answer: its ``version``.
        found: the user's membership in group docker.

    Raises:
        EnforcerError: versions that do not fit, or the writer cannot be reached.
    """
    check_same(answer)
    problem = writer_problem(answer, found)
    if problem is not None:
        raise EnforcerError(*problem)
