"""From a policy to a container that may start, and back to nothing: the order in which things are made."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral import (
    apart,
    attended,
    carried,
    checks,
    engine,
    existing,
    held,
    network,
    opened,
    protect,
    relay,
    rootless,
    runtimes,
    secretchannel,
    sessions,
    state,
)
from corral.build import ensure_image
from corral.context import Invocation
from corral.later import Later
from corral.session import SERVICE, Outside, Request, User, delivered, mounts, plan
from corral.subnets import DEFAULT_RANGES, Plan
from policy import proxying
from policy.connection import OWN
from policy.container import Limits, SessionSpec, create_body
from policy.declaration import OPEN
from policy.errors import CorralError, EnforcerError
from policy.loader import LoadedPolicy
from policy.records import dataclass
from policy.revision import revision
from policy.secrets import read_env_file

if TYPE_CHECKING:
    from corral.proxying import Using

IPV6 = Path("/proc/sys/net/ipv6")
READY_TIMEOUT = 15.0
# Seconds for removing the files of a session, in which nobody can interrupt.
REMOVAL = 30.0
HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Prepared:
    """What all sessions of a sandbox share: its image, its network if any, the user, the secrets.

    ``foreign`` is the id of the existing image that its own was made on, if it was.
    """

    user: User
    image: str
    plan: Plan | None
    secrets: Mapping[str, str]
    limits: Limits
    foreign: str = ""


@dataclass
class _Made:
    """What has to be undone. ``ident`` is empty until Docker has told it.

    ``keep``: after an ordinary end the container and its files stay. ``left``: it goes on without us.
    """

    name: str
    session: str
    ident: str = ""
    keep: bool = False
    left: bool = False
    # The lock that says, until we end, that somebody looks after it; see policy.holding.
    lock: int | None = None
    proxy: Using | None = None


@dataclass(frozen=True)
class Created:
    """A container that may be started: the kernel holds what its policy allows, and nothing else.

    ``ready`` is the enforcer's answer: {"names": {name: [address, ...]}, "warnings": [...]}. ``fetched`` says
    that its secrets have been.
    """

    ident: str
    spec: SessionSpec
    ready: Mapping[str, Any]
    fetched: threading.Event = field(default_factory=threading.Event)
    made: _Made = field(default_factory=lambda: _Made("", ""))

    def leave(self) -> None:
        """Let it go on when the block that made it ends in order."""
        self.made.left = True


def refuse_root(user: User) -> None:
    """Agents run as the user who calls corral, and never as root.

    Raises:
        CorralError: the user is root.
    """
    if user.uid == 0:
        raise CorralError(
            "refusing to run an agent as root",
            "run corral as an ordinary user who is a member of the group docker",
        )


def read_secrets(loaded: LoadedPolicy, uid: int) -> Mapping[str, str]:
    """Return what the policy's env_file says; nothing when there is none.

    Raises:
        PolicyError: the file is missing, readable by others, malformed, or sets what is no secret.
    """
    if loaded.env_file is None:
        return {}
    return read_env_file(loaded.env_file, uid, reserved=loaded.profile.environment(loaded.options))


def prepare(invocation: Invocation) -> Prepared:
    """Make what a session needs and what outlives it. The policy is valid before anything is made.

    Raises:
        CorralError: the user is root.
        PolicyError: the policy or its env_file, or it allows more than its user approved.
        EnforcerError: nothing would be enforced; nothing has been made.
        EngineError, CorralError: Docker or systemd refused.
    """
    refuse_root(invocation.user)
    loaded, console = invocation.approved, invocation.console
    opened.warn(loaded, console.warn, rootless=invocation.user.rootless)
    secrets = read_secrets(loaded, invocation.user.uid)
    fenced = loaded.connection == OWN
    # Where nothing is to be made true in the kernel, nobody is needed who does it.
    if fenced:
        invocation.check_enforcer()
    _runtime(invocation)
    identity = Later(invocation.with_identity)
    # From here on, what is made for it is not idle although no container uses it yet.
    invocation.in_use  # noqa: B018 - held until the process ends
    built = ensure_image(invocation)
    layout = _network(invocation) if fenced else None
    brought = carried.managed(loaded, invocation.user)
    changed = state.prepare(invocation.paths, loaded.profile, loaded.project, brought.files)
    brought.told += [brought.copied[path] for path in changed if path in brought.copied]
    for line in (*brought.told, *carried.carry(invocation.paths, loaded, invocation.user)):
        console.warn(line)
    limits = engine.possible_limits(invocation.api, loaded.policy.limits, console.warn)
    pin = existing.read(invocation.paths.root) if loaded.policy.image is not None else None
    foreign = pin.ident if pin is not None else ""
    return Prepared(identity.result(), built.image, layout, secrets, limits, foreign)


def _runtime(invocation: Invocation) -> None:
    runtime = invocation.approved.policy.runtime
    if runtime != runtimes.RUNC:
        with engine.errors("asking Docker for its runtimes"):
            info = invocation.api.info()
        runtimes.insist(runtime, info)
        invocation.console.warn_block(runtimes.warnings(runtime))


def _network(invocation: Invocation) -> Plan:
    with invocation.console.step("network", minor=True):
        layout = network.ensure(
            invocation.api,
            invocation.loaded.sandbox,
            invocation.user.uid,
            ranges=subnet_ranges(invocation.config.subnet_range),
            lock=invocation.data / "networks.lock",
            environ=invocation.user.environ,
        )
    _relays(invocation, layout)
    return layout


def subnet_ranges(configured: IPv4Network | None) -> list[IPv4Network]:
    """Return where subnets come from: the configured range alone, or the defaults in their order."""
    return [configured] if configured is not None else [IPv4Network(text) for text in DEFAULT_RANGES]


def _relays(invocation: Invocation, layout: Plan) -> None:
    services, sandbox = invocation.loaded.declaration.host_services, invocation.loaded.sandbox
    # Without services too: an engine whose bridges are elsewhere is one that nothing here can fence.
    own = None
    if invocation.user.rootless:
        own = rootless.daemon(invocation.user.environ)
        bridge = rootless.bridge_ifindex(invocation.user.environ, sandbox.bridge)
    else:
        bridge = relay.bridge_ifindex(sandbox)
    if not services:
        return
    if any(service.port == proxying.PORT for service in services):
        from corral.proxying import refuse_beside_proxied

        refuse_beside_proxied(invocation)
    with invocation.console.step("host services", minor=True):
        manager = relay.Manager(relay.environment(invocation.user.environ, invocation.user.uid))
        wanted = relay.relays(sandbox, services, layout.gateway, bridge, own)
        # Sessions that start at the same time would start the same units.
        with network.locked(invocation.paths.root / "relays.lock"):
            manager.ensure(wanted)
    # Whether anything listens behind them is for the gate to say, which looks from inside.


def resolvers(invocation: Invocation) -> list[str]:
    """Return the addresses that answer DNS to this host, and must not to a sandbox."""
    texts = []
    for file in network.RESOLV_CONFS:
        with contextlib.suppress(OSError):
            texts.append(file.read_text(encoding="utf-8", errors="replace"))
    return checks.resolvers(texts, invocation.config.dns.servers)


def outside(invocation: Invocation) -> Outside:
    """Return what a session must find closed; the probe is asked for names when no resolver is outside."""
    probe = probe_address(invocation)
    resolver = next(iter(resolvers(invocation)), probe)
    closed = checks.CLOSED if invocation.loaded.declaration.mode == OPEN else ()
    return Outside(probe, checks.PROBE_PORT, resolver, closed=closed)


def probe_address(invocation: Invocation) -> str:
    """Return an address that is closed to this sandbox whatever its policy says."""
    if invocation.loaded.declaration.mode == OPEN:
        return checks.METADATA
    return checks.probe_address(invocation.config.permit_ranges)


@contextlib.contextmanager
def created(
    invocation: Invocation,
    prepared: Prepared,
    request: Request,
    meanwhile: Callable[[], object] = lambda: None,
) -> Iterator[Created]:
    """Create a container, wait until its policy is true, and remove everything of it in the end.

    ``meanwhile`` is done while others work, and before the container may start.

    Raises:
        NotReadyError: its policy could not be made true; it was not started and is gone.
        EngineError, EnforcerError, CorralError: a step failed, or a mount changed; nothing of it is left.
    """
    api, loaded, paths = invocation.api, invocation.approved, invocation.paths
    keep = loaded.policy.keep and request.purpose != "verify"
    made = _Made(loaded.sandbox.container(SERVICE, request.session), request.session, keep=keep)
    with attended.attendance() as ours, _undone(invocation, made):
        if loaded.declaration.proxied:
            made.proxy = _proxy(invocation, prepared, request.session)
        protected = protect.read_only(loaded, invocation.user.environ)
        state.create_session(paths, request.session, mounts(loaded, paths, request.session))
        made.lock = state.hold_session(paths, request.session, keep=keep)
        ours.begin(paths.session(request.session))
        note = sessions.Note(request.name, revision(loaded).sha256, prepared.image, keep, request.purpose)
        sessions.write_note(paths, request.session, note)
        secrets = {**delivered(loaded, prepared.secrets), **request.variables}
        with (
            held.held(mount.source for mount in (*loaded.mounts, *protected)) as places,
            secretchannel.offered(paths.session_home(request.session), secrets) as fetched,
        ):
            # What is held now is what is mounted, so it is what has to pass.
            _look_again(invocation, places)
            with network.locked(paths.root / "addresses.lock"):
                address, beside = "", False
                if prepared.plan is not None:
                    turn = paths.root / "address"
                    free, beside = network.free_address(api, loaded.sandbox, prepared.plan, turn)
                    address = str(free)
                spec = plan(
                    loaded,
                    prepared.user,
                    request,
                    paths=paths,
                    places=places.rows(),
                    protected=protected,
                    secrets=bool(secrets),
                    image=prepared.image,
                    address=address,
                    gateway=str(prepared.plan.gateway) if prepared.plan is not None else "",
                    start=request.start or invocation.cwd,
                    ipv6=IPV6.exists(),
                    outside=replace(outside(invocation), beside=beside),
                    limits=prepared.limits,
                )
                _create_hosts(spec, prepared.plan)
                # Cut off, the request goes on in Docker, and the container comes after all was removed.
                with invocation.console.step("container", minor=True), signals_held():
                    made.ident, told = engine.create_container(
                        api,
                        body(spec, request),
                        spec.container,
                        best_effort=loaded.policy.limits.best_effort,
                    )
            # The enforcer saw it being made, and is at work already.
            working = Later(meanwhile)
            ready: Mapping[str, Any] = {}
            if prepared.plan is not None:
                with invocation.console.step("network policy", minor=True) as step:
                    ready = invocation.enforcer.await_ready(made.ident, timeout=READY_TIMEOUT)
                    step.note = _counted(ready.get("names") or {})
            for warning in (*told, *ready.get("warnings", ())):
                invocation.console.warn(str(warning))
            working.result()
            if made.proxy is not None:
                made.proxy.result()
            places.check()
            yield Created(made.ident, spec, ready, fetched, made)


def _counted(names: Mapping[str, Sequence[str]]) -> str:
    """Return how many of a session's names have an address."""
    found = sum(bool(addresses) for addresses in names.values())
    return f"{found} of {len(names)} names have an address" if names else "no names"


