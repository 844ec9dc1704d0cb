"""The proxy of a sandbox asked for what it must not give: by odd clients, by whoever took it over, under changes."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from policy.hosts import canonical_wire_name
from policy.patterns import parse_pattern

from .host import Host, until
from .proxied import CURL, HEAD, Fenced, address_of, ask, fenced, head, held, played
from .scriptdns import always, script_dns

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "host-vectors.json").read_text())["patterns"]
# What a name resolved to is remembered for its time, so no other test has these.
ZONE, TCP, NAMELESS = "asked.corral.example", "tcp.corral.example", "nameless.corral.example"
MANY = "many.corral.example"
ONE, TWO, OTHER = f"one.{ZONE}", f"two.{ZONE}", "forbidden.corral.example"
FIRST, SECOND, THIRD, DENIED = "203.0.113.181", "203.0.113.182", "203.0.113.183", "203.0.113.184"
POLICY = f"""{HEAD}  allow:
    - "*.{ZONE}"
    - {{host: "*.{TCP}", ports: [443, 7], protocol: tcp}}
    - {{host: "*.{NAMELESS}", sni: false}}
"""

pytestmark = pytest.mark.engine("trixie", "sid", "bookworm", reason="what a proxy may is the same everywhere")


@pytest.fixture
def named(host: Host) -> Host:
    """The host, and names of the zone at the far end; what is not allowed exists there, too."""
    for name, address in ((ONE, FIRST), (TWO, SECOND), (f"a.{TCP}", THIRD), (f"a.{NAMELESS}", THIRD)):
        host.internet.set_name(name, [address])
    return host


def allows(*entries: str, mode: str = "") -> str:
    text = HEAD + (f"  mode: {mode}\n" if mode else "") + "  allow:\n"
    return text + "".join(f"    - {json.dumps(entry)}\n" for entry in entries)


def lines_of(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.splitlines() if line.startswith("{")]


def together(vectors: list[dict[str, str]]) -> list[list[str]]:
    """Return the vectors' entries in policies, in none of which one allows what another is not to allow."""
    found: list[list[str]] = []
    for entry in dict.fromkeys(vector["pattern"] for vector in vectors):

        def fits(others: list[str], entry: str = entry) -> bool:
            both = [*others, entry]
            denied = [v["host"] for v in vectors if v["pattern"] in both and v["expect"] == "deny"]
            return not any(
                parse_pattern(one).matches(canonical_wire_name(host)) for one in both for host in denied
            )

        place = next((one for one in found if fits(one)), None)
        if place is None:
            found.append([entry])
        else:
            place.append(entry)
    return found


@pytest.mark.case(20)
def test_the_vectors_get_their_verdict_from_a_policy_or_from_the_real_proxy(host: Host) -> None:
    project = host.project("vectors")
    project.corral("build", timeout=400)
    by_pattern: dict[str, list[dict[str, str]]] = {}
    for vector in VECTORS:
        by_pattern.setdefault(vector["pattern"], []).append(vector)
    # What is no entry of a policy is none: each is named, and there is no proxy to ask.
    bad_entries = [p for p, vectors in by_pattern.items() if vectors[0]["expect"] == "CONFIG-ERROR"]
    project.policy(allows(*bad_entries, "api.openai.com", mode="proxy"), approve=False)
    done = project.inside("true", check=False)
    assert done.returncode != 0 and project.containers() == []
    named = {int(number) for number in re.findall(r"egress\.allow\[(\d+)\]", done.stderr)}
    assert named == set(range(len(bad_entries))), done.stderr
    asked = [vector for vector in VECTORS if vector["pattern"] not in bad_entries]
    good = {v["host"].rstrip(".").lower() for v in asked if v["expect"] == "allow"}
    bad = {v["host"].rstrip(".").lower() for v in asked if v["expect"] == "deny"} - good
    for name in good:
        host.internet.set_name(name, [FIRST])
    for name in bad:
        host.internet.set_name(name, [DENIED])
    mark, codes = host.internet.mark(), {"allow": 200, "deny": 403, "REJECT": 400}
    host.internet.reset_counters()
    for entries in together(asked):
        project.policy(allows(*entries, mode="proxy"))
        vectors = [vector for entry in entries for vector in by_pattern[entry]]
        found = played(project, *(ask(f"{vector['host']}:443") for vector in vectors))
        for vector, answer in zip(vectors, found, strict=True):
            assert answer["status"] == codes[vector["expect"]], (vector, answer)
    # Nobody was asked for a name that a policy does not mean, and no packet went where it leads.
    assert {query.name for query in host.internet.queries(mark)} == good
    assert host.internet.packets(FIRST, "tcp", 443) > 0
    assert host.internet.packets(DENIED) == 0
    host.control(DENIED)


