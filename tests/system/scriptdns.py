"""A name server on the host that plays a script: what each question for each name gets, one after the other."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.lab import Box

from .host import CONFIG, PYTHON, Host
from .nameserver import restart_enforcer

PORT = 5455
SCRIPT, LOG = "/tmp/scriptdns.json", "/tmp/scriptdns.log"

# A name has steps; each question takes the next, the last one stays (with "cycle" they begin anew). A step:
# a: addresses; pick: that many of them at random; ttl; chain: names of CNAMEs in between; rcode; drop; delay:
# seconds; tc: truncated over UDP; window: the n-th question gets addresses n to n + window of "a", round and
# round. Each answer is logged before it is sent.
SERVER = """\
import asyncio, json, random, sys, time
import dns.flags, dns.message, dns.name, dns.rcode, dns.rrset
port, path, log = int(sys.argv[1]), sys.argv[2], open(sys.argv[3], "a", buffering=1)
seen = {}
async def answer(wire, tcp):
    query = dns.message.from_wire(wire)
    question = query.question[0]
    name = question.name.to_text(omit_final_dot=True).lower()
    script = json.load(open(path))
    reply = dns.message.make_response(query)
    entry = script.get(name)
    if entry is None:
        reply.set_rcode(dns.rcode.NXDOMAIN)
        return reply.to_wire()
    steps = entry["steps"]
    if not tcp:
        seen[name] = seen.get(name, 0) + 1
    number = max(0, seen.get(name, 1) - 1)
    step = steps[number % len(steps) if entry.get("cycle") else min(number, len(steps) - 1)]
    await asyncio.sleep(step.get("delay", 0))
    if step.get("drop"):
        return None
    reply.set_rcode(dns.rcode.from_text(step.get("rcode", "NOERROR")))
    if step.get("tc") and not tcp:
        reply.flags |= dns.flags.TC
        return reply.to_wire()
    owner, ttl, found = question.name, step.get("ttl", 60), list(step.get("a", []))
    if "window" in step:
        at = number % len(found)
        found = [found[(at + offset) % len(found)] for offset in range(step["window"])]
    if "pick" in step:
        found = random.sample(found, step["pick"])
    for target in step.get("chain", []):
        target = dns.name.from_text(target)
        reply.answer.append(dns.rrset.from_text(owner, ttl, "IN", "CNAME", target.to_text()))
        owner = target
    if found:
        wanted = sorted(set(found))
        reply.answer.append(dns.rrset.from_text(owner, ttl, "IN", "A", *wanted))
        log.write(f"{time.time()} {name} {','.join(wanted)}\\n")
    return reply.to_wire(max_size=65535)
class Udp(asyncio.DatagramProtocol):
    def connection_made(self, transport):
        self.transport = transport
    def datagram_received(self, data, peer):
        asyncio.ensure_future(self.play(data, peer))
    async def play(self, data, peer):
        wire = await answer(data, False)
        if wire is not None:
            self.transport.sendto(wire, peer)
async def tcp(reader, writer):
    size = int.from_bytes(await reader.readexactly(2), "big")
    wire = await answer(await reader.readexactly(size), True)
    if wire is not None:
        writer.write(len(wire).to_bytes(2, "big") + wire)
        await writer.drain()
    writer.close()
async def main():
    loop = asyncio.get_running_loop()
    await loop.create_datagram_endpoint(Udp, ("127.0.0.1", port))
    server = await asyncio.start_server(tcp, "127.0.0.1", port)
    print("ready", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


def steps(*played: Mapping[str, Any], cycle: bool = False) -> dict[str, Any]:
    """Return what a name does."""
    return {"steps": list(played), "cycle": cycle}


def always(*addresses: str, **options: Any) -> dict[str, Any]:
    """Return a name with one answer."""
    return steps({"a": list(addresses), **options})


@dataclass
class ScriptDns:
    """``play`` says what names do from now on; names without a script do not exist."""

    box: Box

    def play(self, script: Mapping[str, Any]) -> None:
        self.box.write(SCRIPT + ".new", json.dumps(script))
        self.box.run(["mv", SCRIPT + ".new", SCRIPT])

    def answered(self, name: str | None = None) -> set[str]:
        """Return every address that was ever in an answer; of one name when given."""
        rows: Sequence[list[str]] = [line.split(" ") for line in self.box.read(LOG).splitlines()]
        return {address for row in rows if name in (None, row[1]) for address in row[2].split(",")}


def warm(host: Host) -> None:
    """Have the layers of an image in the cache: nothing below waits for a build."""
    host.project("warm").corral("build", timeout=500)


@contextlib.contextmanager
def script_dns(host: Host) -> Iterator[ScriptDns]:
    """The enforcer asks this server, and no other, for the length of a block."""
    warm(host)
    config = f"{host.box.home}/.config/corral/enforcer.toml"
    made = ScriptDns(host.box)
    made.play({})
    host.root("rm", "-f", LOG)  # a file of somebody else in /tmp is not opened, not even by root
    host.box.write(LOG, "")
    argv = [PYTHON, "-c", SERVER, str(PORT), SCRIPT, LOG]
    process = host.box.popen(argv, stdout=subprocess.PIPE, text=True)
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
