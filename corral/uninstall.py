"""``corral uninstall``: take away what ``corral install`` and the sandboxes of this user put on the host.

In an order in which nothing opens: what runs in sandboxes ends first, then their networks go, then the
enforcer, and only when no bridge of a sandbox is left the rules. The policy is not read, the enforcer is not
asked.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral import __version__, answers, inventory, leaving, process, relay, rootless, trees
from corral.install import SWEEP_UNIT, USER_UNIT
from corral.installer import common
from corral.installer.bundle import program
from corral.installer.elevate import as_root, inside
from corral.installer.removal import LINKS, bridges
from corral.installrootless import CODE, DROP_IN, ENGINE_UNIT, WRITER_UNIT
from corral.inventory import Inventory
from corral.leaving import Leaving, Survey
from corral.units import PREFIX
from corral.user import user_units
from enforcer.client import config_directory, runtime_directory
from policy import versions
from policy.errors import CorralError, EngineError, InstallError
from policy.identity import SANDBOX_ID, data_home

if TYPE_CHECKING:
    from docker.api.client import APIClient

    from corral.session import User

RELAYS = "corral-relay-*"
NOTHING = "nothing of corral is installed for you"


def in_namespace(text: str, environ: Mapping[str, str], again: str) -> dict[str, Any]:
    """Run a program in the namespaces of the user's own engine."""
    from enforcer.client import enter, running_daemon

    daemon = running_daemon(rootless.runtime(environ))
    if daemon is None:
        # Its namespace went with it, and the rules with that.
        return {}
    return inside(enter(daemon), text, environ, again)


class Uninstall:
    """One run of the command.

    Args:
        connect: returns the engine's client, or raises EngineError.
        echo: takes what is told while it is done; ``tell`` from then on.
    """

    def __init__(
        self,
        user: User,
        connect: Callable[[], APIClient],
        *,
        echo: Callable[[str], None],
        places: common.Places | None = None,
        elevate: Callable[[str, Mapping[str, str], str], dict[str, Any]] = as_root,
        enter: Callable[[str, Mapping[str, str], str], dict[str, Any]] = in_namespace,
    ) -> None:
        self._enter = enter
        self._user = user
        self._connect = connect
        self.tell = echo
        self._places = common.Places() if places is None else places
        self._elevate = elevate
        self._environ = relay.environment(user.environ, user.uid)
        self._config = config_directory(user.home, user.environ)
        self._data = data_home(user.home, dict(user.environ))

    @property
    def uid(self) -> int:
        """Whose corral it is."""
        return self._user.uid

    def survey(self) -> Survey:
        """Look at everything; needs no privilege and changes nothing."""
        docker, silent = self._docker()
        users = common.users(self._places)
        # The system part is not of an engine of the user's own, unless both were installed.
        system = self._user.uid in users or not self._rootless()
        uids = docker.uids if docker is not None else frozenset()
        return Survey(
            uid=self._user.uid,
            docker=docker,
            silent=silent,
            others=users if system else {},
            accounts=frozenset(uid for uid in uids if _has_account(uid)),
            own=frozenset(self._sandboxes()),
            relays=tuple(self._relays()),
            user_files=tuple(self._user_files()),
            system=tuple(common.traces(self._places)) if system else (),
            state=_existing(self._data),
            settings=_existing(self._config),
            attached=tuple(self._attached()),
            rootless=self._rootless() and rootless.pid(self._environ) is not None,
            apart=not system,
        )

    def _docker(self) -> tuple[Inventory | None, str]:
        try:
            api = self._connect()
            with contextlib.closing(api):
                return inventory.take(api), ""
        except EngineError as error:
            return None, error.message

    def _sandboxes(self) -> list[str]:
        try:
            return [path.name for path in self._data.iterdir() if SANDBOX_ID.fullmatch(path.name)]
        except OSError:
            return []

    def _relays(self) -> list[str]:
        done = self._systemctl("list-units", "--all", "--plain", "--no-legend", "--no-pager", RELAYS)
        return sorted(line.split()[0] for line in done.splitlines() if line.split())

    def _user_files(self) -> list[Path]:
        units = user_units(self._user.home, self._user.environ)
        found = []
        for name in (USER_UNIT, SWEEP_UNIT):
            found += [units / name, units / f"{name}.d"]
            with contextlib.suppress(OSError):
                found += [*units.glob(f"*.wants/{name}"), *units.glob(f"*.requires/{name}")]
        for pattern in (f"{PREFIX}*", f"*.wants/{PREFIX}*"):
            with contextlib.suppress(OSError):
                found += sorted(units.glob(pattern))
        if self._rootless():
            dropped_in = units / f"{ENGINE_UNIT}.d" / DROP_IN
            found += [dropped_in, units / WRITER_UNIT, units / f"{WRITER_UNIT}.d", self._data / CODE]
            with contextlib.suppress(OSError):
                found += [*units.glob(f"*.wants/{WRITER_UNIT}")]
        found.append(runtime_directory(self._environ))
        return [path for path in found if os.path.lexists(path)]

    def _rootless(self) -> bool:
        """Whether corral is, or if anything was, installed for an engine of the user's own.

        Somebody may have removed any of its files, or all of them, and the rules are there still.
        """
        units = user_units(self._user.home, self._user.environ)
        files = (units / WRITER_UNIT, units / f"{ENGINE_UNIT}.d" / DROP_IN, self._data / CODE)
        if any(os.path.lexists(path) for path in files):
            return True
        return not common.traces(self._places) and rootless.chosen(self._environ)

    def _attached(self) -> list[str]:
        done = process.run(LINKS, environ=self._environ, hint="sudo apt install iproute2")
        return [name for name, ports in bridges(done.stdout).items() if ports]

    def _systemctl(self, *words: str) -> str:
        """Ask the user's manager; without one there is nothing to ask about."""
        try:
            done = process.run(
                ("systemctl", "--user", *words), environ=self._environ, check=False, timeout=60
            )
        except process.ProgramError:
            return ""
        return done.stdout if done.code == 0 else ""

    def check(self, plan: Leaving, *, force: bool) -> None:
        """Refuse before anything is touched.

        Raises:
            CorralError: sandboxes run, or the state to purge is a newer corral's.
        """
        problem = leaving.refusal(plan, force=force)
        if problem is not None:
            raise InstallError(*problem)
        if plan.purged:
            versions.check_state(self._data, __version__)

    def carry_out(self, plan: Leaving) -> list[str]:
        """Do it; return what the program for root says it removed.

        Raises:
            InstallError, EngineError, CorralError: a step failed. What is left still denies, and the command
                can be repeated.
        """
        self._end_sandboxes(plan)
        self._stop_enforcer(plan)
        if plan.containers or plan.networks or plan.user_files:
            # What was started while we were at it, before the enforcer ended.
            again = leaving.decide(self.survey(), force=False, purge=False)
            if again.containers or again.networks:
                self._end_sandboxes(again)
        removed: list[str] = []
        if plan.inside:
            text = program("corral.installer.removal", {"inside": True})
            answer = self._enter(text, self._environ, "corral uninstall")
            removed += [str(name) for name in answer.get("removed", ())]
        if plan.system:
            payload = {"uid": self._user.uid, "others": list(plan.others), "purge": bool(plan.purged)}
            text = program("corral.installer.removal", payload)
            answer = self._elevate(text, self._environ, "corral uninstall")
            removed += [str(name) for name in answer.get("removed", ())]
            users = answer.get("others") or {}
            if plan.rules and users:
                names = ", ".join(f"{name} (uid {uid})" for uid, name in users.items())
                self.tell(f"the system part stays: {names} uses corral too")
        for path in plan.purged:
            purge(path)
        return removed

    def _end_sandboxes(self, plan: Leaving) -> None:
        if any(path.name.startswith(PREFIX) for path in plan.user_files):
            # What would start an agent again goes first.
            self._systemctl("stop", f"{PREFIX}*")
        if plan.containers or plan.networks or plan.images:
            with contextlib.closing(self._connect()) as api:
                for container in plan.containers:
                    inventory.end(api, container)
                for network in plan.networks:
                    for name in inventory.remove_network(api, network):
                        self.tell(f"disconnected from {network.name}: {name}")
                for image in plan.images:
                    if not inventory.remove_image(api, image):
                        self.tell(f"kept, because something uses it: {', '.join(image.names)}")
        self._stop_relays(plan)

    def _stop_relays(self, plan: Leaving) -> None:
        if plan.relays:
            self._systemctl("stop", RELAYS)

    def _stop_enforcer(self, plan: Leaving) -> None:
        if not plan.user_files:
            return
        units = (SWEEP_UNIT, USER_UNIT, *((WRITER_UNIT,) if self._rootless() else ()))
        for unit in units:
            self._systemctl("disable", "--now", unit)
            # One whose file somebody removed cannot be disabled, and goes on.
            self._systemctl("stop", unit)
        for path in plan.user_files:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            # The directory of a drop-in, which may hold others, and that of what our own service pulls in.
            with contextlib.suppress(OSError):
                if path.name == DROP_IN or path.parent.name == f"{USER_UNIT}.wants":
                    path.parent.rmdir()
        self._systemctl("daemon-reload")
        for unit in (SWEEP_UNIT, USER_UNIT):
            self._systemctl("reset-failed", unit)


