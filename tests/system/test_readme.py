"""README's words, typed as they stand by the box's ordinary user at a terminal, from a fresh clone to the last line."""

from __future__ import annotations

import io
import json
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy import profiles
from tests.lab import Box, Internet, Lab
from tests.lab.product import PROJECT

from .host import CONFIG, install

CLONE = "corral"
ALLOWED = "allowed1.corral.example"

# Types lines into a shell, each when the prompt is back. Says yes to what is asked, leaves what fills the screen.
TYPIST = r"""
import fcntl, json, os, pty, re, select, struct, sys, termios, time
lines = json.loads(sys.argv[1])
pid, terminal = pty.fork()
if pid == 0:
    os.environ.update(PS1="typed> ", PS2="more> ", TERM="xterm-256color", HISTFILE="/dev/null")
    os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))

def until_prompt(limit):
    data, end, answered, leaving = b"", time.monotonic() + limit, 0, 0.0
    while True:
        plain = re.sub(rb"\x1b\[[0-9;?<>=]*[A-Za-z]|\x1b\][^\x07]*\x07|\r", b"", data)
        if plain.endswith(b"typed> "):
            return data.decode(errors="replace")
        if len(re.findall(rb"\[(?:Y/n|y/N)\]", plain)) > answered:
            answered += 1
            os.write(terminal, b"y\n")
        full = data.rfind(b"\x1b[?1049h") > data.rfind(b"\x1b[?1049l")
        if full and b"ctrl+p" in plain.lower() and time.monotonic() > leaving:
            leaving = time.monotonic() + 2
            os.write(terminal, b"\x03")
        if time.monotonic() > end:
            sys.exit(f"no prompt came after {limit} s: {data[-3000:]!r}")
        if select.select([terminal], [], [], 1)[0]:
            data += os.read(terminal, 65536)

until_prompt(30)
said = []
for line in lines:
    os.write(terminal, line.encode() + b"\n")
    shown = until_prompt(600)
    os.write(terminal, b"echo code=$?\n")
    code = re.findall(r"code=(\d+)", until_prompt(30))[-1]
    said.append({"line": line, "shown": shown, "code": int(code)})
os.write(terminal, b"exit\n")
print(json.dumps(said))
"""

EDITOR = "#!/bin/sh\nprintf 'limits: {best_effort: true}\\n' >>\"$1\"\nsed -i 's/^  # allow:$/  allow:\\n    - NAME/' \"$1\"\n"


def commands(section: str) -> list[str]:
    """The lines of a README section's first block for a shell."""
    found = re.search(
        rf"^## {section}$.*?^```sh\n(.*?)^```$", (PROJECT / "README.md").read_text(), re.M | re.S
    )
    assert found, f"README has no block of commands under {section}"
    return [line for line in found[1].splitlines() if line.strip()]


def tracked() -> bytes:
    """What a clone of the work tree holds, as a tar archive."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, check=True, capture_output=True).stdout
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in filter(None, names.decode().split("\0")):
            if (Path(PROJECT) / name).exists():
                tar.add(Path(PROJECT) / name, arcname=name)
    return archive.getvalue()


@pytest.fixture
def fresh(lab: Lab, installed: Box, internet: Internet) -> Iterator[Box]:
    """The box before anybody installed corral, with a clone of it and a project in the home directory."""
    box = installed
    project = f"{box.home}/Projects/myproject"
    box.run(["corral", "uninstall", "--yes", "--purge", "--force"], timeout=180)
    box.run(["pipx", "uninstall", "corral"], timeout=120)
    box.write(f"{box.home}/{CLONE}.tar", tracked())
    box.run(
        ["sh", "-ec", f"rm -rf {CLONE} {project}; mkdir -p {CLONE} {project}; tar -xf {CLONE}.tar -C {CLONE}"]
    )
    box.write(f"{box.home}/editor", EDITOR.replace("NAME", ALLOWED), mode=0o755)
    # The addresses of the lab's internet are such as corral refuses on any other machine.
    box.write(f"{box.home}/.config/corral/enforcer.toml", CONFIG)
    for name in (ALLOWED, *profiles.get("opencode").default_egress):
        internet.set_name(name, ["203.0.113.10"])
    box.flush_dns()
    try:
        yield box
    finally:
        box.run(["sh", "-c", f"cd {project} && corral down"], check=False, timeout=120)
        box.run(["rm", "-rf", CLONE, f"{CLONE}.tar", "editor", project], check=False)
        box.run(["rm", "-f", "/var/lib/corral-lab/installed"], user="root")
        install(lab)


@pytest.mark.engine(
    *("trixie", "sid", "bookworm", "trixie-own", "rootless"),
    reason="Docker on the legacy tables needs python-iptables too, which is in docs/engines.md and not in README",
)
def test_the_readme_typed_literally_from_the_clone_to_the_agent_s_screen(
    fresh: Box, internet: Internet
) -> None:
    lines = [
        f"cd ~/{CLONE}",
        *commands("Install"),
        f"export EDITOR={fresh.home}/editor",
        *commands("Quickstart"),
    ]
    assert {"pipx install .", "corral build", "corral verify", "corral run"} <= {
        line.partition("#")[0].strip() for line in lines
    }
    done = fresh.run(["python3", "-c", TYPIST, json.dumps(lines)], timeout=1500)
    said = {row["line"].partition("#")[0].strip(): row for row in json.loads(done.stdout.splitlines()[-1])}
    for row in said.values():
        # An agent's program that is left with Ctrl-C has its own idea of an exit code.
        assert row["code"] == 0 or row["line"].startswith("corral run"), row
    # With an engine of the user's own "you need neither".
    how = "done, without root" if fresh.engine.rootless else "corral install will do this with sudo"
    assert how in said["corral install"]["shown"]
    assert "allow that?" in said["corral build"]["shown"]
    assert f"+ reach {ALLOWED}:443" in said["corral build"]["shown"]
    assert re.search(r"\b0 failed", said["corral verify"]["shown"])
    # The agent drew its screen: it was started, in the fence, and had what it needs.
    assert "\x1b[?1049h" in said["corral run"]["shown"]
    assert internet.packets("203.0.113.10") > 0
