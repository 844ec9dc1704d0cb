"""Somebody at a real terminal in the box, who types when there is something to read."""

from __future__ import annotations

import json
from typing import Any

from tests.lab import Box

# Steps: ["until", regex], ["settle"] (until a second passes without a word), ["type", text],
# ["resize", columns, rows], ["hang-up"], ["die"]. Prints {"said", "code"}.
SCRIPT = r"""
import fcntl, json, os, pty, re, select, struct, sys, termios, time
steps, argv = json.loads(sys.argv[1]), sys.argv[2:]
pid, terminal = pty.fork()
if pid == 0:
    os.execvp(argv[0], argv)
def resize(columns, rows):
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
resize(120, 40)
said, at, end = b"", 0, time.monotonic() + 240
def read(seconds):
    global said
    if not select.select([terminal], [], [], seconds)[0]:
        return True
    try:
        data = os.read(terminal, 65536)
    except OSError:
        return False
    said += data
    return bool(data)
for what, *rest in steps:
    if what == "until":
        while True:
            found = re.search(rest[0].encode(), said[at:])
            if found:
                at += found.end()
                break
            if time.monotonic() > end or not read(1):
                print(json.dumps({"said": said.decode("utf-8", "replace"), "code": None, "missing": rest[0]}))
                sys.exit()
    elif what == "settle":
        before = -1
        while before != len(said) and time.monotonic() < end:
            before = len(said)
            read(1)
        at = len(said)
    elif what == "type":
        os.write(terminal, rest[0].encode("latin-1"))
    elif what == "resize":
        resize(*rest)
    elif what == "die":
        os.kill(os.getpid(), 9)
    elif what == "hang-up":
        os.close(terminal)
        terminal = None
if terminal is not None:
    while read(1) or time.monotonic() < end:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            while select.select([terminal], [], [], 0.1)[0] and read(0):
                pass
            break
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps({"said": said.decode("utf-8", "replace"), "code": code, "missing": None}))
"""

LEAVE = "\x1d\x11"


def at_terminal(
    box: Box, directory: str, steps: list[list[Any]], *argv: str, **environ: str
) -> dict[str, Any]:
    """Run a program at a terminal; return what it said and its exit code.

    After the step "die", which kills whose terminal it is, nothing is known of either.
    """
    done = box.run(
        ["python3", "-c", SCRIPT, json.dumps(steps), *argv],
        cwd=directory,
        env={"TERM": "xterm-256color", **environ},
        timeout=300,
        check=["die"] not in steps,
    )
    if ["die"] in steps:
        return {"code": done.returncode}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert answer["missing"] is None, answer
    return answer
