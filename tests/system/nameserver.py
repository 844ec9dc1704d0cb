"""A name server on the host that forwards, is slow, silent, lies or fails, as a file says, name by name."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.lab import Box

from .host import CONFIG, ENFORCER, Host

PORT = 5454
MODES = "/tmp/nameserver.json"

# Modes of a name, or of "*": ok, silent, servfail, slow:SECONDS, flap (every other question is dropped),
# lie:ADDRESS,ADDRESS…
SERVER = """\
import json, socket, struct, sys, threading, time
port, path, upstream = int(sys.argv[1]), sys.argv[2], sys.argv[3]
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", port))
seen = {}
def name_of(q):
    labels, at = [], 12
    while q[at]:
        labels.append(q[at + 1:at + 1 + q[at]].decode()); at += 1 + q[at]
    return ".".join(labels), q[12:at + 5], struct.unpack("!H", q[at + 1:at + 3])[0]
def forward(q):
    up = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); up.settimeout(3)
    up.sendto(q, (upstream, 53))
    return up.recv(4096)
def answer(q, peer):
    name, question, kind = name_of(q)
    modes = json.load(open(path))
    mode, _, rest = modes.get(name.lower(), modes.get("*", "ok")).partition(":")
    seen[name] = seen.get(name, 0) + 1
    if mode == "silent" or (mode == "flap" and seen[name] % 2):
        return
    if mode == "slow":
        time.sleep(float(rest))
    if mode == "servfail":
        r = q[:2] + struct.pack("!HHHHH", 0x8182, 1, 0, 0, 0) + question
    elif mode == "lie":
        rows = [struct.pack("!HHHIH", 0xC00C, 1, 1, 5, 4) + socket.inet_aton(a) for a in rest.split(",")] if kind == 1 else []
        r = q[:2] + struct.pack("!HHHHH", 0x8580, 1, len(rows), 0, 0) + question + b"".join(rows)
    else:
        r = forward(q)
    server.sendto(r, peer)
def quietly(q, peer):
    try:
        answer(q, peer)
    except OSError:
        pass
print("ready", flush=True)
while True:
    threading.Thread(target=quietly, args=server.recvfrom(4096), daemon=True).start()
"""


@dataclass
class NameServer:
    """``modes`` says how names are answered from now on."""

    box: Box

    def modes(self, modes: Mapping[str, str]) -> None:
        self.box.write(MODES + ".new", json.dumps(dict(modes)))
        self.box.run(["mv", MODES + ".new", MODES])


def restart_enforcer(host: Host) -> None:
    host.user_systemctl("restart", ENFORCER)
    host.wait_enforcer()


@contextlib.contextmanager
def name_server(host: Host) -> Iterator[NameServer]:
    """The enforcer asks this server, and no other, for the length of a block."""
    config = f"{host.box.home}/.config/corral/enforcer.toml"
    made = NameServer(host.box)
    made.modes({})
    upstream = host.internet.addresses["resolver"]
    process = host.box.popen(
        ["python3", "-c", SERVER, str(PORT), MODES, upstream], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        host.box.write(config, f'{CONFIG}[dns]\nservers = ["127.0.0.1:{PORT}"]\n')
        restart_enforcer(host)
        yield made
    finally:
        Box.kill(process)
        host.box.write(config, CONFIG)
        restart_enforcer(host)