def _proxy(invocation: Invocation, prepared: Prepared, session: str) -> Using:
    """Begin to see to the proxy of the sandbox."""
    # Most sandboxes have none.
    from corral.proxying import Needs, Using

    if prepared.plan is None:
        raise CorralError("a sandbox without a network of its own has no proxy", "corral policy check")
    needs = Needs(session, prepared.image, prepared.plan, prepared.limits, outside(invocation), IPV6.exists())
    return Using(invocation, needs)


def ensure_proxy(invocation: Invocation, prepared: Prepared, session: str) -> None:
    """See to it that the proxy of a session that runs already is there, if it needs one.

    Raises:
        EngineError, EnforcerError, CorralError: it cannot be started.
    """
    if invocation.loaded.declaration.proxied:
        using = _proxy(invocation, prepared, session)
        try:
            using.result()
        finally:
            using.end(last=False)


def _look_again(invocation: Invocation, places: held.Held) -> None:
    guard = invocation.guard
    for path in places.places:
        refusal = guard.refuse(path)
        if refusal is not None:
            raise refusal.error()
    places.check()


def body(spec: SessionSpec, request: Request) -> dict[str, Any]:
    """Return the create request: the one shape of a sandbox container, and the size of its terminal."""
    found = create_body(spec)
    if request.terminal.tty and request.terminal.rows and request.terminal.columns:
        # So that a program that looks at once sees the real size; older engines ignore it.
        found["HostConfig"]["ConsoleSize"] = [request.terminal.rows, request.terminal.columns]
    return found


