"""``corral prune``: look for what nobody looks after any more, and remove it, in eight seconds at most.

The same at each start of the host service, with nobody there to be told: ``corral-sweep.service``.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from corral import inventory, process, relay, state, sweeping, trees
from corral.engine import container_name, errors
from corral.pruned import Outcome, Thing, planned
from corral.sessions import DAEMON
from corral.sweeping import Container, Directory, Found, Image, Network, Plan
from corral.user import User
from policy import holding, proxying
from policy.declaration import LABEL_PURPOSE, LABEL_SANDBOX, LABEL_SERVICE, LABEL_SESSION, LABEL_UID
from policy.errors import CorralError, EnforcerError, EngineError, EngineGoneError, PolicyError
from policy.identity import SANDBOX_ID, SESSION_ID, Sandbox, StatePaths
from policy.loader import FILE, load

if TYPE_CHECKING:
    from docker.api.client import APIClient

    from enforcer.client import Client

SECONDS = 8.0
# What Python and a last answer may take of them.
MARGIN = 1.0
# Of what the command took before it came here, the most that is counted: something is to be done at all.
LONGEST = 2.0
# Of them, how long one question to Docker may take, and how long what runs has to end by itself.
ANSWER, GRACE, PAUSE = 3.0, 3.0, 0.1
RELAYS = "corral-relay-*"
LATE = f"not done within {SECONDS:g} s; corral prune goes on with it"


class LateError(CorralError):
    """The time is over."""


class Prune:
    """One run of the command.

    Args:
        user: whose leftovers are meant.
        data: where that user's sandboxes have their files.
        api: the engine.
        enforcer: the host service, told what ended; it may be gone.
        ended: called with a session whose files go: where they are, and its id.
        spent: seconds of the time that are over already.
        clock, sleep: seconds, monotonic.
    """

    def __init__(
        self,
        user: User,
        data: Path,
        api: APIClient,
        enforcer: Client,
        ended: Callable[[StatePaths, str], None] = lambda _, __: None,
        *,
        spent: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._user, self._data, self._api, self._enforcer = user, data, api, enforcer
        self._clock, self._sleep, self._ended = clock, sleep, ended
        self.begin(spent)

    def begin(self, spent: float = 0.0) -> None:
        """Let the time begin now: a person was asked meanwhile. ``spent``: or so many seconds ago."""
        self._end = self._clock() + SECONDS - MARGIN - min(spent, LONGEST)

    def _left(self) -> float:
        left = self._end - self._clock()
        if left <= 0:
            raise LateError(LATE)
        return left

    @contextlib.contextmanager
    def _asking(self, doing: str) -> Iterator[None]:
        self._api.timeout = max(1, int(min(self._left(), ANSWER)))
        with errors(doing):
            yield

    # -- looking

    def look(self, *, images: bool) -> Found:
        """Return what there is.

        Raises:
            EngineError: Docker does not answer.
            LateError: the time is over.
        """
        # Directories first: a session that begins after this is in no list, or is held.
        directories = list(self._directories())
        containers = list(self._containers())
        networks = list(self._networks())
        sandboxes = {
            *self._sandboxes(),
            *(one.sandbox for one in directories),
            *(one.sandbox for one in containers),
            *(one.sandbox for one in networks),
        }
        found = Found(
            containers=tuple(containers),
            networks=tuple(networks),
            relays=tuple(self._relays()),
            directories=tuple(directories),
            busy=frozenset(one for one in sandboxes if self._busy(one)),
            known=frozenset(self._sandboxes()),
        )
        return self._with_images(found, sandboxes) if images else found

    def _sandboxes(self) -> Iterator[str]:
        with contextlib.suppress(OSError):
            for path in sorted(self._data.iterdir()):
                if SANDBOX_ID.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                    yield path.name

    def _paths(self, sandbox: str) -> StatePaths:
        return StatePaths(self._data / sandbox)

    def _directories(self) -> Iterator[Directory]:
        for sandbox in self._sandboxes():
            with contextlib.suppress(OSError):
                for path in sorted((self._paths(sandbox).root / "sessions").iterdir()):
                    if SESSION_ID.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                        yield Directory(sandbox, path.name, self._held(sandbox, path.name))

    def _held(self, sandbox: str, session: str) -> bool:
        with holding.unheld(self._paths(sandbox).session(session)) as free:
            return not free

    def _busy(self, sandbox: str) -> bool:
        with holding.idle(self._paths(sandbox).in_use) as nobody:
            return not nobody

    def _containers(self) -> Iterator[Container]:
        with self._asking("listing containers"):
            rows = self._api.containers(all=True, filters={"label": [f"{LABEL_UID}={self._user.uid}"]})
        for row in rows:
            labels = row.get("Labels") or {}
            sandbox, session = str(labels.get(LABEL_SANDBOX)), str(labels.get(LABEL_SESSION))
            if not (SANDBOX_ID.fullmatch(sandbox) and SESSION_ID.fullmatch(session)):
                continue
            name, service = container_name(row), str(labels.get(LABEL_SERVICE))
            # The whole name, not a part of it: what merely says "corral" is somebody else's.
            if name != Sandbox(sandbox).container(service, session):
                continue
            files = self._paths(sandbox).session(session)
            yield Container(
                str(row["Id"]),
                name,
                sandbox,
                session,
                str(row.get("State")),
                held=self._held(sandbox, session),
                kept=(files / holding.KEPT).exists(),
                left=(files / holding.LEFT).exists(),
                always_on=labels.get(LABEL_PURPOSE) == DAEMON,
                proxy=service == proxying.SERVICE,
            )

    def _networks(self) -> Iterator[Network]:
        with self._asking("listing networks"):
            rows = self._api.networks(filters={"label": [f"{LABEL_UID}={self._user.uid}"]})
        for row in rows:
            sandbox = str((row.get("Labels") or {}).get(LABEL_SANDBOX))
            if SANDBOX_ID.fullmatch(sandbox) and row.get("Name") == Sandbox(sandbox).network:
                yield Network(str(row["Id"]), str(row["Name"]), sandbox)

    def _relays(self) -> Iterator[str]:
        done = self._systemctl("list-units", "--all", "--plain", "--no-legend", "--no-pager", RELAYS)
        for line in done.splitlines():
            if sweeping.RELAY.fullmatch(unit := (line.split() or [""])[0]):
                yield unit

    def _systemctl(self, *words: str) -> str:
        """Ask the user's manager; without one no relay can run."""
        environ = relay.environment(self._user.environ, self._user.uid)
        try:
            done = process.run(
                ("systemctl", "--user", *words),
                environ=environ,
                check=False,
                timeout=min(self._left(), ANSWER),
            )
        except process.ProgramError:
            return ""
        return done.stdout if done.code == 0 else ""

    def _with_images(self, found: Found, sandboxes: set[str]) -> Found:
        with self._asking("listing images"):
            rows = inventory.images(self._api)
        images, strange = [], 0
        for row in rows:
            if len(row.sandboxes) == 1 and row.sandboxes <= sandboxes:
                images.append(Image(row.names, next(iter(row.sandboxes)), bool(row.tags)))
            elif not row.sandboxes and not row.tags:
                strange += 1
        wanted = frozenset(one for one in sandboxes if self._wanted(one))
        return replace(found, images=tuple(images), strange=strange, wanted=wanted)

    def _wanted(self, sandbox: str) -> bool:
        """Say whether the policy of a sandbox's directory makes it; where nobody can tell, it does."""
        try:
            project = state.project_of(self._paths(sandbox))
        except OSError:
            return True
        try:
            (project / FILE).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        environ = dict(self._user.environ)
        try:
            found = load(project / FILE, home=self._user.home, environ=environ, uid=self._user.uid)
        except PolicyError:
            return True
        return found.sandbox.id == sandbox

    # -- removing

    def carry_out(self, plan: Plan, tell: Callable[[str], None]) -> Outcome:
        """Remove what is planned, each told when it is gone; what cannot be removed is in ``left``."""
        outcome = Outcome(kept=list(plan.kept))
        steps: list[tuple[Thing, Callable[[], str | None]]] = []
        for one in plan.containers:
            steps.append((Thing("container", one.name, one.sandbox), partial(self._container, one)))
        for unit in plan.relays:
            sandbox = self._sandbox_of(unit, plan)
            steps.append((Thing("relay", unit, sandbox), partial(self._relay, unit, sandbox)))
        for net in plan.networks:
            steps.append((Thing("network", net.name, net.sandbox), partial(self._network, net)))
        for place in plan.directories:
            name = str(self._paths(place.sandbox).session(place.session))
            steps.append((Thing("session", name, place.sandbox), partial(self._directory, place)))
        for image in plan.images:
            name = ", ".join(image.names)
            steps.append((Thing("image", name, image.sandbox), partial(self._image, image)))
        with contextlib.suppress(CorralError):
            self._end_running(plan)
        for thing, remove in steps:
            try:
                self._left()
                why = remove()
            except CorralError as error:
                why = error.message
            if why is None:
                outcome.removed.append(thing)
                tell(f"removed {thing.line()}")
            elif why:
                outcome.left.append(Thing(thing.kind, thing.name, thing.sandbox, why))
        return outcome

    def _sandbox_of(self, unit: str, plan: Plan) -> str:
        known = {*self._sandboxes(), *(one.sandbox for one in plan.networks)}
        known |= {one.sandbox for one in plan.containers}
        match = sweeping.RELAY.fullmatch(unit)
        return next((one for one in known if match and Sandbox(one).token == match[1]), "")

    def _end_running(self, plan: Plan) -> None:
        """Ask all that run to end, together, and wait for it."""
        from docker.errors import APIError

        for one in plan.running:
            with self._asking(f"ending {one.name}"), contextlib.suppress(APIError):
                if one.state == "paused":
                    self._api.unpause(one.ident)
                self._api.kill(one.ident, "SIGTERM")
        until = self._clock() + GRACE
        wanted = {one.ident for one in plan.running}
        while self._clock() < until:
            with self._asking("listing containers"):
                rows = self._api.containers(filters={"label": [f"{LABEL_UID}={self._user.uid}"]})
            if not wanted & {str(row["Id"]) for row in rows}:
                return
            self._sleep(PAUSE)

    def _container(self, one: Container) -> str | None:
        """Remove a container; None: it is gone. A text says why not; an empty one: it is no leftover now."""
        from docker.errors import APIError, NotFound

        with contextlib.ExitStack() as stack:
            if one.proxy and not (stack.enter_context(self._idle(one.sandbox)) and self._unneeded(one)):
                return ""
            if not one.running and not stack.enter_context(
                holding.unheld(self._paths(one.sandbox).session(one.session))
            ):
                return ""
            with self._asking(f"removing {one.name}"):
                try:
                    self._api.remove_container(one.ident, v=True, force=one.running)
                except NotFound:
                    pass
                except APIError as error:
                    if error.status_code != 409:
                        raise
                    # Started again since, which makes it none; or somebody is removing it at this moment.
                    if "already in progress" not in str(error.explanation):
                        return ""
        with contextlib.suppress(EnforcerError):
            self._enforcer.withdraw(one.ident)
        return None

    def _unneeded(self, proxy: Container) -> bool:
        """Look again whether no session of the sandbox runs, now that nobody can start one."""
        wanted = [f"{LABEL_UID}={self._user.uid}", f"{LABEL_SANDBOX}={proxy.sandbox}"]
        with self._asking("listing containers"):
            rows = self._api.containers(filters={"label": wanted})
        return {str(row["Id"]) for row in rows} <= {proxy.ident}

    @contextlib.contextmanager
    def _idle(self, sandbox: str) -> Iterator[bool]:
        """Wait, as long as there is time, for commands whose session has just been ended."""
        while True:
            with holding.idle(self._paths(sandbox).in_use) as nobody:
                if nobody or self._end - self._clock() < GRACE:
                    yield nobody
                    return
            self._sleep(PAUSE)

    def _relay(self, unit: str, sandbox: str) -> str | None:
        with self._idle(sandbox) if sandbox else contextlib.nullcontext(True) as nobody:
            if not nobody:
                return ""
            self._systemctl("stop", unit)
            return None if unit not in set(self._relays()) else "systemd did not stop it"

    def _network(self, net: Network) -> str | None:
        from docker.errors import APIError, NotFound

        with self._idle(net.sandbox) as nobody:
            if not nobody:
                return ""
            with self._asking(f"removing the network {net.name}"):
                try:
                    self._api.remove_network(net.ident)
                except NotFound:
                    return None
                except APIError as error:
                    if error.status_code in (403, 409):
                        return f"something is on it: {error.explanation}"
                    raise
        return None

    def _directory(self, place: Directory) -> str | None:
        path = self._paths(place.sandbox).session(place.session)
        until = self._end
        while True:
            with holding.unheld(path) as free:
                if free:
                    if self._has_container(place):
                        return ""
                    if self._left() < GRACE:
                        # To say what it changed takes a moment, and without that nothing of it goes.
                        return LATE
                    self._ended(self._paths(place.sandbox), place.session)
                    trees.remove(path, late=lambda: self._clock() > until)
                    break
            # A command whose session was ended above is removing it.
            if self._end - self._clock() < GRACE:
                return ""
            self._sleep(PAUSE)
        if not path.exists():
            return None
        return LATE if self._clock() > until else f"look at it: ls -lR {path}"

    def _has_container(self, place: Directory) -> bool:
        """Look again now that nobody can start one: it may have been left running since the list was made."""
        wanted = [f"{LABEL_UID}={self._user.uid}", f"{LABEL_SESSION}={place.session}"]
        with self._asking("listing containers"):
            return bool(self._api.containers(all=True, filters={"label": wanted}))

    def _image(self, image: Image) -> str | None:
        self._api.timeout = max(1, int(self._left()))
        return None if inventory.remove_names(self._api, image.names) else "a container uses it"


