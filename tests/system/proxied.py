"""Talking to a sandbox's proxy as no well-behaved program does: from a session, and from the proxy itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .host import Done, Host, Project

HEAD = "profile: opencode\nlimits:\n  best_effort: true\negress:\n  profile_defaults: false\n"
WAITS = ("sh", "-c", "touch up; while [ ! -e end ]; do sleep 0.1; done")
CURL = ("curl", "-sk", "--max-time", "20", "-o", "/dev/null", "-w", "%{http_code} %{http_connect}")

# Plays cases, a list of JSON: `head` is what is sent first (hex); then, when the answer to it is 200, `hello` is
# what server name TLS is begun with ("" none), in `pieces` of so many bytes; or `raw` is sent instead (hex). Says
# status, body, and what became of the tunnel: what came through it, or "closed".
PROBE = r"""
import json, socket, ssl, sys
def until(s, found, data=b""):
    while not found(data):
        more = s.recv(65536)
        if not more: break
        data += more
    return data
def tls(s, name, pieces, fetch):
    told = ssl.create_default_context(); told.check_hostname = False; told.verify_mode = ssl.CERT_NONE
    inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
    it = told.wrap_bio(inward, outward, server_hostname=name or None)
    def flush():
        data = outward.read()
        step = pieces or max(1, len(data))
        for at in range(0, len(data), step): s.sendall(data[at:at + step])
    def run(call):
        while True:
            try: return call()
            except ssl.SSLWantReadError:
                flush(); data = s.recv(65536)
                if not data: raise EOFError
                inward.write(data)
    run(it.do_handshake); flush()
    it.write(b"GET / HTTP/1.1\r\nHost: " + fetch + b"\r\nConnection: close\r\n\r\n"); flush()
    got = b""
    while b"}" not in got: got += run(lambda: it.read(65536))
    return got.split(b"\r\n\r\n", 1)[1].decode()
def play(case):
    s = socket.create_connection(("proxy", 8443), timeout=20)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        s.sendall(bytes.fromhex(case["head"]))
        if case.get("hangs"): s.shutdown(socket.SHUT_WR)
        got = until(s, lambda data: b"\r\n\r\n" in data)
        head, _, rest = got.partition(b"\r\n\r\n")
        if not head: return {"status": 0, "body": "", "through": "closed"}
        status = int(head.split()[1])
        if status != 200:
            return {"status": status, "body": until(s, lambda data: False, rest).decode(), "through": ""}
        if "raw" in case:
            s.sendall(bytes.fromhex(case["raw"]))
            through = s.recv(65536).decode("latin-1") or "closed"
        elif "hello" in case:
            through = tls(s, case["hello"], case.get("pieces", 0), case["hello"].encode() or b"none")
        else: through = ""
        return {"status": 200, "body": "", "through": through}
    except (EOFError, ConnectionError) as error: return {"status": 200, "body": "", "through": "closed"}
    finally: s.close()
cases = json.load(open(sys.argv[1]))
print(json.dumps([play(case) for case in cases]))
"""

# Runs in the proxy's container, as whoever took it over would: `sys.argv[1]` is a list of steps in JSON.
TAKEN = r"""
import errno, json, os, socket, stat, sys, time
def lines(*messages):
    s = socket.socket(socket.AF_UNIX); s.settimeout(20); s.connect("/corral-dial/dial.sock")
    took, answers, reader = time.monotonic(), [], s.makefile("rb")
    for message in messages:
        s.sendall(json.dumps(message).encode() + b"\n"); answers.append(json.loads(reader.readline()))
    return answers, time.monotonic() - took
def dial(*names):
    return [dict(answer, took=0) for answer in lines(*({"v": 1, "op": "dial", "name": n, "port": p} for n, p in names))[0]]
def timed(name, port):
    answers, took = lines({"v": 1, "op": "dial", "name": name, "port": port})
    return [answers[0]["ok"], round(took, 2)]
def connect(*places):
    found = {}
    for address, port in places:
        try: socket.create_connection((address, port), timeout=2).close(); found[f"{address}:{port}"] = "open"
        except OSError as error: found[f"{address}:{port}"] = type(error).__name__
    return found
def flood(*addresses):
    s, sent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0
    for _ in range(300):
        for address in addresses:
            for port in (9, 53, 443):
                try: s.sendto(b"flood", (address, port))
                except OSError: pass
                sent += 1
    return sent