def purge(path: Path) -> None:
    """Remove a directory of the user's, whatever an agent did to the modes below it.

    Raises:
        CorralError: something is left.
    """
    trees.remove(path)
    if os.path.lexists(path):
        raise CorralError(f"{path} could not be removed", f"look at it: ls -lR {path}")


def _existing(path: Path) -> tuple[Path, ...]:
    return (path,) if os.path.lexists(path) else ()


def _has_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def uninstall(
    command: Uninstall,
    *,
    echo: Callable[[str], None],
    dry_run: bool = False,
    as_json: bool = False,
    assume_yes: bool = False,
    force: bool = False,
    purge_state: bool = False,
) -> None:
    """Do ``corral uninstall``.

    Raises:
        InstallError: refused (nothing has been removed), or a step failed.
    """
    if command.uid == 0:
        raise InstallError(
            "corral is uninstalled by the user who installed it, not by root",
            "as that user: corral uninstall; it calls sudo for what needs it",
        )
    found = command.survey()
    plan = leaving.decide(found, force=force, purge=purge_state)
    if plan.nothing:
        told = leaving.body(plan, done=True)
        lines = [NOTHING, *(f"  kept: {kept.what}: {kept.why}" for kept in plan.kept)]
        echo(answers.text(told) if as_json else "\n".join(lines))
        return
    if dry_run:
        echo(answers.text(leaving.body(plan, done=False)) if as_json else leaving.text(plan))
        return
    if not as_json:
        echo(leaving.text(plan))
    command.check(plan, force=force)
    if not assume_yes:
        _confirm(command.tell if as_json else echo)
    removed = command.carry_out(plan)
    if as_json:
        echo(answers.text(leaving.body(plan, done=True, removed=removed)))
    else:
        echo("done; the program itself goes with: pipx uninstall corral")


def _confirm(echo: Callable[[str], None]) -> None:
    if not sys.stdin.isatty():
        raise InstallError("nothing has been removed: nobody can be asked here", "corral uninstall --yes")
    echo("go on? [y/N]")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise InstallError("nothing has been removed")