def age(proc: Path = Path("/proc/self/stat")) -> float:
    """Return for how many seconds this process has been there: a busy machine takes its time to import it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name before it may hold spaces and brackets. Field 22: ticks since the boot.
        fields = proc.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    return 0.0


def prune(
    user: User,
    data: Path,
    connect: Callable[[Mapping[str, str], int], APIClient],
    enforcer: Client,
    *,
    running: bool = False,
    images: bool = False,
    unattended: bool = False,
    dry_run: bool = False,
    tell: Callable[[str], None],
    ask: Callable[[str], bool] | None = None,
    ended: Callable[[StatePaths, str], None] = lambda _, __: None,
) -> Outcome:
    """Do ``corral prune``.

    Args:
        user, data, enforcer, ended: see ``Prune``.
        connect: returns a client of the engine; of the environment, and with seconds for each request.
        running, images: see ``sweeping.decide``.
        unattended: decide as ``sweeping.unattended`` instead.
        dry_run: change nothing.
        tell: gets a line for each thing that was removed.
        ask: asked before anything that runs is ended; None: it need not be.

    Raises:
        EngineError: Docker may not be used, or refused to say what there is.
    """
    try:
        api = connect(user.environ, int(ANSWER))
    except EngineGoneError as error:
        return Outcome(dry_run, error.message)
    with contextlib.closing(api):
        work = Prune(user, data, api, enforcer, ended, spent=age())
        try:
            found = work.look(images=images)
        except EngineGoneError as error:
            return Outcome(dry_run, error.message)
        except LateError as error:
            raise EngineError("Docker answers too slowly", "systemctl status docker") from error
        if unattended:
            plan = sweeping.unattended(found)
        else:
            plan = sweeping.decide(found, running=running, images=images)
        if dry_run:
            things = planned(plan, lambda sandbox: StatePaths(data / sandbox))
            return Outcome(True, None, things, kept=list(plan.kept))
        if plan.running and ask is not None:
            names = ", ".join(one.name for one in plan.running)
            if not ask(f"end what runs in {names}?"):
                raise CorralError("nothing was removed")
            work.begin()
        return work.carry_out(plan, tell)