def sockets():
    found = []
    for top, folders, files in os.walk("/"):
        folders[:] = [one for one in folders if os.path.join(top, one) not in ("/proc", "/sys")]
        for name in (*files, *folders):
            try: mode = os.lstat(os.path.join(top, name)).st_mode
            except OSError: continue
            if stat.S_ISSOCK(mode): found.append(os.path.join(top, name))
    return sorted(found)
def abstract():
    rows = [line.split() for line in open("/proc/net/unix").read().splitlines()[1:]]
    return [row[7] for row in rows if len(row) > 7 and row[7].startswith("@")]
def tamper():
    path, found = "/corral-dial/dial.sock", {}
    def new():
        s = socket.socket(socket.AF_UNIX); s.bind("/corral-dial/mine.sock")
    for name, act in {
        "unlink": lambda: os.unlink(path), "rename": lambda: os.rename(path, "/corral-dial/old"),
        "over": lambda: os.rename("/tmp/other", path), "bind": new, "chmod": lambda: os.chmod(path, 0o777),
        "write": lambda: open("/corral-dial/file", "w"), "link": lambda: os.symlink("/tmp/other", "/corral-dial/link"),
    }.items():
        try: act(); found[name] = "done"
        except OSError as error: found[name] = errno.errorcode[error.errno]
    return found
print(json.dumps([globals()[step[0]](*step[1:]) for step in json.loads(sys.argv[1])]))
"""


def head(target: str, method: str = "CONNECT") -> str:
    """Return the beginning of a request, in hex."""
    return f"{method} {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode().hex()


def ask(target: str, **fields: Any) -> dict[str, Any]:
    """Return a case of the probe that is a CONNECT."""
    return {"head": head(target), **fields}


@dataclass
class Fenced:
    """A project with a session that waits, and its proxy."""

    project: Project
    main: str
    proxy: str
    address: str

    def played(self, *cases: dict[str, Any]) -> list[dict[str, Any]]:
        """Play cases of the probe in the session."""
        return _played(self.project, cases, self.inside)

    def inside(self, *argv: str, timeout: float = 120) -> Done:
        """Run a program in the session that waits, with its variables."""
        command = ["docker", "exec", "-w", self.project.path, self.main, *argv]
        return self.project.box.run(command, check=False, timeout=timeout)

    def curl(self, url: str, *words: str) -> str:
        """Return the server's code and the proxy's, of a curl in the session."""
        return self.inside(*CURL, *words, url).stdout.strip()

    def taken(self, *steps: Iterable[Any], timeout: float = 120) -> list[Any]:
        """Run steps of the program of whoever has taken over the proxy; see ``TAKEN``."""
        text = json.dumps([list(step) for step in steps])
        command = ["docker", "exec", self.proxy, "/usr/bin/python3", "-c", TAKEN, text]
        done = self.project.box.run(command, check=False, timeout=timeout)
        assert done.returncode == 0, done
        return list(json.loads(done.stdout))


def played(project: Project, *cases: dict[str, Any]) -> list[dict[str, Any]]:
    """Play cases of the probe in a session of their own."""
    return _played(project, cases, project.inside)


def _played(
    project: Project, cases: tuple[dict[str, Any], ...], run: Callable[..., Done]
) -> list[dict[str, Any]]:
    project.write("cases.json", json.dumps(cases))
    project.write("probe.py", PROBE)
    done = run("python3", "probe.py", "cases.json")
    assert done.returncode == 0, done
    return list(json.loads(done.stdout))


def fenced(project: Project, marker: str = "up") -> Fenced:
    """Start a session that waits."""
    project.start(*WAITS, marker=marker)
    names = project.containers()
    (proxy,) = [name for name in names if "-proxy-" in name]
    main = next(name for name in names if "-main-" in name)
    return Fenced(project, main, proxy, address_of(project, proxy))


def address_of(project: Project, container: str) -> str:
    shown = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    return project.box.run(["docker", "inspect", "-f", shown, container]).stdout.strip()


def held(host: Host, source: str) -> set[tuple[str, int]]:
    """Return (destination, port) of what the kernel lets an address of a sandbox reach."""
    listed = host.netadmin("ipset", "list", "corral-pins").stdout.partition("Members:\n")[2]
    rows = [line.split()[0].split(",") for line in listed.splitlines() if line]
    return {(row[2], int(row[1].removeprefix("tcp:"))) for row in rows if row[0] == source}
