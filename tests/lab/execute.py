"""The one place of the lab that runs programs, keeps time and knows processes by pid and start time."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO, TypeVar

A = TypeVar("A")
B = TypeVar("B")
_running: set[subprocess.Popen[bytes]] = set()


class LabError(Exception):
    """The lab cannot do what was asked: what happened and why, and the fix."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message if not hint else f"{message}\n  hint: {hint}")
        self.message = message
        self.hint = hint


class CommandError(LabError):
    """A program ended with an exit code other than 0; `result` holds it and what it printed."""

    def __init__(self, message: str, result: subprocess.CompletedProcess[str]) -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class Process:
    """A process, not to be confused with a later one of its pid; `start` is in clock ticks since boot."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """Raises ProcessLookupError when there is no such process."""
        start = start_time(pid)
        if start is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, start)

    def alive(self) -> bool:
        return start_time(self.pid) == self.start

    def kill(self, signum: int = signal.SIGKILL) -> None:
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill_group(self) -> None:
        """Kill a daemon of ours with what it forked, and wait until the sockets of all of them are closed."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            wait_until(lambda: not group_lives(self.pid), f"process group {self.pid} ends", timeout=20)


def start_time(pid: int) -> int | None:
    """Field 22 of /proc/<pid>/stat; None when the process is gone or only a zombie is left of it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def group_lives(group: int) -> bool:
    """Whether a process of that group runs; the dead that nobody has reaped yet do not count."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == group and fields[0] not in "ZX":
                    return True
    return False


def run(
    argv: Sequence[str],
    *,
    input: str | bytes | None = None,  # noqa: A002
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    cwd: str | Path | None = None,
    stdin: int | IO[bytes] | None = None,
    shown: Sequence[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program in a process group of its own; the whole group ends with the call, however it ends.

    `timeout` is in seconds; `shown` stands for the command in messages. Raises CommandError when
    the program fails (with `check`), LabError when it is missing or late.
    """
    given = input.encode() if isinstance(input, str) else input
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE if given is not None else stdin or subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
    except FileNotFoundError as missing:
        raise LabError(f"cannot run {argv[0]}: {missing}") from missing
    _running.add(process)
    try:
        out, err = process.communicate(given, timeout)
    except subprocess.TimeoutExpired:
        kill_group(process)
        out, err = process.communicate()
        raise LabError(
            f"{_shown(shown or argv)} did not end within {timeout:g} s\n{_tail(_text(out) + _text(err))}"
        ) from None
    except BaseException:
        kill_group(process)
        process.wait()
        raise
    finally:
        _running.discard(process)
    result = subprocess.CompletedProcess(list(argv), process.returncode, _text(out), _text(err))
    if check and result.returncode != 0:
        text = _tail(result.stdout + result.stderr)
        raise CommandError(
            f"{_shown(shown or argv)} failed with exit code {result.returncode}\n{text}", result
        )
    return result


@contextlib.contextmanager
def output_of(argv: Sequence[str]) -> Iterator[IO[bytes]]:
    """What a program writes, for another one to read. Raises LabError when it fails."""
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise LabError(f"{_shown(argv)} failed with exit code {process.returncode}")


def both(first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
    """Results of two functions that run at the same time; when one fails the other's programs are ended."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(first), pool.submit(second)
        try:
            futures: list[concurrent.futures.Future[Any]] = [one, two]
            for done in concurrent.futures.as_completed(futures):
                done.result()
            return one.result(), two.result()
        except BaseException:
            for process in list(_running):
                kill_group(process)
            raise


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process started with start_new_session and everything that stayed in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def start_daemon(
    argv: Sequence[str],
    *,
    log: Path,
    cgroups: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
    ready: bool = False,
    timeout: float = 15,
    cwd: str | Path | None = None,
) -> Process:
    """Start a program that outlives us, detached from our terminal, in the given cgroups, output to `log`.

    With `ready` the program gets `--ready-fd N` appended and must write a byte there once it serves.
    Raises LabError when it ends, or stays silent for `timeout` seconds, before that.
    """
    read_end, write_end = os.pipe()
    command = [*argv, "--ready-fd", str(write_end)] if ready else list(argv)
    command = in_cgroups(cgroups, command)
    with log.open("ab") as sink, os.fdopen(read_end, "rb", buffering=0) as answer:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=env,
                cwd=cwd,
                start_new_session=True,
                pass_fds=[write_end] if ready else [],
            )
        finally:
            os.close(write_end)
        # A daemon of ours is never waited for; without this its end would leave a zombie that looks alive.
        threading.Thread(target=child.wait, daemon=True).start()
        identity = Process.of(child.pid) if start_time(child.pid) is not None else Process(child.pid, -1)
        if ready:
            killer = threading.Timer(timeout, lambda: kill_group(child))
            killer.start()
            try:
                said = answer.read(1)
            finally:
                killer.cancel()
            if not said:
                kill_group(child)
                raise LabError(f"{_shown(argv)} did not get ready\n{_tail(read_text(log))}")
    return identity


def in_cgroups(cgroups: Sequence[Path], argv: Sequence[str]) -> list[str]:
    """The command that moves itself into each of the groups and then becomes `argv`."""
    script = 'while [ "$1" != -- ]; do echo 0 >"$1/cgroup.procs" || exit; shift; done; shift; exec "$@"'
    return ["/bin/sh", "-c", script, "in-cgroups", *map(str, cgroups), "--", *argv]


def wait_until(condition: Callable[[], bool], what: str, timeout: float, interval: float = 0.05) -> None:
    """Poll `condition`; raises LabError when it is still false after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise LabError(f"waited {timeout:g} s in vain: {what}")
        time.sleep(interval)


def tool(name: str) -> str:
    """Absolute path of a program of the machine. root's PATH may lack sbin."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin")
    if path is None:
        raise LabError(f"{name} is not installed on this machine")
    return path


def read_text(path: Path) -> str:
    """The file's text, or nothing when it does not exist."""
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


class Steps:
    """Prints each step once, with its time, when it is done."""

    def __init__(self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._began = clock()

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        begin = self._clock()
        try:
            yield
        except BaseException:
            self.say(f"{what}: FAILED after {self._clock() - begin:.1f} s")
            raise
        self.say(f"{what}: {self._clock() - begin:.1f} s")

    def say(self, text: str) -> None:
        print(f"lab: {text}", file=self._out or sys.stderr, flush=True)

    def total(self) -> float:
        """Seconds since this object was made."""
        return self._clock() - self._began


def _text(data: bytes | None) -> str:
    return (data or b"").decode(errors="replace")


def _tail(text: str, lines: int = 30) -> str:
    return "\n".join(f"  | {line}" for line in text.strip().splitlines()[-lines:])


def _shown(argv: Sequence[str]) -> str:
    text = " ".join(argv)
    return text if len(text) <= 300 else f"{text[:300]} …"
