"""The proxy of a sandbox: one container beside its sessions, there as long as one of them needs it.

Whoever starts a session ensures it, and whoever ends the last one removes it; both under one lock. A session
whose container is not there yet is known by a second lock, which its command line shares from before it looks
for the proxy. One that is used is never replaced, whatever became of the image since: that would cut its
sessions' streams.

Its id is the sandbox's own token, so that two cannot be, and what is left of one is found.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral import attended, engine, network, oserrors, relay, rootless, starting, state
from corral.later import Later, begin
from corral.proxyrows import ARGV, Found, current, of, serves, serving, session_of, users
from corral.session import GATE_VARIABLE, LOCALE, MOUNTS_VARIABLE, Outside, gate
from corral.subnets import Plan
from policy import holding, proxying
from policy.container import Limits, Mount, SessionSpec, create_body
from policy.declaration import Declaration
from policy.errors import CorralError, EnforcerError
from policy.identity import Sandbox, StatePaths
from policy.records import dataclass

if TYPE_CHECKING:
    from corral.context import Invocation

LOCK, USE = proxying.LOCK, proxying.USE
# What its first line says once it takes connections.
LISTENING = '"listening"'
READY_TIMEOUT = 15.0
# Seconds that a gate may take.
OPENING, PAUSE = 8.0, 0.1
# Seconds that the end of a session waits for another command; the service removes a proxy, too.
PATIENCE = 30.0


@dataclass(frozen=True)
class Needs:
    """What a proxy is made of, and for which session."""

    session: str
    image: str
    plan: Plan
    limits: Limits
    outside: Outside
    ipv6: bool


def spec(invocation: Invocation, needs: Needs, address: str, dial: tuple[str, int, int]) -> SessionSpec:
    """Return what the proxy's container is: a session's shape, without anything of the policy. Pure.

    Args:
        invocation: whose sandbox.
        needs: what it is made of.
        address: its own.
        dial: path, device and inode of the directory in which it finds the enforcer's socket.
    """
    loaded, user, paths = invocation.loaded, invocation.user, invocation.paths
    session = session_of(loaded.sandbox)
    path, device, inode = dial
    env = {
        "LANG": LOCALE,
        GATE_VARIABLE: gate(Declaration(), needs.outside),
        MOUNTS_VARIABLE: json.dumps([[proxying.DIAL_TARGET, device, inode]], separators=(",", ":")),
    }
    return SessionSpec(
        sandbox=loaded.sandbox,
        service=proxying.SERVICE,
        session=session,
        purpose=proxying.PURPOSE,
        uid=user.uid,
        gid=user.gid,
        image=needs.image,
        address=address,
        gateway=str(needs.plan.gateway),
        hosts_file=str(paths.hosts(session)),
        project=str(loaded.project),
        workdir="/",
        argv=ARGV,
        declaration=Declaration(),
        mounts=(Mount(path, proxying.DIAL_TARGET, read_only=True),),
        env=env,
        ipv6=needs.ipv6,
        limits=needs.limits,
        rootless=user.rootless,
    )


class Using:
    """A session's hold on the proxy of its sandbox, from before it looks for it."""

    def __init__(self, invocation: Invocation, needs: Needs) -> None:
        self._invocation, self._needs = invocation, needs
        self._held = _share(invocation.paths)
        self._ended = threading.Event()
        self._making = Later(self._ensure)

    def result(self) -> None:
        """Wait until the proxy takes connections.

        Raises:
            EngineError, EnforcerError, CorralError: it does not; nothing new of it is left.
        """
        self._making.result()

    def end(self, *, last: bool) -> None:
        """Let go of it; ``last``: and remove it when nobody else needs it.

        Raises:
            EngineError, CorralError: it cannot be removed.
        """
        # Nobody can interrupt this: who waits for its turn need not have it any more.
        self._ended.set()
        # It may be being made at this moment; what came of that was told, or does not matter any more.
        with contextlib.suppress(Exception):
            self._making.result()
        held, self._held = self._held, -1
        if held >= 0:
            os.close(held)
            if last:
                release(self._invocation, self._invocation.loaded.sandbox)

    def _ensure(self) -> None:
        invocation, needs = self._invocation, self._needs
        sandbox, paths = invocation.loaded.sandbox, invocation.paths
        with (
            network.locked(paths.root / LOCK, lambda: not self._ended.is_set()),
            invocation.console.step("proxy", minor=True),
        ):
            rows = engine.sandbox_containers(invocation.api, sandbox.id, invocation.user.uid)
            _refuse_service(rows, _alive(paths))
            found = of(rows, sandbox)
            if found is not None and serves(found, needs.plan):
                same = current(found, needs.image)
                if same or users(rows, _alive(paths), needs.session) or not _sole(self._held):
                    if not same:
                        invocation.console.detail("the proxy stays what it was: other sessions use it")
                    _relay(invocation, needs.plan, found.address)
                    # The service starts one again that has ended, and does not wait for it.
                    if found.young and not invocation.user.rootless:
                        listens(found.address)
                    return
            _remove(invocation, sandbox, found)
            _make(invocation, needs)


