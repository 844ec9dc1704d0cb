"""The box: a whole Debian booted in a container of its own, with a real engine and an ordinary user."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from . import cgroups, engines, execute, layout, network, provision, rootless, state
from .engines import Engine
from .execute import LabError, Process
from .layout import Layout
from .state import State

_GLOBAL_LIMITS = ("fs/file-max", "fs/nr_open")
_USERS = {"root": ("/root", 0), layout.USER: (f"/home/{layout.USER}", layout.UID)}


class Box:
    """Handle on the box of one lab. `root` mounts and boots; everything else works on a running box."""

    def __init__(self, lab: Layout, state: State) -> None:
        self._lab = lab
        self._state = state
        self.user = layout.USER
        self.home = f"/home/{layout.USER}"
        self.address = layout.BOX

    @property
    def engine(self) -> Engine:
        """The engine this box was made with."""
        return engines.chosen(self._state.note("engine") or engines.DEFAULT)

    @property
    def arrangement(self) -> cgroups.Arrangement:
        """What systemd and the engine see of the machine's control groups."""
        return cgroups.arrangement(self.engine, self._state.groups.hierarchies)

    @property
    def leader(self) -> int:
        """PID of the box's PID 1 as this machine sees it. Raises LabError when the box does not run."""
        process = self._state.get("leader")
        if process is None or not process.alive():
            raise LabError(f"the box of lab {self._lab.name} does not run")
        return process.pid

    def running(self) -> bool:
        return self._state.alive("leader")

    def run(
        self,
        argv: Sequence[str],
        user: str = layout.USER,
        input: str | bytes | None = None,  # noqa: A002
        timeout: float = 60,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        cwd: str | None = None,
        stdin: int | IO[bytes] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in the box as `dev` or `root`, with the environment a login would give it.

        `env` is added to that environment; a value of "" removes the variable. `timeout` is in seconds.
        Raises CommandError (with `check`) when it fails, LabError when it is late; then all of it is killed.
        """
        command, environment = self.command(argv, user, env, cwd)
        return execute.run(
            command,
            input=input,
            timeout=timeout,
            env=environment,
            check=check,
            stdin=stdin,
            shown=["in the box:", *argv],
        )

    def popen(
        self,
        argv: Sequence[str],
        user: str = layout.USER,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Like subprocess.Popen, in the box. Ends with `box.kill(process)` or by itself."""
        command, environment = self.command(argv, user, env, cwd)
        options.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.Popen(command, env=environment, start_new_session=True, **options)

    @staticmethod
    def kill(process: subprocess.Popen[Any]) -> None:
        """End what `popen` started, with everything that stayed in its process group."""
        execute.kill_group(process)
        process.wait()

    def write(self, path: str, content: str | bytes, owner: str = layout.USER, mode: int = 0o644) -> None:
        """Write a file of the box; missing directories are made and belong to `owner` as well."""
        script = """
            directory=$(dirname "$1")
            test -d "$directory" ||
                setpriv --reuid "$2" --regid "$2" --clear-groups mkdir -p "$directory" 2>/dev/null ||
                install -d -o "$2" -g "$2" "$directory"
            umask 077
            cat >"$1"
            chown "$2:$2" "$1"
            chmod "$3" "$1"
        """
        self.run(["sh", "-e", "-c", script, "write", path, owner, f"{mode:o}"], user="root", input=content)

    def read(self, path: str) -> str:
        return self.run(["cat", path], user="root").stdout

    def wait_for(
        self,
        condition: Callable[[], object] | Sequence[str],
        timeout: float = 30,
        user: str = layout.USER,
        interval: float = 0.1,
    ) -> None:
        """Until the predicate is true, or the program exits with 0. Raises LabError after `timeout` s."""
        if callable(condition):
            execute.wait_until(lambda: bool(condition()), "the condition", timeout, interval)
            return
        argv = list(condition)
        execute.wait_until(
            lambda: self.run(argv, user=user, check=False, timeout=timeout).returncode == 0,
            f"`{' '.join(argv)}` in the box succeeds",
            timeout,
            interval,
        )

    def use_resolver(self, which: str) -> None:
        """Make /etc/resolv.conf name `stub` (127.0.0.53, as booted) or `routable` (the internet's server)."""
        if which == "stub":
            command = ["ln", "-sfn", "../run/systemd/resolve/stub-resolv.conf", "/etc/resolv.conf"]
            self.run(command, user="root")
        elif which == "routable":
            text = f"nameserver {layout.RESOLVER}\n"
            self.run(["sh", "-c", "rm -f /etc/resolv.conf; cat >/etc/resolv.conf"], user="root", input=text)
        else:
            raise ValueError(f"stub or routable, not {which}")

    @contextlib.contextmanager
    def resolver(self, which: str) -> Iterator[None]:
        """`use_resolver` for the length of a block, then the stub again."""
        self.use_resolver(which)
        try:
            yield
        finally:
            self.use_resolver("stub")

    def unlimited(self) -> list[str]:
        """Limits that the engine takes and discards, for want of a controller."""
        told = json.loads(self.run(["docker", "info", "--format", "{{json .}}"]).stdout)
        return [limit for limit in ("MemoryLimit", "PidsLimit", "CpuCfsQuota") if not told.get(limit)]

    def flush_dns(self) -> None:
        """Empty the cache of the box's own resolver."""
        self.run(["resolvectl", "flush-caches"], user="root")

    def reboot(self, hard: bool = False) -> None:
        """Boot again from the same disk with an empty kernel: all network state of the box is gone.

        `hard` cuts the power; otherwise systemd shuts down in order first.
        """
        if not hard:
            self.run(["systemctl", "--no-block", "poweroff"], user="root", check=False)
            nspawn = self._state.get("nspawn")
            execute.wait_until(lambda: not (nspawn and nspawn.alive()), "the box shuts down", timeout=90)
        state.kill_box(self._lab)
        self.boot()

    # Below: the making of a box; called by Lab.

    def mount(self, tree: Path) -> None:
        """Mount the root: the cached tree below, what the box writes above. Engine data lie beside it."""
        for directory in ("upper", "work", "docker", "containerd"):
            (self._lab.disk / directory).mkdir(parents=True, exist_ok=True)
        if self.engine.rootless:
            shutil.chown(self._lab.disk / "docker", layout.UID, layout.UID)
        self._lab.root.mkdir(parents=True, exist_ok=True)
        disk = self._lab.disk
        options = f"lowerdir={tree},upperdir={disk / 'upper'},workdir={disk / 'work'}"
        execute.run(
            [execute.tool("mount"), "-t", "overlay", "corral-lab", "-o", options, str(self._lab.root)]
        )

    def boot(self) -> None:
        """Boot with a fresh network namespace and wait until engine and user manager answer."""
        network.cut_box(self._lab)
        network.make_box(self._lab)
        self._state.groups.clear("box")
        groups = self._state.groups.make("box")
        with kernel_limits_kept():
            log = self._lab.run / "console.log"
            nspawn = execute.start_daemon(
                self._nspawn(), log=log, cgroups=groups, env=_nspawn_environment(self.arrangement)
            )
            self._state.put("nspawn", nspawn)
            try:
                self._wait_booted(nspawn)
            except LabError as problem:
                tail = execute.read_text(log)[-3000:]
                raise LabError(f"the box does not boot: {problem.message}\n{tail}") from problem

    def healthy(self) -> bool:
        """Engine and user manager answer."""
        try:
            self.run(["docker", "version"], timeout=20)
            self.run(["systemctl", "--user", "list-units", "--no-legend"], timeout=20)
        except LabError:
            return False
        return True

    def _wait_booted(self, nspawn: Process) -> None:
        def booting() -> bool:
            if not nspawn.alive():
                raise LabError("systemd-nspawn ended")
            leader = _leader_of(nspawn.pid)
            if leader is not None:
                self._state.put("leader", leader)
            return leader is not None

        execute.wait_until(booting, "the box has a PID 1", timeout=20)
        deadline = time.monotonic() + 90
        said = ""
        while said not in ("running", "degraded"):
            if not nspawn.alive() or time.monotonic() > deadline:
                raise LabError(f"the box's systemd says {said or 'nothing'}")
            time.sleep(0.1)
            said = self.run(["systemctl", "is-system-running"], user="root", check=False).stdout.strip()
        self.wait_for(["docker", "version"], timeout=60)
        self.wait_for(["systemctl", "--user", "is-active", "-q", "default.target"], timeout=30)

    def _nspawn(self) -> list[str]:
        disk = self._lab.disk
        return [
            execute.tool("systemd-nspawn"),
            "--quiet",
            "--register=no",
            "--keep-unit",
            f"--machine=corral-{self._lab.name}",
            "--hostname=box",
            f"--directory={self._lab.root}",
            f"--network-namespace-path={layout.netns_path(self._lab.box_netns)}",
            "--capability=all",
            "--system-call-filter=@keyring bpf",
            "--resolv-conf=off",
            "--timezone=off",
            "--link-journal=no",
            "--console=pipe",
            "--bind=/dev/net/tun",
            f"--bind={disk / 'docker'}:/{rootless.DATA if self.engine.rootless else 'var/lib/docker'}",
            f"--bind={disk / 'containerd'}:/var/lib/containerd",
            provision.INIT,
        ]

    def command(
        self,
        argv: Sequence[str],
        user: str = layout.USER,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> tuple[list[str], dict[str, str]]:
        """The command of this machine, and its whole environment, that run `argv` in the box."""
        home, uid = _USERS[user]
        drop = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--init-groups"]
        drop += ["--inh-caps=-all"] if uid else []
        chdir = ["env", f"--chdir={cwd or home}"]
        command = [execute.tool("nsenter"), f"--target={self.leader}", "--all", "--", *drop, *chdir, *argv]
        command = execute.in_cgroups(self._state.groups.visitors("box"), command)
        return command, login_environment(user, env)


def login_environment(user: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a login of that user gets, proxy settings of /etc/environment included; "" removes a variable."""
    home, uid = _USERS[user]
    environment = {
        "HOME": home,
        "USER": user,
        "LOGNAME": user,
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "PATH": provision.PATH,
        **provision.proxy_environment(),
    }
    if uid:
        environment |= {
            "PATH": f"{home}/.local/bin:{provision.PATH}",
            "XDG_RUNTIME_DIR": f"/run/user/{uid}",
            "DBUS_SESSION_BUS_ADDRESS": f"unix:path=/run/user/{uid}/bus",
        }
    environment |= extra or {}
    return {key: value for key, value in environment.items() if value != ""}


@contextlib.contextmanager
def kernel_limits_kept(sysctl: Path = Path("/proc/sys")) -> Iterator[None]:
    """systemd raises some limits of the whole kernel when it boots; put the machine's own back."""
    before = {name: (sysctl / name).read_text() for name in _GLOBAL_LIMITS}
    try:
        yield
    finally:
        for name, value in before.items():
            if (sysctl / name).read_text() != value:
                (sysctl / name).write_text(value)


def _leader_of(nspawn: int) -> Process | None:
    """The child of systemd-nspawn that is PID 1 of its namespace."""
    for child in execute.read_text(Path(f"/proc/{nspawn}/task/{nspawn}/children")).split():
        status = execute.read_text(Path(f"/proc/{child}/status"))
        numbers = [line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")]
        comm = execute.read_text(Path(f"/proc/{child}/comm")).strip()
        if numbers and numbers[0][-1] == "1" and len(numbers[0]) > 1 and comm == "systemd":
            with contextlib.suppress(ProcessLookupError):
                return Process.of(int(child))
    return None


def _nspawn_environment(arrangement: cgroups.Arrangement) -> dict[str, str]:
    environment = {
        "PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
        "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "1",
    }
    if arrangement is not cgroups.Arrangement.HYBRID:  # else as the machine has it
        environment["SYSTEMD_NSPAWN_UNIFIED_HIERARCHY"] = "1"
    return environment
