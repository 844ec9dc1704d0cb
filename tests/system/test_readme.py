"""README's words, typed as they stand by the box's ordinary user at a terminal, from a fresh clone to the last line."""

from __future__ import annotations

import io
import json
import re
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from policy import profiles
from tests.lab import Box, Internet, Lab
from tests.lab.product import PROJECT

from .host import CONFIG, install
from .person import LEAVE

CLONE = "corral"
ALLOWED, SECOND = "allowed1.corral.example", "allowed2.corral.example"

# Types lines into a shell, each when the prompt is back. Says yes to what is asked, leaves what fills the screen; with
# a line come keys that leave what it starts, and the words after which they are typed.
TYPIST = r"""
import fcntl, json, os, pty, re, select, struct, sys, termios, time
lines = json.loads(sys.argv[1])
pid, terminal = pty.fork()
if pid == 0:
    os.environ.update(PS1="typed> ", PS2="more> ", TERM="xterm-256color", HISTFILE="/dev/null")
    os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))

def until_prompt(limit, keys="", after=""):
    data, end, answered, leaving = b"", time.monotonic() + limit, 0, 0.0
    while True:
        plain = re.sub(rb"\x1b\[[0-9;?<>=]*[A-Za-z]|\x1b\][^\x07]*\x07|\r", b"", data)
        if plain.endswith(b"typed> "):
            return data.decode(errors="replace")
        if len(re.findall(rb"\[(?:Y/n|y/N)\]", plain)) > answered:
            answered += 1
            os.write(terminal, b"y\n")
        if keys and re.search(after.encode(), plain) and time.monotonic() > leaving:
            leaving = time.monotonic() + 2
            os.write(terminal, keys.encode())
        full = not keys and data.rfind(b"\x1b[?1049h") > data.rfind(b"\x1b[?1049l")
        if full and b"ctrl+p" in plain.lower() and time.monotonic() > leaving:
            leaving = time.monotonic() + 2
            os.write(terminal, b"\x03")
        if time.monotonic() > end:
            sys.exit(f"no prompt came after {limit} s: {data[-3000:]!r}")
        if select.select([terminal], [], [], 1)[0]:
            data += os.read(terminal, 65536)

until_prompt(30)
said = []
for line, *leaving in lines:
    os.write(terminal, line.encode() + b"\n")
    shown = until_prompt(600, *leaving)
    os.write(terminal, b"echo code=$?\n")
    code = re.findall(r"code=(\d+)", until_prompt(30))[-1]
    said.append({"line": line, "shown": shown, "code": int(code)})
os.write(terminal, b"exit\n")
print(json.dumps(said))
"""

EDITOR = "#!/bin/sh\nprintf 'limits: {best_effort: true}\\n' >>\"$1\"\nsed -i 's/^  # allow:$/  allow:\\n    - NAME/' \"$1\"\n"

ID = """corral ps --here --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["sessions"][0]["session"])'"""
LEFT = (LEAVE, "leaves it running")


@dataclass(frozen=True)
class Words:
    """Words of README between backquotes, and the line that is typed for them, when it is another one.

    ``leave``: keys, and the words after which they leave what the line starts. Without ``words`` it is what has to be
    done beside it.
    """

    words: str = ""
    line: str = ""
    leave: tuple[str, ...] = ()
    codes: tuple[int, ...] = (0,)
    shows: str = ""

    @property
    def typed(self) -> str:
        return self.line or self.words


# What README tells to do beside its blocks, in an order in which somebody may come to it.
REST = (
    Words("systemctl --user status corral-enforcer", shows="active \\(running\\)"),
    Words('sudo loginctl enable-linger "$USER"'),
    Words("corral run --detach", shows="[0-9a-f]{8}"),
    Words("corral status", shows=ALLOWED),
    Words("corral allow HOST --for 1h", f"corral allow {SECOND} --for 1h", shows="203.0.113.20"),
    Words("corral deny HOST", f"corral deny {SECOND}", shows=SECOND),
    Words("corral refresh", shows=ALLOWED),
    Words("corral policy check HOST:PORT", f"corral policy check {ALLOWED}:443", shows=ALLOWED),
    Words("corral run --resume SESSION", f'corral run --resume "$({ID})"', LEFT, shows="which goes on"),
    Words("corral render", shows="io.corral"),
    Words("render --check", "corral render --check"),
    Words("corral shell", leave=("\x04", r"[$#] $")),
    Words("corral denied"),
    Words("corral verify --explain CHECK", "corral verify --explain no-sudo", shows="no-sudo"),
    # What it finds in the box is no matter here.
    Words("corral doctor", codes=(0, 1), shows="checks:"),
    Words("corral prune"),
    Words("corral df", shows="myproject-"),
    *(
        Words("corral completion bash|zsh|fish", f"corral completion {name}", shows=told)
        for name, told in (("bash", "complete -"), ("zsh", "compdef"), ("fish", "complete -"))
    ),
    # An upgrade, "sandboxes may run meanwhile".
    Words("corral install"),
    Words("corral attach", leave=LEFT, shows="which goes on"),
    Words("corral down", shows="removed 1 container"),
    Words(line="sed -i '/^mode:/d' corral.yaml; echo 'mode: daemon' >>corral.yaml"),
    Words("corral up", shows="is up"),
    Words("corral attach", leave=LEFT, shows="which goes on"),
    Words("corral enable", shows="corral-sandbox-"),
    Words(line="corral disable"),
    Words(line="corral down", shows="removed 1 container"),
    Words("--dry-run", "corral uninstall --dry-run"),
    Words("corral uninstall"),
    Words("pipx uninstall corral", shows="uninstalled"),
)
# In a sentence that says what they are, after the blocks that type them.
TYPED_ABOVE = {"corral verify", "corral run", "corral shell"}


def sentences() -> set[str]:
    """Return the commands that README has between backquotes."""
    prose = re.sub(r"^```\w*\n.*?^```$", "", (PROJECT / "README.md").read_text(), flags=re.M | re.S)
    found = {" ".join(words.split()) for words in re.findall(r"`([^`]+)`", prose)}
    begins = r"(corral|sudo|pipx|systemctl|render) \S|--dry-run"
    return {words for words in found if re.match(begins, words)} - TYPED_ABOVE


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
def test_the_readme_typed_literally_from_the_clone_to_the_last_word(fresh: Box, internet: Internet) -> None:
    lines = [
        f"cd ~/{CLONE}",
        *commands("Install"),
        f"export EDITOR={fresh.home}/editor",
        *commands("Quickstart"),
    ]
    assert {"pipx install .", "corral build", "corral verify", "corral run"} <= {
        line.partition("#")[0].strip() for line in lines
    }
    assert sentences() == {one.words for one in REST} - {""} - TYPED_ABOVE
    typed = [[line] for line in lines] + [[one.typed, *one.leave] for one in REST]
    done = fresh.run(["python3", "-c", TYPIST, json.dumps(typed)], timeout=2400)
    rows = json.loads(done.stdout.splitlines()[-1])
    said = {row["line"].partition("#")[0].strip(): row for row in rows[: len(lines)]}
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
    for one, row in zip(REST, rows[len(lines) :], strict=True):
        assert row["code"] in one.codes, row
        # Without what was typed itself.
        assert re.search(one.shows, row["shown"].partition("\n")[2]), row
    assert fresh.run(["sh", "-c", "command -v corral"], check=False).returncode != 0
    assert fresh.run(["test", "-e", "/opt/corral"], check=False).returncode == 1
