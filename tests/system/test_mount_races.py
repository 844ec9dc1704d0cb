"""A hostile process exchanges a mounted directory all the time: what the policy did not name is never seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .host import BASE_POLICY, PYTHON, Host, Project

# Exchanges two paths without a moment in which one is missing (renameat2, RENAME_EXCHANGE), until told to end.
EXCHANGER = """\
import ctypes, os, sys, time
first, second, pause = sys.argv[1], sys.argv[2], float(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
count = 0
while not os.path.exists("end"):
    assert libc.renameat2(-100, first.encode(), -100, second.encode(), 2) == 0, ctypes.get_errno()
    count += 1
    time.sleep(pause)
if count % 2:
    libc.renameat2(-100, first.encode(), -100, second.encode(), 2)
print(count)
"""
SHARED, OTHER = "/home/dev/Projects/race-shared", "/home/dev/Projects/race-other"
SECRET, EXCHANGE = "/home/dev/Projects/race-secret", "/home/dev/exchange.py"
SESSIONS = 5


@pytest.mark.parametrize("pause", [0.0, 0.03])
def test_a_link_that_takes_the_place_of_a_directory_is_never_followed(host: Host, pause: float) -> None:
    prepare(host, "link")
    project = host.project("race", BASE_POLICY + f"mounts:\n  ro: [{SHARED}]\n")
    look = f"ls {SHARED}"
    # The control: left alone, it is mounted and shows what is in it.
    assert project.inside("sh", "-c", look).stdout == "right\n"
    seen, refused = [], 0
    with exchanging(host, project, pause) as count:
        for _ in range(SESSIONS):
            done = project.inside("sh", "-c", look, check=False)
            seen += done.stdout.split()
            refused += done.returncode != 0
    assert "secret" not in seen
    assert refused + len(seen) == SESSIONS
    assert count[0] >= (1000 if pause == 0 else 50)
    assert not project.containers()


def prepare(host: Host, kind: str) -> str:
    """Make what is exchanged; return the path that is mounted.

    directory: another directory takes the place. link: a link to another directory does. parent: the directory
    above is exchanged with a link, below which there is a directory of the same name.
    """
    below = "/inner" if kind == "parent" else ""
    script = f"""\
rm -rf {SHARED} {OTHER} {SECRET}; mkdir -p {SHARED}{below} {SECRET}{below}
touch {SHARED}{below}/right {SECRET}{below}/secret
"""
    host.shell(script + (f"mv {SECRET} {OTHER}" if kind == "directory" else f"ln -s {SECRET} {OTHER}"))
    host.box.write(EXCHANGE, EXCHANGER)
    return SHARED + below


@contextmanager
def exchanging(host: Host, project: Project, pause: float) -> Iterator[list[int]]:
    """Exchange the two all the time; the number of times is in the list when the block has ended."""
    words = ["python3", EXCHANGE, SHARED, OTHER, str(pause)]
    process = host.box.popen(words, cwd=project.path, stdout=-1, text=True)
    count: list[int] = []
    try:
        yield count
    finally:
        project.write("end", "")
        count.append(int(process.communicate(timeout=30)[0]))
        host.shell(f"rm -rf {SHARED} {OTHER} {SECRET}")


# `corral run` from reading the policy to the container's end, again and again in one process: a start of the
# program for each would take longer than all the rest. Without a network, which has no part in this.
STARTER = """\
import json, os, sys
from pathlib import Path
from corral.console import Console
from corral.context import Invocation, current_user, new_session
from corral.lifecycle import created, prepare
from corral.session import Request
from policy.errors import CorralError
shared, tries = sys.argv[1], int(sys.argv[2])
count = {"started": 0, "refused outside": 0, "refused inside": 0, "another than was looked at": 0}
seen = {}
look = ("sh", "-c", f"stat -c '%d %i' {shared}; ls {shared}")
for _ in range(tries):
    invocation = Invocation(current_user(os.environ), Path.cwd(), Console(open(os.devnull, "w")))
    try:
        with created(invocation, prepare(invocation), Request("run", look, new_session())) as made:
            invocation.api.start(made.ident)
            code = int(invocation.api.wait(made.ident)["StatusCode"])
            out = invocation.api.logs(made.ident, stdout=True, stderr=False).decode().splitlines()
            told = invocation.api.logs(made.ident, stdout=False, stderr=True).decode()
    except CorralError as error:
        assert "exchanged" in error.message or "changed while" in error.message or "allows more" in error.message
        count["refused outside"] += 1
        continue
    if code:
        assert "not what was there when the policy was checked" in told and not out, (out, told)
        count["refused inside"] += 1
        continue
    count["started"] += 1
    (held,) = [row for row in json.loads(made.spec.env["CORRAL_MOUNTS"]) if row[0] == shared]
    count["another than was looked at"] += out[0] != f"{held[1]} {held[2]}"
    for name in out[1:]:
        seen[name] = seen.get(name, 0) + 1
print(json.dumps({"count": count, "seen": seen}))
"""
TRIES = 334


@pytest.mark.parametrize(("kind", "pause"), [("link", 0.01), ("parent", 0.01), ("directory", 0.0)])
def test_of_a_thousand_starts_none_shows_anything_but_what_was_looked_at(
    host: Host, kind: str, pause: float
) -> None:
    path = prepare(host, kind)
    alone = BASE_POLICY.partition("egress:")[0] + "egress: {mode: none}\n"
    project = host.project("races", f"{alone}mounts:\n  ro: [{path}]\n")
    assert project.inside("ls", path, timeout=400).stdout == "right\n"
    host.box.write("/home/dev/starter.py", STARTER)

    def start(tries: int) -> dict[str, dict[str, int]]:
        words = [PYTHON, "/home/dev/starter.py", path, str(tries)]
        return dict(json.loads(host.box.run(words, cwd=project.path, timeout=1800).stdout))

    # The control: left alone, each start succeeds.
    control = start(3)
    assert (control["count"]["started"], control["seen"]) == (3, {"right": 3})
    with exchanging(host, project, pause) as exchanged:
        found = start(TRIES)
    print(kind, pause, exchanged, found)
    count = found["count"]
    assert count["another than was looked at"] == 0
    assert count["started"] + count["refused outside"] + count["refused inside"] == TRIES
    assert count["started"] < TRIES < exchanged[0]
    # A directory that was moved to the path is what the path names; what a link leads to never is.
    assert set(found["seen"]) <= ({"right", "secret"} if kind == "directory" else {"right"})
    assert not project.containers()