@pytest.mark.case(20)
@pytest.mark.representative
def test_odd_requests_get_their_code_and_one_line_and_nothing_is_asked_for_them(named: Host) -> None:
    host = named
    project = host.project("odd", POLICY)
    project.corral("build", timeout=400)
    box = fenced(project)
    log = host.box.popen(["docker", "logs", "-f", box.proxy], stdout=subprocess.PIPE, text=True)
    forbidden = host.internet.addresses["forbidden"]
    mark = host.internet.mark()
    host.internet.reset_counters()
    cases: dict[str, tuple[dict[str, Any], int]] = {
        "an address": (ask(f"{forbidden}:443"), 400),
        "an address as one number": (ask("3405803842:443"), 400),
        "an address of IPv6": (ask("[::1]:443"), 400),
        "a user": (ask(f"{ONE}@{OTHER}:443"), 400),
        "a user that is the name": (ask(f"{OTHER}:443@{ONE}:443"), 400),
        "port 0": (ask(f"{ONE}:0"), 400),
        "no port": (ask(ONE), 400),
        "a port that is too high": (ask(f"{ONE}:65979"), 400),
        "another port": (ask(f"{ONE}:8443"), 403),
        "the apex": (ask(f"{ZONE}:443"), 403),
        "another name": (ask(f"{OTHER}:443"), 403),
        "localhost": (ask("localhost:443"), 403),
        "a GET": ({"head": head(f"http://{ONE}/", "GET")}, 405),
        "a GET of a path": ({"head": head("/", "GET")}, 405),
        "a POST": ({"head": head(f"http://{OTHER}/", "POST")}, 405),
        "two lines in a name": (ask(f"{ONE}\nx:443"), 400),
        "a head without an end": ({"head": (b"CONNECT " + b"a" * 9000).hex()}, 400),
        "TLS to the proxy itself": ({"head": "160301"}, 400),
    }
    answers = dict(zip(cases, box.played(*(case for case, _ in cases.values())), strict=True))
    for what, (_, status) in cases.items():
        assert answers[what]["status"] == status, (what, answers[what])
        # One line, which repeats nothing of what was asked.
        assert re.fullmatch(rf"{status} [^\n]* \(request [^\n ]+\)\n", answers[what]["body"]), answers[what]
        assert "corral.example" not in answers[what]["body"]
    assert host.internet.queries(mark) == []
    assert host.internet.all_packets() == {}
    # The control of these zeros: the same program, and a name that is allowed.
    (good,) = box.played(ask(f"{ONE}:443", hello=ONE))
    assert json.loads(good["through"])["server"] == FIRST
    assert {query.name for query in host.internet.queries(mark)} == {ONE}
    assert host.internet.packets(FIRST, "tcp", 443) > 0
    host.control(forbidden)
    told = json.dumps(json.loads(project.corral("denied", "--json").stdout))
    assert OTHER in told and ZONE in told
    # Each is in the log by the id that its client was told, and counted.
    host.box.run(["docker", "kill", "-s", "TERM", box.proxy])
    said = lines_of(log.communicate(timeout=30)[0])
    by_id = {row["id"]: row for row in said if "id" in row}
    for answer in answers.values():
        ident = answer["body"].rpartition("(request ")[2].removesuffix(")\n")
        assert by_id[ident]["status"] == answer["status"], (answer, by_id[ident])
    counts = [row["counts"] for row in said if row["event"] == "counters"][-1]
    expected = [status for _, status in cases.values()]
    # `corral denied`, `status` and the gate ask for nothing.
    for status in (400, 403, 405):
        assert counts[f"status_{status}"] == expected.count(status), counts
    assert counts["allowed"] == 1 and counts["denied"] == expected.count(403)