def _create_hosts(spec: SessionSpec, layout: Plan | None) -> None:
    from enforcer.client import create_hosts_file, render_hosts_file

    if layout is None:
        create_hosts_file(Path(spec.hosts_file), apart.HOSTS.format(spec.service).encode())
        return
    names = [name.host for name in spec.declaration.names]
    proxied, gateway = spec.declaration.proxied, str(layout.gateway)
    content = render_hosts_file(spec.service, spec.address, gateway, names, proxied=proxied)
    create_hosts_file(Path(spec.hosts_file), content)


@contextlib.contextmanager
def _undone(invocation: Invocation, made: _Made) -> Iterator[None]:
    """Remove the container and the files of a session, however the block ends."""
    failed = True
    try:
        yield
        failed = False
    finally:
        with signals_held():
            problems = _end(invocation, made, failed=failed)
            if made.proxy is not None:
                try:
                    made.proxy.end(last=failed or not made.left)
                except CorralError as error:
                    problems.append(error)
            if made.lock is not None:
                os.close(made.lock)
        for problem in problems:
            invocation.console.warn(problem.message)
        if problems and not failed:
            raise problems[0]


def _end(invocation: Invocation, made: _Made, *, failed: bool) -> list[CorralError]:
    if made.left and not failed:
        state.mark_left(invocation.paths, made.session)
        return []
    return _keep(invocation, made) if made.keep and not failed else _undo(invocation, made, failed=failed)


