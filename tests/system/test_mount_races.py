"""A hostile process exchanges a mounted directory all the time: what the policy did not name is never seen."""

from __future__ import annotations

import pytest

from .host import BASE_POLICY, Host

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
SESSIONS = 5


@pytest.mark.parametrize(("kind", "pause"), [("directory", 0.0), ("directory", 0.03), ("link", 0.03)])
def test_a_directory_that_is_exchanged_all_the_time_is_never_mounted(
    host: Host, kind: str, pause: float
) -> None:
    secret = f"{OTHER}-secret"
    host.shell(
        f"rm -rf {SHARED} {OTHER} {secret}; mkdir -p {SHARED} {secret}; touch {SHARED}/right {secret}/secret;"
        + (f" mv {secret} {OTHER}" if kind == "directory" else f" ln -s {secret} {OTHER}")
    )
    host.box.write(f"{SHARED}/../exchange.py", EXCHANGER)
    project = host.project("race", BASE_POLICY + f"mounts:\n  ro: [{SHARED}]\n")
    look = f"ls {SHARED}"
    # The control: left alone, it is mounted and shows what is in it.
    assert project.inside("sh", "-c", look).stdout == "right\n"
    exchanger = host.box.popen(
        ["python3", f"{SHARED}/../exchange.py", SHARED, OTHER, str(pause)],
        cwd=project.path,
        stdout=-1,
        text=True,
    )
    seen, refused = [], 0
    try:
        for _ in range(SESSIONS):
            done = project.inside("sh", "-c", look, check=False)
            seen += done.stdout.split()
            refused += done.returncode != 0
    finally:
        project.write("end", "")
        count = int(exchanger.communicate(timeout=30)[0])
    assert "secret" not in seen
    assert refused + len(seen) == SESSIONS
    assert count >= (1000 if pause == 0 else 50)
    assert not project.containers()
    host.shell(f"rm -rf {SHARED} {OTHER} {secret}")
