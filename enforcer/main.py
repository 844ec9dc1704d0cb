"""The program ``corral-enforcer``; with ``--rootless`` for the engine that the user runs without root."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from enforcer import journal, rootless
from enforcer.config import WRITER_SOCKET
from enforcer.config import load as load_config
from enforcer.config import path as config_path
from enforcer.engine import DockerEngine, Engine
from enforcer.host import only_instance
from enforcer.release import RELEASE
from enforcer.service import Service
from enforcer.sessions import Owner
from enforcer.writerclient import WriterClient
from policy import versions
from policy.errors import CorralError, EngineError
from policy.identity import data_home
from policy.loader import DAEMON, docker_roots

log = logging.getLogger("corral.enforcer")


def _rootless(environ: dict[str, str]) -> tuple[WriterClient, Callable[[], Engine]]:
    url, path = rootless.address(environ), rootless.writer_socket(environ)

    def connect() -> Engine:
        # Asked anew at each connection: the engine may have been started without the guard meanwhile.
        try:
            rootless.daemon(environ)
        except CorralError as error:
            raise EngineError(error.message, error.hint) from error
        return DockerEngine(url, rootless=True)

    return WriterClient(path, vet=rootless.Neighbour(environ)), connect


def engine_roots(home: Path, environ: dict[str, str], *, rootless: bool) -> tuple[str, ...]:
    """Return where the engine of this service keeps its files."""
    if not rootless:
        return docker_roots(DAEMON)
    found = []
    for variable, default in (("XDG_CONFIG_HOME", ".config"), ("XDG_DATA_HOME", ".local/share")):
        base = environ.get(variable, "")
        found.append((Path(base) if base.startswith("/") else home / default) / "docker")
    return (str(found[1]), *docker_roots(found[0] / DAEMON.name))


def main() -> None:
    """Run the service of the current user until it is told to stop."""
    native = journal.SOCKET if journal.has_journal(os.environ, sys.stderr) else None
    logging.basicConfig(level=logging.INFO, handlers=[journal.Handler(sys.stderr, native)])
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    environ, home, own = dict(os.environ), Path.home(), sys.argv[1:] == ["--rootless"]
    if sys.argv[1:] and not own:
        log.error("usage: corral-enforcer [--rootless]")
        sys.exit(2)
    try:
        config = load_config(config_path(home, environ))
        writer, engine = _rootless(environ) if own else (WriterClient(WRITER_SOCKET), DockerEngine)
        directory = only_instance(environ)
    except CorralError as error:
        log.error("%s", error.render())
        sys.exit(error.exit_code)
    for net in config.permit_ranges:
        log.warning("enforcer.toml permits names to open %s", net)
    data = data_home(home, environ)
    try:
        versions.open_state(data, RELEASE)
    except (CorralError, OSError) as error:
        log.error("%s", error.render() if isinstance(error, CorralError) else error)
        # The unit is not started again after this one: trying again makes no state older.
        sys.exit(2 if isinstance(error, CorralError) else 1)
    ipv6, roots = Path("/proc/sys/net/ipv6").exists(), engine_roots(home, environ, rootless=own)
    owner = Owner(os.getuid(), os.getgid(), data, ipv6, rootless=own, engine=roots)

    async def serve() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await Service(config, owner, writer, engine).run(directory / "enforcer.sock", stop)

    asyncio.run(serve())


if __name__ == "__main__":
    main()
