"""Answers about sessions: ps, run --detach, up, inspect, logs, enable, disable."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict


class Session(TypedDict):
    """A session: a container of a sandbox."""

    sandbox: Annotated[str, "the id of its sandbox"]
    session: Annotated[str, "its own id, eight hexadecimal digits"]
    name: Annotated[str, "what its user calls it; its id when it was given no name"]
    purpose: Annotated[str, "`run`, `shell`, `daemon` (an agent that is always on) or `verify`"]
    service: Annotated[str, "which service of the sandbox it is: `main`"]
    state: Annotated[str, "Docker's word: `created`, `running`, `paused`, `restarting`, `exited` or `dead`"]
    status: Annotated[str, "Docker's sentence about it, for people"]
    created: Annotated[float, "when it was made, in seconds since 1970"]
    address: Annotated[str | None, "its address on the sandbox's network; null when it does not run"]
    container: Annotated[str, "the name of its container"]
    project: Annotated[str, "the directory of its policy"]
    attended: Annotated[
        bool | None,
        "whether somebody's corral looks after it; null when that is not known, and of an agent that is "
        "always on",
    ]


class Ps(TypedDict):
    """The sessions of all your sandboxes, oldest first; those that have ended too."""

    sessions: Annotated[list[Session], "each session"]


class Up(Session):
    """The agent that runs. With `--foreground` nothing is printed."""

    fresh: Annotated[bool, "whether it was started just now; else it ran already"]
    names: Annotated[dict[str, list[str]], "name that it may reach: the addresses in its hosts file"]
    host_services: Annotated[list[int], "TCP ports of services of this host that it may reach"]


class Ending(TypedDict):
    """How a session ended."""

    state: Annotated[str, "Docker's word for its state"]
    running: Annotated[bool, "whether it runs"]
    code: Annotated[int | None, "exit code; null while it runs and when it never did"]
    out_of_memory: Annotated[bool, "whether the kernel ended something of it for want of memory"]
    error: Annotated[str, "what Docker says went wrong; empty when nothing did"]
    started: Annotated[str, "when, in ISO 8601 and UTC; empty when it never ran"]
    finished: Annotated[str, "when, in ISO 8601 and UTC; empty when it has not ended"]


class Mount(TypedDict):
    """One mount."""

    source: Annotated[str, "the path on this host"]
    target: Annotated[str, "the path in the container"]
    read_only: Annotated[bool, "whether it cannot be written"]


class Limits(TypedDict):
    """What Docker was asked to limit."""

    pids: Annotated[int, "processes and threads; 0: no limit"]
    memory: Annotated[int, "bytes; 0: no limit"]
    cpus: Annotated[float, "processors; 0: no limit"]


class Inspection(Session):
    """What a session was started with, and how it ended. Secrets of its env_file are replaced by `***`."""

    ending: Annotated[Ending, "how it ended"]
    image: Annotated[str, "the id of its image"]
    policy: Annotated[str, "the hash of the policy it was started with; empty when that is not known"]
    command: Annotated[list[str], "what was started, with its arguments"]
    directory: Annotated[str, "where that was started"]
    user: Annotated[str, "as whom, `UID:GID`"]
    terminal: Annotated[bool, "whether it has a terminal"]
    environment: Annotated[list[str], "names of its variables; never their values"]
    mounts: Annotated[list[Mount], "what is mounted"]
    network: Annotated[str, "the name of its network"]
    limits: Annotated[Limits, "limits"]
    labels: Annotated[dict[str, str], "corral's labels of its container, without what it may reach"]
    egress: Annotated[
        dict[str, Any] | str,
        "what it was declared to reach, as its label has it: the shape is that of the label, which has a "
        "number of its own. Text when it cannot be read",
    ]
    last: Annotated[list[str], "the last lines of its output, as many as `--tail` says"]


class LogLine(TypedDict):
    """One line of output, of stdout or stderr. Escape sequences are left out."""

    session: Annotated[str, "the id of the session"]
    time: Annotated[
        str | None, "when it was printed, in ISO 8601 and UTC; null for the rest of a line that was cut"
    ]
    text: Annotated[str, "the line; one longer than 65536 bytes comes in parts"]


class Enabled(TypedDict):
    """A unit that brings an agent up with the machine."""

    sandbox: Annotated[str, "the id of the sandbox"]
    unit: Annotated[str, "the name of the unit"]
    program: Annotated[str, "the path of corral that it runs"]
    lingers: Annotated[bool, "whether your units run without a login"]
    restart_seconds: Annotated[list[int], "the first and the longest pause before a restart, in seconds"]


class Disabled(TypedDict):
    """Units that do not start any more with the machine."""

    disabled: Annotated[list[str], "names of the units; empty when nothing was enabled"]