def release(invocation: Invocation, sandbox: Sandbox) -> None:
    """Remove the proxy of a sandbox, and its relay, unless a session needs it.

    Raises:
        EngineError, CorralError: it cannot be removed.
    """
    paths = StatePaths(invocation.data / sandbox.id)
    # As long as there is something of it, there is this.
    if not paths.session(session_of(sandbox)).exists():
        return
    with holding.idle(paths.root / USE) as nobody:
        # Who makes one uses it, and is not waited for.
        if not nobody:
            return
    until = time.monotonic() + PATIENCE
    with (
        network.locked(paths.root / LOCK, lambda: time.monotonic() < until),
        holding.idle(paths.root / USE) as nobody,
    ):
        if not nobody:
            return
        rows = engine.sandbox_containers(invocation.api, sandbox.id, invocation.user.uid)
        if not users(rows, _alive(paths)):
            _remove(invocation, sandbox, of(rows, sandbox))
            with contextlib.suppress(CorralError):
                _manager(invocation).stop(sandbox, proxying.PORT)


def refuse_beside_proxied(invocation: Invocation) -> None:
    """Refuse a service of the host on the proxy's port where sessions reach the proxy there.

    One relay is there: theirs would lead to the service, which their policy does not have.

    Raises:
        CorralError: a session of the sandbox needs its proxy, or is about to.
        EngineError: Docker does not answer.
    """
    sandbox, paths = invocation.loaded.sandbox, invocation.paths
    with holding.idle(paths.root / USE) as nobody:
        rows = engine.sandbox_containers(invocation.api, sandbox.id, invocation.user.uid)
        if not nobody or users(rows, _alive(paths)):
            raise CorralError(
                f"port {proxying.PORT} of the gateway leads to the proxy of sessions that run",
                "end them first, see corral ps; or let the host service listen on another port",
            )


def _refuse_service(rows: Sequence[Mapping[str, Any]], alive: Callable[[str], bool | None]) -> None:
    served = serving(rows, proxying.PORT, alive)
    if served:
        raise CorralError(
            f"session {served[0]} has a host service on port {proxying.PORT}, where the proxy would be",
            "it began under another policy: end it first, see corral ps",
        )


def _share(paths: StatePaths) -> int:
    try:
        return holding.share(paths.root / USE)
    except OSError as error:
        file = paths.root / USE
        raise CorralError(f"cannot open the lock {file}: {error.strerror}", oserrors.hint(error)) from error