def _keep(invocation: Invocation, made: _Made) -> list[CorralError]:
    """Leave the container for who wants to look at it; what it could reach goes."""
    with contextlib.suppress(EnforcerError):
        invocation.enforcer.withdraw(made.ident)
    invocation.console.tell(f"kept: {made.name} (corral inspect, corral logs); corral down removes it")
    return []


def _undo(invocation: Invocation, made: _Made, *, failed: bool) -> list[CorralError]:
    with _withdrawn(invocation, made.ident):
        try:
            # By name: an interrupted create may have made the container without telling its id.
            remove = engine.remove_container if failed else engine.remove_ended
            remove(invocation.api, made.name)
        except CorralError as error:
            # Its directory stays: it may run, and is known by it to be nobody's when Docker answers again.
            return [error]
        until = time.monotonic() + REMOVAL
        emptied = state.empty_session(invocation.paths, made.session, lambda: time.monotonic() > until)
    if not emptied:
        invocation.console.tell(
            f"the session {made.session} left more files than can be removed at once: corral prune goes on"
        )
    return []


@contextlib.contextmanager
def _withdrawn(invocation: Invocation, ident: str) -> Iterator[None]:
    """Have a container's network taken away beside the block; the enforcer knows of it before that is left.

    It does it too when it sees the container die; this way it does not depend on an event. That it happens
    before the container is gone opens nothing.
    """

    def withdraw() -> None:
        with contextlib.suppress(EnforcerError):
            invocation.enforcer.withdraw(ident)

    thread = threading.Thread(target=withdraw, daemon=True)
    if ident:
        thread.start()
    try:
        yield
    finally:
        if ident:
            thread.join()


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Let interrupts wait until the block is done.

    A mask would hold them for one thread only, and the kernel gives a signal to any thread that takes it, for
    which Python interrupts the main one all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        # Nothing interrupts other threads.
        yield
        return
    came: list[int] = []
    before = {held: signal.getsignal(held) for held in HELD}
    ours = {held: how for held, how in before.items() if how not in (signal.SIG_IGN, None)}
    try:
        for held in ours:
            signal.signal(held, lambda number, _frame: came.append(number))
        yield
    finally:
        for held, how in ours.items():
            signal.signal(held, how)
        for number in dict.fromkeys(came):
            signal.raise_signal(number)


def working_directory() -> Path:
    """Return the directory corral was started in, without symbolic links.

    Raises:
        CorralError: it was removed.
    """
    try:
        return Path(os.path.realpath(Path.cwd()))
    except FileNotFoundError as error:
        raise CorralError("the current directory does not exist any more", "cd, then try again") from error
