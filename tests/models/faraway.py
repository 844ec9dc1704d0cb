"""The model server in the lab's internet, over TLS: what a harness reaches through its sandbox's proxy or not at all.

Runs as a program of its own in the internet's namespace: ``ADDRESS PORT NAME CA KEY SCRIPT LOG``; it prints ``ready``
and ends with its standard input.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme

from tests.lab import execute
from tests.lab.layout import Layout, netns_path
from tests.models.host import FINAL

ADDRESS, PORT = "203.0.113.191", 8444
ROOT = Path(__file__).parents[2]


@dataclass
class Faraway:
    """A running server."""

    log: Path

    def requests(self) -> list[dict[str, Any]]:
        """Return what was asked; see ``tests.models.host.Model``."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@contextmanager
def faraway(lab: Layout, name: str, commands: Sequence[str], key: str, plain: str = "") -> Iterator[Faraway]:
    """Serve as ``name`` at ADDRESS:PORT of a lab's internet for the length of a block."""
    with tempfile.TemporaryDirectory() as directory:
        script, log = Path(directory) / "script.json", Path(directory) / "log"
        script.write_text(
            json.dumps({"commands": list(commands), "final": FINAL, "key": key, "plain": plain})
        )
        log.touch()
        argv = [
            execute.tool("nsenter"),
            f"--net={netns_path(lab.inet_netns)}",
            sys.executable,
            "-m",
            __name__,
        ]
        argv += [ADDRESS, str(PORT), name, str(lab.ca_certificate), str(lab.ca_key), str(script), str(log)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(
            argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes
        ) as process:
            assert process.stdout is not None and process.stdin is not None
            assert process.stdout.readline() == "ready\n"
            yield Faraway(log)
            process.stdin.close()


def main(address: str, port: str, name: str, ca: str, key: str, script: str, log: str) -> None:
    from tests.models.server import serve

    authority = trustme.CA.from_pem(Path(ca).read_bytes(), Path(key).read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with authority.issue_cert(name).private_key_and_cert_chain_pem.tempfile() as file:
        context.load_cert_chain(file)
    with Path(log).open("a") as target:
        server = serve(int(port), json.loads(Path(script).read_text()), target, address)
        # A handshake is made where it is read, so that one who does not finish it stops nobody.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        print("ready", flush=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.stdin.read()
        server.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