def _sole(descriptor: int) -> bool:
    """Say whether nobody else shares a lock of ours. Under ``LOCK``: in between it is not ours."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return True


def _alive(paths: StatePaths) -> Callable[[str], bool | None]:
    return lambda session: attended.attended(paths.session(session))


def _manager(invocation: Invocation) -> relay.Manager:
    return relay.Manager(relay.environment(invocation.user.environ, invocation.user.uid))


def _relay(invocation: Invocation, plan: Plan, address: str) -> None:
    sandbox, environ = invocation.loaded.sandbox, invocation.user.environ
    own = None
    if invocation.user.rootless:
        own = rootless.daemon(environ)
        bridge = rootless.bridge_ifindex(environ, sandbox.bridge)
    else:
        bridge = relay.bridge_ifindex(sandbox)
    _manager(invocation).ensure([relay.to_proxy(sandbox, plan.gateway, bridge, address, own)])


def _remove(invocation: Invocation, sandbox: Sandbox, found: Found | None) -> None:
    """Remove a proxy and its files; None: what may be left of one."""

    def withdraw(ident: str) -> None:
        with contextlib.suppress(EnforcerError):
            invocation.enforcer.withdraw(ident)

    if found is not None:
        telling = begin(lambda: withdraw(found.ident))
        try:
            engine.remove_ended(invocation.api, found.ident)
        finally:
            telling.join()
    state.remove_session(StatePaths(invocation.data / sandbox.id), session_of(sandbox))


def _make(invocation: Invocation, needs: Needs) -> None:
    """Make a proxy and wait until it takes connections; else nothing of it is left."""
    api, paths, sandbox = invocation.api, invocation.paths, invocation.loaded.sandbox
    dial = dial_directory(paths.dial)
    session = session_of(sandbox)
    ident = ""
    leading: Later[None] | None = None
    try:
        state.create_session(paths, session, ())
        held = state.hold_session(paths, session, keep=False)
        try:
            with network.locked(paths.root / "addresses.lock"):
                address, _ = network.free_address(api, sandbox, needs.plan, paths.root / "address")
                made = spec(invocation, needs, str(address), (str(paths.dial), *dial))
                _create_hosts(made)
                best_effort = invocation.loaded.policy.limits.best_effort
                # What is discarded of limits is told of the session, which has the same.
                ident, _told = engine.create_container(
                    api, create_body(made), made.container, best_effort=best_effort
                )
        finally:
            os.close(held)
        leading = Later(lambda: _relay(invocation, needs.plan, made.address))
        invocation.enforcer.await_ready(ident, timeout=READY_TIMEOUT)
        start(invocation, ident)
        leading.result()
    except BaseException:
        if leading is not None:
            with contextlib.suppress(CorralError):
                leading.result()
        with contextlib.suppress(CorralError):
            # By name: a create that was cut off may have made it without telling its id.
            engine.remove_container(api, ident or sandbox.container(proxying.SERVICE, session))
            # As long as the container is there, so is what is mounted in it.
            state.remove_session(paths, session)
        raise


def _create_hosts(made: SessionSpec) -> None:
    from enforcer.client import create_hosts_file, render_hosts_file

    content = render_hosts_file(made.service, made.address, made.gateway, ())
    create_hosts_file(Path(made.hosts_file), content)


def start(invocation: Invocation, ident: str) -> None:
    """Start a proxy's container and wait until it takes connections.

    Raises:
        CorralError: it does not; with the lines that it said.
        EngineError: Docker refused.
    """
    lines: list[str] = []

    def show(text: str) -> None:
        lines.append(text)
        invocation.console.detail(f"proxy: {text}")

    fetched = threading.Event()
    fetched.set()
    container = engine.AttachedContainer(
        invocation.api, engine.base_url(invocation.user.environ), ident, stdin=False
    )
    with contextlib.closing(container), contextlib.closing(container.connect()) as connection:
        try:
            starting.start(
                container, connection, tty=False, fetched=fetched, show=show, early=0, ready=_listens
            )
        except CorralError as error:
            said = "".join(f"\n  | {text}" for text in lines)
            raise CorralError(
                f"the sandbox's proxy did not start: {error.message}{said}", error.hint
            ) from error


def _listens(lines: Sequence[str]) -> bool:
    return any(LISTENING in line for line in lines)


def listens(
    address: str,
    port: int = proxying.PORT,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> bool:
    """Wait until something takes connections there; False when nothing does within ``OPENING`` seconds."""
    until = clock() + OPENING
    while clock() < until:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
            return True
        sleep(PAUSE)
    return False


def dial_directory(directory: Path) -> tuple[int, int]:
    """Make the directory of the enforcer's socket, ours alone; return its device and inode.

    Raises:
        CorralError: something else is in its place, or the disk refuses.
    """
    try:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        descriptor = os.open(directory, state.DIRECTORY)
        try:
            found = os.fstat(descriptor)
            if found.st_uid == os.geteuid():
                os.fchmod(descriptor, 0o700)
                return found.st_dev, found.st_ino
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CorralError(
            f"cannot use the directory {directory}: {error.strerror}",
            oserrors.hint(error) or "it must be a plain directory of yours; look at it, then move it away",
        ) from error
    raise CorralError(f"{directory} belongs to uid {found.st_uid}, not to you")
