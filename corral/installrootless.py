"""``corral install`` on an engine that the user runs without root: no step of it needs root.

The writer's code lies among corral's own files, which no policy can mount. A drop-in of the user's
docker.service puts a program named dockerd first on PATH, which loads the rules in the namespace that
rootlesskit has just made and becomes the real one. The writer and the enforcer are units of the user's.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from corral import __version__, hostfacts, install, oserrors, process, relay, rootless
from corral.installer import common
from corral.installer.elevate import SYSTEM_PYTHON
from corral.membership import Membership, membership
from corral.user import user_units
from enforcer.client import Client, socket_path
from policy import versions
from policy.errors import EnforcerError, InstallError
from policy.identity import data_home

ENGINE_UNIT = "docker.service"
WRITER_UNIT = "corral-netfilter.service"
DROP_IN = "corral.conf"
CODE = "netfilter"
TOOLS = {"nsenter": "util-linux", "nft": "nftables", "iptables-nft": "iptables", "ip6tables-nft": "iptables"}
BRIDGE_FILTER = Path("/proc/sys/net/bridge")
SETUP = "dockerd-rootless-setuptool.sh install"
PATIENCE = 30.0
DOCKERD = """\
#!{python} -IS
import sys
sys.path.insert(0, {directory!r})
from enforcer.netfilter.__main__ import main
sys.exit(main(["guard", *sys.argv]))
"""


def code_directory(data: Path) -> tuple[Path, dict[str, bytes]]:
    """Return where the writer's code goes, and its files by relative path."""
    files = install.writer_files()
    directory = data / CODE / f"{__version__}-{install.digest(files)}"
    files["corral-netfilter"] = install.LAUNCHER.format(directory=str(directory)).encode()
    files["bin/dockerd"] = DOCKERD.format(python=SYSTEM_PYTHON, directory=str(directory)).encode()
    manifest = versions.describe(__version__, versions.WRITER_SCHEMAS)
    files[common.MANIFEST] = json.dumps(manifest).encode()
    return directory, files


def plan_text(directory: Path, socket: Path, *, restart: bool) -> str:
    """Return what the installation will do and why, one step a line."""
    return "\n".join(
        (
            f"docker uses your own (rootless) engine at {socket}; so corral is installed",
            "for that one, without root. corral install will do this:",
            f"  copy the netfilter writer to {directory}",
            f"  write ~/.config/systemd/user/{ENGINE_UNIT}.d/{DROP_IN}",
            "    (your engine's dockerd then starts with corral's rules loaded before it)",
            f"  write ~/.config/systemd/user/{WRITER_UNIT} and {install.USER_UNIT}, and start them",
            f"  write ~/.config/systemd/user/{install.SWEEP_UNIT}",
            "    (at each start of the latter: removes what dead sessions left)",
            *((f"  restart your {ENGINE_UNIT}: it was started without the rules",) if restart else ()),
        )
    )


def drop_in(directory: Path, path: str) -> str:
    """Return the text of the drop-in; ``path`` is the PATH that the unit has without it."""
    text = install.unit_text("corral-docker-rootless.conf")
    return text.replace("@DIR@", _escaped(str(directory))).replace("@PATH@", _escaped(path))


