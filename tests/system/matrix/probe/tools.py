"""What the probes are made of: system calls by number, children that may die, words for what came of it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import signal
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Given = Mapping[str, Any]
Probe = Callable[[Given], str]

SECONDS = 60
# The tables of other processors differ; the lab has this one.
NUMBERS = {
    "x86_64": {
        "acct": 163,
        "add_key": 248,
        "bpf": 321,
        "clone": 56,
        "clone3": 435,
        "delete_module": 176,
        "finit_module": 313,
        "fsopen": 430,
        "init_module": 175,
        "io_uring_setup": 425,
        "iopl": 172,
        "kexec_load": 246,
        "keyctl": 250,
        "mount": 165,
        "name_to_handle_at": 303,
        "open_by_handle_at": 304,
        "open_tree": 428,
        "perf_event_open": 298,
        "pivot_root": 155,
        "process_vm_readv": 310,
        "ptrace": 101,
        "reboot": 169,
        "request_key": 249,
        "setns": 308,
        "syslog": 103,
        "umount2": 166,
        "unshare": 272,
        "userfaultfd": 323,
    }
}
libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a system call. Raises OSError."""
    ctypes.set_errno(0)
    number = NUMBERS[platform.machine()][name]
    result = libc.syscall(ctypes.c_long(number), *(_word(argument) for argument in arguments))
    if result == -1:
        raise OSError(ctypes.get_errno(), name)
    return int(result)


def _word(argument: int | bytes | ctypes.Array[ctypes.c_char] | None) -> Any:
    return ctypes.c_long(argument) if isinstance(argument, int) else argument


def said(attempt: Callable[[], object], done: str = "done") -> str:
    """Return the name of the error that an attempt ends with, or ``done``."""
    try:
        attempt()
    except TimeoutError:
        return "silence"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return done


def each(attempts: Mapping[str, Callable[[], object]]) -> str:
    """Return what all of them end with, when that is one thing, else each with its own."""
    answers = {name: said(attempt) for name, attempt in attempts.items()}
    if len(set(answers.values())) == 1:
        return next(iter(answers.values()))
    return ", ".join(f"{name} {answer}" for name, answer in answers.items())


def apart(attempt: Callable[[], str]) -> str:
    """Return what an attempt says in a child of its own, whose end is told when it has one."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        try:
            answer = attempt()
        except BaseException as problem:
            answer = f"{type(problem).__name__}: {problem}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        answer = answers.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return answer


def status(field: str) -> str:
    """Return a field of /proc/self/status."""
    with open("/proc/self/status") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name == field:
                return " ".join(value.split())
    return "unknown"


def first(path: str, size: int = 4096) -> str:
    """Return how a file begins. Raises OSError."""
    with open(path, "rb") as file:
        return file.read(size).decode("utf-8", "replace")


def some(names: list[str], most: int = 8) -> str:
    """Return a list as text: "none", the names, or how many there are when they are many."""
    if not names:
        return "none"
    return ", ".join(names) if len(names) <= most else "many"


@contextlib.contextmanager
def descriptor(number: int) -> Iterator[int]:
    try:
        yield number
    finally:
        os.close(number)


@contextlib.contextmanager
def made(path: str) -> Iterator[None]:
    """A file for a while. Raises OSError."""
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    try:
        yield
    finally:
        os.remove(path)


def route_message(kind: int, flags: int, body: bytes) -> bytes:
    """Return a message of rtnetlink that asks for an acknowledgement."""
    return struct.pack("=IHHII", 16 + len(body), kind, flags | 5, 1, 0) + body
