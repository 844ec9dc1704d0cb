"""The engine that a user runs without root: where it listens, and how to look into its network namespace."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from corral import process
from policy.errors import CorralError

if TYPE_CHECKING:
    from enforcer.client import Daemon

NO_SUCH_BRIDGE = "the bridge {} that Docker made is not in your engine's network namespace"


def runtime(environ: Mapping[str, str]) -> Path:
    """Return the user's runtime directory."""
    base = environ.get("XDG_RUNTIME_DIR", "")
    return Path(base) if base.startswith("/") else Path(f"/run/user/{os.geteuid()}")


def socket_path(environ: Mapping[str, str]) -> Path:
    """Return where the user's own engine listens."""
    return runtime(environ) / "docker.sock"


def chosen(environ: Mapping[str, str]) -> bool:
    """Tell whether the engine that the docker command would use is the user's own."""
    from corral import hostfacts

    return hostfacts.choice(environ).rootless


def pid(environ: Mapping[str, str]) -> int | None:
    """Return the process id of the user's own engine, guarded or not; None when it does not run."""
    from enforcer.client import running_daemon

    found = running_daemon(runtime(environ))
    return found.pid if found is not None else None


def daemon(environ: Mapping[str, str]) -> Daemon:
    """Return the user's own engine, in whose namespace corral's rules came first.

    Raises:
        EnforcerError: it does not run, or was started without them.
    """
    from enforcer.client import guarded_daemon

    return guarded_daemon({**environ, "XDG_RUNTIME_DIR": str(runtime(environ))})


def entering(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the beginning of a command that looks where the engine's bridges are; nothing: right here.

    To look, not to run: the engine may be one that was started without the rules.

    Raises:
        EnforcerError: the engine is the user's own and does not run.
    """
    from enforcer.client import enter, running_daemon

    if not chosen(environ):
        return ()
    return enter(running_daemon(runtime(environ)) or daemon(environ))


def bridge_ifindex(environ: Mapping[str, str], bridge: str) -> int:
    """Return the interface index of a bridge in the engine's namespace.

    Raises:
        EnforcerError: see ``daemon``.
        CorralError: there is no such interface.
    """
    argv = (*entering(environ), "ip", "-j", "link", "show", "dev", bridge)
    done = process.run(argv, environ=environ, check=False)
    try:
        return int(json.loads(done.stdout)[0]["ifindex"])
    except (ValueError, LookupError) as error:
        raise CorralError(NO_SUCH_BRIDGE.format(bridge), "corral down; the next run makes it anew") from error


def refuse_unguarded(environ: Mapping[str, str]) -> None:
    """Refuse an engine of the user's in whose namespace something may have run before the rules.

    Raises:
        EnforcerError: see ``daemon``.
    """
    if chosen(environ):
        daemon(environ)