def _escaped(text: str) -> str:
    """Write a value between quotes of a unit file, where a percent sign begins a specifier."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")


def search_path(shown: str, manager: str, own: Path) -> str:
    """Return the PATH of the engine's unit without ours.

    Args:
        shown: the unit's Environment, as ``systemctl show`` prints it.
        manager: what ``systemctl show-environment`` prints.
        own: the directory below which ours lies.
    """
    try:
        words = shlex.split(shown)
    except ValueError:
        words = shown.split()
    found = [word.removeprefix("PATH=") for word in words if word.startswith("PATH=")]
    found += [line.removeprefix("PATH=") for line in manager.splitlines() if line.startswith("PATH=")]
    parts = (found or [":".join(process.SYSTEM_PATH)])[0].split(":")
    return ":".join(part for part in parts if part and not Path(part).is_relative_to(own))


def check_before(environ: Mapping[str, str], found: Membership) -> None:
    """Look at everything that could stop the installation half way.

    Raises:
        InstallError: something is missing; nothing has been done.
        EngineError: the engine is one that corral cannot fence.
    """
    install.programs()
    versions.check_state(data_home(Path.home(), dict(environ)), __version__)
    install.check_system_python(environ)
    for tool, package in TOOLS.items():
        process.find(tool, environ, f"ask an administrator for the package {package}")
    install.check_manager(environ, found)
    if install.systemctl(environ, "show", "-P", "LoadState", ENGINE_UNIT).strip() != "loaded":
        raise InstallError(
            f"your engine is not the unit {ENGINE_UNIT} of your service manager, so nothing of corral's "
            "could be there before it",
            f"{SETUP}, then: corral install",
        )
    hostfacts.require_local_engine(environ)
    if not BRIDGE_FILTER.is_dir():
        raise InstallError(
            "the kernel module br_netfilter is not loaded, and only an administrator can load it",
            "once, as root: modprobe br_netfilter; echo br_netfilter > /etc/modules-load.d/corral.conf",
        )
    install.check_running(environ, found.uid)


def install_rootless(environ: Mapping[str, str], found: Membership, echo: Callable[[str], None]) -> None:
    """Do it, after everything was looked at.

    Raises:
        InstallError: a step failed; what ran before keeps running.
    """
    directory, files = code_directory(data_home(Path.home(), dict(environ)))
    write_code(directory, files)
    units = user_units(Path.home(), environ)
    shown = install.systemctl(environ, "show", "-P", "Environment", ENGINE_UNIT)
    path = search_path(shown, install.systemctl(environ, "show-environment"), directory.parent)
    install.write_unit(units / f"{ENGINE_UNIT}.d" / DROP_IN, drop_in(directory, path))
    text = install.unit_text("corral-netfilter-rootless.service")
    writer = text.replace("@PYTHON@", SYSTEM_PYTHON).replace("@DIR@", str(directory))
    install.write_unit(units / WRITER_UNIT, writer)
    install.write_user_units(units, rootless=True)
    install.systemctl(environ, "daemon-reload")
    if not guarded(environ):
        _start_engine(environ, units / f"{ENGINE_UNIT}.d" / DROP_IN)
        echo("your engine: started again, with the rules before it")
    install.start_units(environ, WRITER_UNIT, install.USER_UNIT)
    install.await_enforcer(Client(socket_path(environ), timeout=5).version, found)
    forget_others(directory)


def _start_engine(environ: Mapping[str, str], dropped_in: Path) -> None:
    """Start the engine again; when that fails the user gets it back as it was."""
    try:
        install.systemctl(environ, "restart", ENGINE_UNIT)
        await_guarded(environ)
    except InstallError:
        dropped_in.unlink(missing_ok=True)
        install.systemctl(environ, "daemon-reload")
        install.systemctl(environ, "restart", ENGINE_UNIT)
        raise


def write_code(directory: Path, files: Mapping[str, bytes]) -> None:
    """Fill a directory, whole or not at all; what is right already stays, because it may be running.

    Raises:
        CorralError: it cannot be written.
    """
    if all(_holds(directory / name, content) for name, content in files.items()):
        return
    partial = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}")
    with oserrors.naming(directory):
        for name, content in files.items():
            path = partial / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(0o700 if name.startswith("bin/") else 0o600)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)


def _holds(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except OSError:
        return False


def forget_others(directory: Path) -> None:
    """Remove the code of other versions, which nothing runs any more."""
    for other in directory.parent.iterdir():
        if other != directory:
            shutil.rmtree(other, ignore_errors=True)


def guarded(environ: Mapping[str, str]) -> bool:
    """Tell whether the engine that runs was started by ours."""
    try:
        rootless.daemon(environ)
    except EnforcerError:
        return False
    return True


def await_guarded(
    environ: Mapping[str, str],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the engine runs behind the rules.

    Raises:
        InstallError: not within ``PATIENCE`` seconds.
    """
    end = clock() + PATIENCE
    while not guarded(environ):
        if clock() > end:
            raise InstallError(
                "your engine was started again, but not by corral's dockerd",
                f"does {ENGINE_UNIT} set PATH or DOCKERD itself? systemctl --user cat {ENGINE_UNIT}; "
                f"journalctl --user -u {ENGINE_UNIT}",
            )
        sleep(0.1)


def running_containers(environ: Mapping[str, str]) -> Sequence[str]:
    """Return the names of containers that a restart of the engine would end."""
    from corral.engine import connect, container_name, errors

    with closing(connect(environ)) as api, errors("listing containers"):
        return sorted(container_name(row) for row in api.containers())


def run(*, echo: Callable[[str], None], dry_run: bool = False, assume_yes: bool = False) -> None:
    """Install the host part for the user's own engine.

    Raises:
        InstallError: something is missing (then nothing has been done), or a step failed.
    """
    uid = os.geteuid()
    environ = relay.environment(os.environ, uid)
    directory, _ = code_directory(data_home(Path.home(), dict(environ)))
    restart = not guarded(environ)
    echo(plan_text(directory, rootless.socket_path(environ), restart=restart))
    if dry_run:
        return
    found = membership(uid)
    check_before(environ, found)
    if restart and (ended := running_containers(environ)):
        raise InstallError(
            f"your engine has to be started again, which would end {', '.join(ended)}",
            "end them first (docker stop), then: corral install",
        )
    install.confirm(echo, assume_yes=assume_yes)
    install_rootless(environ, found, echo)
    echo("done, without root")
    install.note_linger(echo, found.user)