@pytest.mark.case(20)
def test_what_goes_through_is_tls_with_the_name_that_was_asked_for(named: Host) -> None:
    host = named
    box = fenced(host.project("hellos", POLICY))
    through = {
        "whole": ask(f"{ONE}:443", hello=ONE),
        "in pieces of one byte": ask(f"{ONE}:443", hello=ONE, pieces=1),
        "in another case": ask(f"{ONE.upper()}:443", hello=ONE),
        "no name where that is allowed": ask(f"a.{NAMELESS}:443", hello=""),
        "the name where none is needed": ask(f"a.{NAMELESS}:443", hello=f"a.{NAMELESS}"),
    }
    for what, answer in zip(through, box.played(*through.values()), strict=True):
        assert answer["status"] == 200, (what, answer)
        assert json.loads(answer["through"])["server"] in (FIRST, THIRD), (what, answer)
    (raw,) = box.played(ask(f"a.{TCP}:7", raw=b"hello".hex()))
    assert raw["through"] == "hello"
    host.internet.reset_counters()
    closed = {
        "another name": ask(f"{ONE}:443", hello=OTHER),
        "another name of the zone": ask(f"{ONE}:443", hello=TWO),
        "another name in pieces": ask(f"{ONE}:443", hello=OTHER, pieces=1),
        "another name where none is needed": ask(f"a.{NAMELESS}:443", hello=ONE),
        "no name": ask(f"{ONE}:443", hello=""),
        "not TLS": ask(f"{ONE}:443", raw=b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".hex()),
        "TLS that is none": ask(f"{ONE}:443", raw="16030100050100000100"),
    }
    for what, answer in zip(closed, box.played(*closed.values()), strict=True):
        assert (answer["status"], answer["through"]) == (200, "closed"), (what, answer)
    shown = host.box.run(["docker", "logs", box.proxy]).stdout
    reasons = [row["reason"] for row in lines_of(shown) if row["event"] == "closed"]
    mismatches = ["sni-mismatch"] * 4
    assert reasons == [*mismatches, "no-sni", "not-tls", "bad-hello"]
    # The server saw connections, which end before anything is said: no hello's worth of data arrived.
    assert 0 < host.internet.packets(FIRST, "tcp", 443) < 12 * len(closed)
    told = box.project.corral("denied").stdout
    assert all(name in told for name in (ONE, f"a.{NAMELESS}")), told


LISTENER = """
import socket
s = socket.socket(); s.bind(("0.0.0.0", 5000)); s.listen(50)
open("listening", "w").close()
while True:
    c, peer = s.accept()
    open("visitors", "a").write(peer[0] + "\\n")
    c.close()
"""


@pytest.mark.case(20)
def test_who_takes_the_proxy_over_reaches_what_its_sandbox_asks_for_and_nothing_else(named: Host) -> None:
    host = named
    mine = fenced(host.project("taken", POLICY))
    theirs = fenced(host.project("beside", allows("*.other.corral.example")))
    host.internet.set_name("a.other.corral.example", [DENIED])
    for box in (mine, theirs):
        box.project.write("listener.py", LISTENER)
        box.project.box.run(
            ["docker", "exec", "-d", "-w", box.project.path, box.main, "python3", "listener.py"]
        )
        host.box.wait_for(lambda at=box: at.project.exists("listening"), timeout=20)  # type: ignore[misc]
    sessions = [address_of(box.project, box.main) for box in (mine, theirs)]
    gateways = [box.project.sandbox["gateway"] for box in (mine, theirs)]
    forbidden, resolver = host.internet.addresses["forbidden"], host.internet.addresses["resolver"]
    far = [forbidden, DENIED, "169.254.169.254", "10.9.9.9", "192.168.9.9"]
    host.internet.reset_counters()
    mark = host.internet.mark()
    places = [(address, port) for address in (*far, resolver) for port in (53, 80, 443)]
    places += [(address, 5000) for address in sessions]
    places += [(address, port) for address in (*gateways, host.box.address) for port in (22, 53, 8443, 10053)]
    places += [(theirs.address, 8443)]
    # It asks as often as it likes, and for what the other sandbox may have.
    denied = [("a.other.corral.example", 443), (OTHER, 443), (ONE, 80), (ONE, 22), (forbidden, 443)]
    found, answers, sent = mine.taken(
        ["connect", *places], ["dial", *denied], ["flood", *far, resolver, *sessions]
    )
    assert set(found.values()).isdisjoint({"open"}), found
    assert [answer["kind"] for answer in answers] == ["denied"] * 4 + ["malformed"]
    assert sent > 5000
    for address in (*far, resolver):
        # The host's own resolver asks there: that is not this container.
        if address != resolver:
            assert host.internet.packets(address) == 0, (address, host.internet.all_packets())
    assert {query.name for query in host.internet.queries(mark)} == set()
    assert not mine.project.exists("visitors") and not theirs.project.exists("visitors")
    assert held(host, mine.address) == set()
    # What it may ask for it gets, on that port, and nothing more.
    ((granted,),) = mine.taken(["dial", (ONE, 443)])
    assert granted["addresses"] == [FIRST]
    assert held(host, mine.address) == {(FIRST, 443)}
    (found,) = mine.taken(["connect", (FIRST, 443), (FIRST, 80), (FIRST, 7)])
    assert found[f"{FIRST}:443"] == "open" and list(found.values()).count("open") == 1
    assert host.internet.packets(FIRST, "tcp", 443) > 0
    assert host.internet.packets(FIRST, "tcp", 80) == host.internet.packets(FIRST, "tcp", 7) == 0
    # The controls: the other's proxy gets that very name, who owns the sessions reaches them, others what is far.
    ((other,),) = theirs.taken(["dial", ("a.other.corral.example", 443)])
    assert other["addresses"] == [DENIED]
    for box, address in zip((mine, theirs), sessions, strict=True):
        host.shell(f"exec 3<>/dev/tcp/{address}/5000")
        until(lambda at=box: at.project.exists("visitors"), 10, "it listens")  # type: ignore[misc]
    for address in far:
        host.control(address)


@pytest.mark.case(20)
def test_who_takes_the_proxy_over_has_one_socket_and_cannot_put_another_there(named: Host) -> None:
    host = named
    mine = fenced(host.project("socket", POLICY))
    theirs = fenced(host.project("beside", POLICY))
    path = "/corral-dial/dial.sock"
    sockets, abstract, done, granted = mine.taken(["sockets"], ["abstract"], ["tamper"], ["dial", (ONE, 443)])
    assert (sockets, abstract) == ([path], [])
    assert set(done.values()) <= {"EROFS", "ENOENT", "EPERM", "EACCES", "EXDEV"}, done
    assert done["unlink"] == done["rename"] == done["bind"] == done["write"] == "EROFS"
    assert granted[0]["ok"]
    inodes = [
        host.box.run(["docker", "exec", box.proxy, "stat", "-c", "%d:%i %u %a", path]).stdout
        for box in (mine, theirs)
    ]
    assert len(set(inodes)) == 2 and all(one.endswith(" 1000 600\n") for one in inodes)
    # Neither capabilities nor a way to get any, nor a secret of the policy or of the host.
    status = host.box.run(["docker", "exec", mine.proxy, "cat", "/proc/self/status"]).stdout
    assert re.search(r"CapEff:\s+0{16}\n", status) and "NoNewPrivs:\t1" in status
    mounts = host.box.run(["docker", "exec", mine.proxy, "cat", "/proc/mounts"]).stdout
    assert mine.project.path not in mounts
    (mount,) = [line.split() for line in mounts.splitlines() if " /corral-dial " in line]
    assert "ro" in mount[3].split(",")


# What comes in on connections that stay: requests without waiting, what is none, without an end, and byte by byte.
FLOODER = r"""
import json, os, socket, threading, time
def line(n): return json.dumps({"v": 1, "op": "dial", "name": f"n{n}.ZONE", "port": 443}).encode() + b"\n"
kinds = [
    lambda n: b"".join(line(n * 1000 + k) for k in range(50)), lambda n: b"not json\n" * 400, lambda n: b"x" * 200000,
    lambda n: b'{"v":1,"op":"dial","name":"' + b"a" * 4000 + b'"}\n', lambda n: b"[" * 4000 + b"\n", lambda n: None,
]
sent = [0]
def run(n):
    while True:
        try:
            s = socket.socket(socket.AF_UNIX); s.settimeout(20); s.connect("/corral-dial/dial.sock")
            data = kinds[n % len(kinds)](n)
            if data is None:
                for byte in line(n): s.sendall(bytes([byte])); time.sleep(0.5)
            else: s.sendall(data); sent[0] += data.count(b"\n")
            s.settimeout(3); s.recv(100)
        except OSError: time.sleep(0.01)
        finally: s.close()
for n in range(400): threading.Thread(target=run, args=(n,), daemon=True).start()
end = time.monotonic() + 60
while time.monotonic() < end:
    time.sleep(0.2); open("/tmp/sent", "w").write(str(sent[0]))
"""


def memory(host: Host) -> int:
    """Return how many KiB the enforcer has in memory."""
    return int(re.search(r"VmRSS:\s+(\d+) kB", host.box.read(f"/proc/{host.enforcer_pid()}/status"))[1])  # type: ignore[index]


@pytest.mark.case(20)
def test_a_flood_of_questions_leaves_the_service_and_other_sandboxes_as_they_were(named: Host) -> None:
    host = named
    mine, theirs = (fenced(host.project(name, POLICY)) for name in ("floods", "beside"))
    pid, before = host.enforcer_pid(), memory(host)
    program = FLOODER.replace("ZONE", ZONE)
    host.box.run(["docker", "exec", "-d", mine.proxy, "/usr/bin/python3", "-c", program])

    def sent() -> int:
        return int(host.box.run(["docker", "exec", mine.proxy, "cat", "/tmp/sent"], check=False).stdout or 0)

    until(lambda: sent() > 0, 20, "the flood has begun")
    began, dials, statuses, most = time.monotonic(), [], [], before
    while time.monotonic() - began < 12 or sent() < 10_000:
        assert time.monotonic() - began < 50, sent()
        ((good, took),) = theirs.taken(["timed", ONE, 443])
        assert good
        dials.append(took)
        asked = time.monotonic()
        theirs.project.corral("status", "--json")
        statuses.append(time.monotonic() - asked)
        most = max(most, memory(host))
    assert theirs.curl(f"https://{TWO}/") == "200 200"
    print(
        f"{sent()} lines sent; the other's dials took at most {max(dials):.2f} s, corral status at most"
        f" {max(statuses):.2f} s; memory {before} KiB, at most {most} KiB"
    )
    assert max(dials) < 5 and max(statuses) < 10
    assert most - before < 65536
    assert host.enforcer_pid() == pid


# As the proxy does, over several connections: each address on four ports, and a name that is another one each time.
ROTATING = r"""
import json, queue, socket, threading
asked, found = queue.SimpleQueue(), []
for n in range(200):
    for port in (443, 444, 445, 446): asked.put((f"n{n}.MANY", port))
    asked.put(("ONE", 443))
def run():
    s = socket.socket(socket.AF_UNIX); s.connect("/corral-dial/dial.sock"); r = s.makefile("rb")
    while True:
        try: name, port = asked.get_nowait()
        except queue.Empty: return
        s.sendall(json.dumps({"v": 1, "op": "dial", "name": name, "port": port}).encode() + b"\n")
        a = json.loads(r.readline()); found.append(a.get("kind") or a["addresses"][0])
threads = [threading.Thread(target=run) for _ in range(16)]
for t in threads: t.start()
for t in threads: t.join()
print(json.dumps(found))
"""


def test_answers_that_are_new_each_time_make_nothing_fail_elsewhere(named: Host) -> None:
    host = named
    # As many addresses as the far end has, each with names and ports enough for more than a sandbox's share.
    pool = [f"203.0.113.{number}" for number in range(1, 255) if number not in (1, 53)]
    names = [f"n{number}.{MANY}" for number in range(200)]
    script = {name: always(pool[at % len(pool)], ttl=1) for at, name in enumerate(names)}
    script[ONE] = {"steps": [{"a": pool, "window": 1, "ttl": 0}]}
    script[TWO] = always(SECOND)
    many = f"{POLICY}    - {{host: '*.{MANY}', ports: [443, 444, 445, 446]}}\n"
    with script_dns(host) as dns:
        dns.play(script)
        mine, theirs = fenced(host.project("rotates", many)), fenced(host.project("beside", POLICY))
        program = ROTATING.replace("MANY", MANY).replace("ONE", ONE)
        argv = ["docker", "exec", mine.proxy, "/usr/bin/python3", "-c", program]
        running = host.box.popen(argv, stdout=subprocess.PIPE, text=True)
        tries = 0
        while running.poll() is None:
            assert theirs.curl(f"https://{TWO}/") == "200 200"
            tries += 1
        found = json.loads(running.communicate()[0])
        ok = [one for one in found if one[0].isdigit()]
        print(
            f"{len(found)} dials, {len(ok)} opened, {len(set(ok))} addresses; {tries} of the other went through"
        )
        # It had all that one may have, and was told to wait; nothing else was said to it.
        assert len(found) == 1000 and set(found) - set(pool) <= {"busy"} and len(set(ok)) > 100
        assert 500 < len(held(host, mine.address)) <= 512
        assert tries >= 3
        # Neither of the other, nor of a sandbox that is new.
        assert theirs.curl(f"https://{TWO}/") == "200 200"
        third = host.project("new", POLICY)
        assert third.inside(*CURL, f"https://{TWO}/").stdout.split()[-2:] == ["200", "200"]
        errors = json.loads(theirs.project.corral("status", "--json").stdout)["errors"]
        assert errors == []


def streaming(box: Fenced, name: str) -> None:
    script = f"curl -skN --max-time 100 'https://{name}/stream?interval=0.1&count=900' >got; echo $? >code"
    command = ["docker", "exec", "-d", "-w", box.project.path, box.main, "sh", "-c", script]
    box.project.box.run(command)
    until(lambda: box.project.exists("got") and box.project.read("got"), 20, "the stream has begun")


@pytest.mark.representative
def test_what_is_allowed_while_it_runs_works_at_once_and_what_is_denied_is_cut(named: Host) -> None:
    host = named
    other = "a.other.corral.example"
    host.internet.set_name(other, [DENIED])
    box = fenced(host.project("changes", POLICY))
    assert box.curl(f"https://{other}/") == "000 403"
    box.project.corral("allow", "*.other.corral.example")
    assert box.curl(f"https://{other}/") == "200 200"
    streaming(box, other)
    assert not box.project.exists("code")
    began = time.monotonic()
    box.project.corral("deny", "*.other.corral.example")
    until(lambda: box.project.exists("code"), 20, "the tunnel was cut")
    print(f"cut {time.monotonic() - began:.1f} s after the command began")
    assert held(host, box.address) == set()
    assert box.curl(f"https://{other}/") == "000 403"
    # The same for one name of the policy's own zone.
    assert box.curl(f"https://{ONE}/") == "200 200"
    box.project.corral("deny", ONE)
    assert box.curl(f"https://{ONE}/") == "000 403"
    assert box.curl(f"https://{TWO}/") == "200 200"
    assert held(host, box.address) == {(SECOND, 443)}


def test_of_two_sessions_with_different_policies_both_ask_for_what_both_allow(named: Host) -> None:
    host = named
    other = "a.other.corral.example"
    host.internet.set_name(other, [DENIED])
    project = host.project("differ", allows(f"*.{ZONE}", "*.other.corral.example"))
    box = fenced(project)
    assert (box.curl(f"https://{ONE}/"), box.curl(f"https://{other}/")) == ("200 200", "200 200")
    project.policy(allows(f"*.{ZONE}", "*.third.corral.example"))
    script = f"{' '.join(CURL[:-2])} -w '%{{http_code}} %{{http_connect}}\\n' https://{ONE}/ https://{other}/ || true"
    second = project.start(
        "sh", "-c", f"{script}; touch second; while [ ! -e end2 ]; do sleep 0.1; done", marker="second"
    )
    # While both run, neither has what one of them alone allows.
    assert (box.curl(f"https://{ONE}/"), box.curl(f"https://{other}/")) == ("200 200", "000 403")
    project.write("end2", "")
    said = second.communicate(timeout=60)[0]
    assert "*.third.corral.example: port 443 is closed while session" in said, said
    assert "they share a proxy" in said
    assert box.curl(f"https://{other}/") == "200 200"


def test_with_mode_proxy_nothing_is_open_to_the_session_itself(named: Host) -> None:
    host = named
    listed = "allowed1.corral.example"
    address = host.internet.addresses["allowed1"]
    box = fenced(host.project("moded", allows(listed, f"*.{ZONE}", mode="proxy")))
    session = address_of(box.project, box.main)
    assert held(host, session) == set()
    host.internet.reset_counters()
    for target in (listed, ONE):
        assert box.curl(f"https://{target}/") == "200 200"
        assert box.inside("getent", "hosts", target).returncode == 2
    assert (held(host, session), held(host, box.address)) == (set(), {(address, 443), (FIRST, 443)})
    reached = host.internet.packets(address, "tcp", 443)
    assert reached > 0
    past = ("--noproxy", "*", "--resolve", f"{listed}:443:{address}")
    assert box.curl(f"https://{listed}/", *past) == "000 000"
    assert host.internet.packets(address, "tcp", 443) == reached
    assert box.curl(f"https://{OTHER}/") == "000 403"


@pytest.mark.case(15)
def test_names_that_lead_to_what_no_name_may_open_are_refused_and_told(named: Host) -> None:
    host = named
    with script_dns(host) as dns:
        dns.play({ONE: always(FIRST)})
        box = fenced(host.project("lies", POLICY))
        gateway = box.project.sandbox["gateway"]
        docker0 = host.shell("ip -4 -o addr show docker0 | awk '{print $4}' | cut -d/ -f1").stdout.strip()
        lies = [
            "169.254.169.254",
            "127.0.0.1",
            "10.0.0.5",
            "0.0.0.0",
            "100.64.0.1",
            "192.168.9.9",
            "168.63.129.16",
        ]
        lies += [gateway, docker0, host.box.address, box.address, address_of(box.project, box.main)]
        names = {f"l{number}.{ZONE}": lie for number, lie in enumerate(lies)}
        script = {name: always(lie) for name, lie in names.items()}
        dns.play({**script, ONE: always(FIRST), TWO: always(SECOND, *lies[:3], ttl=0)})
        host.internet.reset_counters()
        found = box.played(*(ask(f"{name}:443") for name in names), ask(f"{ONE}:443", hello=ONE))
        assert [answer["status"] for answer in found] == [403] * len(lies) + [200]
        assert json.loads(found[-1]["through"])["server"] == FIRST
        # The good one of an answer with bad ones is the only one that is opened.
        assert box.curl(f"https://{TWO}/") == "200 200"
        assert held(host, box.address) == {(FIRST, 443), (SECOND, 443)}
        assert {one for one in lies if host.internet.packets(one)} == set()
        told = box.project.corral("denied").stdout
        for name in names:
            assert name in told, told
