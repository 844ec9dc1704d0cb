"""For each check of `corral verify`: one property broken, and the checks that must fail then. Data.

A tampering of a container is one of: another create request (``body``), another image (``image``: a script that
root runs in it), something done on the host before it starts (``before``) or while it runs (``during``). The rest
(``whole``) is done around `corral verify` itself. Names in capitals are filled in by the bench.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tamperbench import Place

Body = dict[str, Any]
# Of what ``whole`` says, where a policy has names that are not pinned ahead.
NAMES = "names:"
ALL_ROOT_OWNED = "root-owned:*"


@dataclass(frozen=True)
class Tampering:
    """``fails`` is every check that must fail, by default the one that it is for; ``why`` when it is more.

    ``idle``: box -> why it breaks nothing there.
    """

    check: str
    how: str
    body: Callable[[Body], None] | None = None
    image: str = ""
    before: Callable[[Place], None] | None = None
    during: Callable[[Place], None] | None = None
    whole: str = ""
    fails: tuple[str, ...] = ()
    why: str = ""
    ci: bool = True
    idle: Mapping[str, str] = field(default_factory=dict)

    @property
    def expected(self) -> frozenset[str]:
        return frozenset(self.fails or (self.check,))

    @property
    def ident(self) -> str:
        return f"{self.check} {self.how}".replace(" ", "-").replace("/", "_")


def host(**changes: Any) -> Callable[[Body], None]:
    return lambda body: body["HostConfig"].update(changes)


def top(**changes: Any) -> Callable[[Body], None]:
    return lambda body: body.update(changes)


def mount(target: str, read_only: bool) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        (found,) = [row for row in body["HostConfig"]["Mounts"] if row["Target"] == target]
        found["ReadOnly"] = read_only

    return change


def one_more_mount(body: Body) -> None:
    body["HostConfig"]["Mounts"].append(
        {"Type": "bind", "Source": "/srv", "Target": "/mnt", "ReadOnly": True}
    )


def noexec_tmp(body: Body) -> None:
    body["HostConfig"]["Tmpfs"]["/tmp"] = "rw,noexec,nosuid,nodev,mode=1777"


def without_dead_resolver(body: Body) -> None:
    del body["HostConfig"]["Dns"]


def chowned(path: str) -> str:
    return f"chown 1000:1000 {path}"


def allowed(port: int, target: str) -> Callable[[Place], None]:
    """The kernel lets the container reach one address more: an element that no policy has."""
    return lambda place: place.allow(port, target)


def peer_allowed(place: Place) -> None:
    """The same of another sandbox's container, which engines since 28 keep from other bridges by rules of their own."""
    place.allow(8080, "PEER")
    for address in (place.bench.filled("PEER"), place.address):
        place.shell(
            f"iptables -t raw -S PREROUTING | sed -n '/ -d {re.escape(address)}.32 /s/^-A/-D/p' "
            "| while read -r rule; do iptables -t raw $rule; done"
        )


def at_home(name: str) -> Callable[[Place], None]:
    return lambda place: place.shell(f"mkdir {place.home}/{name}", user="dev")


def engine_file(name: str) -> Callable[[Place], None]:
    """A file that Docker itself keeps for the container becomes the agent's."""
    return lambda place: place.shell(f"chown 1000:1000 /var/lib/docker/containers/{place.ident}/{name}")


def other_pin(place: Place) -> None:
    place.shell(f"sed -i 's/^203.0.113.10 /203.0.113.11 /' {place.hosts}", user="dev")


def ipv6_default(place: Place) -> None:
    place.in_network("echo 0 >/proc/sys/net/ipv6/conf/default/disable_ipv6")


def ipv6_address(place: Place) -> None:
    place.in_network(
        "echo 0 >/proc/sys/net/ipv6/conf/eth0/disable_ipv6; ip -6 address add 2001:db8::5/128 dev eth0 nodad"
    )


PROJECT = "/home/dev/Projects/tamper"
NOTES = "/home/dev/notes"
CONFIG = "/home/agent/.config/opencode"
STATE = (
    "/home/agent",
    *(f"/home/agent/{part}/opencode" for part in (".local/share", ".local/state", ".cache")),
)
SECRETS = "/var/secrets/tamper.env"
OPENCODE = "/usr/local/bin/opencode"

TABLE: tuple[Tampering, ...] = (
    Tampering("non-root", "a group of root's is added", body=host(GroupAdd=["0"])),
    Tampering("uid-matches-host", "another group than the user's", body=top(User="1000:1001")),
    Tampering(
        "no-sudo", "a set-uid program in the image", image="install -m 4755 /bin/true /usr/local/bin/helper"
    ),
    Tampering("no-sudo", "sudo by name", image="touch /usr/bin/sudo", ci=False),
    Tampering("no-capabilities", "one capability in the bounding set", body=host(CapAdd=["NET_RAW"])),
    Tampering("no-capabilities", "without no-new-privileges", body=host(SecurityOpt=[]), ci=False),
    Tampering(
        "seccomp",
        "without the filter of system calls",
        body=host(SecurityOpt=["no-new-privileges", "seccomp=unconfined"]),
        fails=("seccomp", ALL_ROOT_OWNED),
        why="in namespaces of its own the agent can mount over any file",
    ),
    Tampering(
        "iptables-refused",
        "a firewall program that works",
        image="printf '#!/bin/sh\\n' >/usr/sbin/iptables; chmod 755 /usr/sbin/iptables",
    ),
    Tampering(
        "iptables-refused",
        "root with CAP_NET_ADMIN and CAP_NET_RAW",
        body=lambda body: (top(User="0:0")(body), host(CapAdd=["NET_ADMIN", "NET_RAW"])(body))[0],
        fails=(
            "iptables-refused",
            "non-root",
            "uid-matches-host",
            "no-capabilities",
            f"runs:{OPENCODE}",
            f"rw-writable:{PROJECT}",
            f"ro-unwritable:{CONFIG}",
            *(f"state-writable:{path}" for path in STATE),
        ),
        why="only root gets capabilities that count, and without the one for it root cannot enter the user's files",
        ci=False,
    ),
    *(
        Tampering(
            f"no-docker-socket:{path}",
            "the name is there",
            # Debian's /var/run is a link to /run: taken apart, so that one name can be there without the other.
            image=f"rm /var/run; mkdir /var/run; touch {path}",
        )
        for path in ("/var/run/docker.sock", "/run/docker.sock")
    ),
    *(
        Tampering(
            f"no-credential-dir:{name}", "it is in the agent's home", before=at_home(name), ci=name == ".ssh"
        )
        for name in (".ssh", ".aws", ".gnupg", ".kube", ".docker", ".netrc")
    ),
    Tampering(
        "host-home-only-mounts",
        "a file in the image at the user's home",
        image="mkdir -p /home/dev; touch /home/dev/.bash_history",
    ),
    Tampering("mounts-equal-policy", "one mount more", body=one_more_mount),
    Tampering(
        "env-file-not-mounted",
        "a file at its path",
        image=f"mkdir -p {SECRETS.rpartition('/')[0]}; touch {SECRETS}",
    ),
    Tampering("read-only-root", "a writable root", body=host(ReadonlyRootfs=False)),
    Tampering(
        "root-owned:/usr/local/bin/corral-entrypoint",
        "it is the agent's",
        image=chowned("/usr/local/bin/corral-entrypoint"),
    ),
    Tampering(
        "root-owned:/usr/local/bin/corral-verify",
        "it is the agent's",
        image=chowned("/usr/local/bin/corral-verify"),
    ),
    Tampering(
        "root-owned:/usr/local/bin/corral-verify",
        "others may write it",
        image="chmod 777 /usr/local/bin/corral-verify",
        ci=False,
    ),
    Tampering(
        "root-owned:/usr/local/bin/corral-proxy",
        "it is the agent's",
        image=chowned("/usr/local/bin/corral-proxy"),
        ci=False,
    ),
    Tampering("root-owned:/etc/hosts", "mounted writable", body=mount("/etc/hosts", False)),
    Tampering("root-owned:/etc/hostname", "it is the agent's", during=engine_file("hostname"), ci=False),
    Tampering("root-owned:/etc/resolv.conf", "it is the agent's", during=engine_file("resolv.conf")),
    Tampering(
        f"root-owned:{OPENCODE}",
        "it is the agent's",
        image=f"rm {OPENCODE}; install -o 1000 -m 755 /bin/true {OPENCODE}",
        ci=False,
    ),
    Tampering(
        "root-owned:/etc/opencode/opencode.json",
        "it is the agent's",
        image=chowned("/etc/opencode/opencode.json"),
        ci=False,
    ),
    Tampering("exec-dir:/tmp", "mounted noexec", body=noexec_tmp),
    Tampering(
        "runs:/usr/local/bin/opencode",
        "a program that fails",
        image=f"rm {OPENCODE}; install -m 755 /bin/false {OPENCODE}",
    ),
    Tampering(f"rw-writable:{PROJECT}", "mounted read-only", body=mount(PROJECT, True)),
    Tampering(f"ro-unwritable:{NOTES}", "mounted writable", body=mount(NOTES, False)),
    Tampering(f"ro-unwritable:{CONFIG}", "mounted writable", body=mount(CONFIG, False), ci=False),
    *(
        Tampering(
            f"state-writable:{path}", "mounted read-only", body=mount(path, True), ci=path == "/home/agent"
        )
        for path in STATE
    ),
    Tampering(
        "limits",
        "another limit on open files",
        body=host(Ulimits=[{"Name": "nofile", "Soft": 1024, "Hard": 4096}]),
    ),
    Tampering("unlisted-host-blocked", "the probe's address is allowed", before=allowed(443, "PROBE")),
    Tampering("dns-closed", "a resolver's port 53 is allowed", before=allowed(53, "RESOLVER")),
    Tampering(
        "embedded-dns-closed",
        "without the dead resolver",
        body=without_dead_resolver,
        idle={
            "bookworm": "20.10 asks the host's name servers from the sandbox's own network, where the fence is"
        },
    ),
    Tampering("ipv6-disabled", "switched on for new interfaces", during=ipv6_default),
    Tampering(
        "no-ipv6-address",
        "an address on an interface",
        during=ipv6_address,
        fails=("no-ipv6-address", "ipv6-disabled"),
        why="the kernel gives no address to an interface where IPv6 is off",
    ),
    Tampering("pinned-name:allowed1.corral.example", "another address in the hosts file", before=other_pin),
    Tampering(
        "host-service:8081", "the kernel has no entry for it", before=lambda place: place.forbid_host(8081)
    ),
    Tampering("peer-unreachable:PEER", "the kernel allows a listener of the peer", during=peer_allowed),
    Tampering("expectations", "an argument of another version", body=top(Cmd=['{"colour": "red"}'])),
    Tampering("session-ready", "a name that has no address any more", whole="nameless"),
    Tampering("gate", "nothing listens behind a host service", whole="deaf"),
    Tampering("checker", "a checker in the image that says nothing", whole="mute"),
    Tampering("session-policy", "the policy is edited while a session runs", whole="edited"),
    Tampering(
        "live-rules", "an element that no policy has, put back again and again", whole="element", ci=False
    ),
    Tampering("only-loopback", "a link in a sandbox without a network", whole="link"),
    Tampering(
        "no-network",
        "such a sandbox is connected to a network, and the host service is stopped",
        whole="connected",
        fails=("no-network", "only-loopback"),
        why="the link of that network is seen from inside, too",
        ci=False,
    ),
    *(
        Tampering(
            check,
            f"another proxy in the image: {how}",
            whole=f"{NAMES}{kind}",
            fails=fails,
            why=why,
            ci=kind == "generous",
        )
        for check, kind, how, fails, why in (
            ("proxy-denies", "generous", "it says yes to everything", (), ""),
            ("proxy-checks-sni", "blind", "it looks into no ClientHello", (), ""),
            ("proxy-permits", "stingy", "it says no to everything", (), ""),
            (
                "proxy-answers",
                "mumbling",
                "it speaks another protocol",
                ("proxy-answers", "proxy-denies", "proxy-permits"),
                "what does not speak HTTP neither refuses nor permits",
            ),
        )
    ),
    Tampering(
        "proxy-is-the-only-way",
        "the kernel lets a session reach another port of this host",
        whole=f"{NAMES}beside",
        fails=("proxy-is-the-only-way", "live-rules"),
        why="such an element is seen from both sides",
        ci=False,
    ),
    Tampering(
        "proxy-elements", "the kernel lets the proxy reach what nobody asked for", whole=f"{NAMES}roaming"
    ),
    Tampering(
        "dns-answers-only-permitted",
        "the service answers for any name",
        whole=f"{NAMES}talkative",
    ),
    Tampering(
        "dns-answers-permitted",
        "the service tells another address than it opened",
        whole=f"{NAMES}misleading",
        ci=False,
    ),
    Tampering(
        "dns-outside-closed",
        "the kernel lets a session reach a resolver",
        whole=f"{NAMES}resolver",
        fails=("dns-outside-closed", "live-rules"),
        why="such an element is seen from both sides",
        ci=False,
    ),
    Tampering("skeleton-in-path", "a rule before Docker's chain", whole="first"),
    Tampering(
        "backstop",
        "somebody else's table in its place, with an nft that cannot hold it",
        whole="table",
        fails=("session-ready", "backstop"),
        why="nothing new is granted while it is gone",
    ),
)


def summary(reports: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Lines of a table out of test outcomes and properties: the check, how it was broken, whether it showed."""
    rows = [("check", "tampering", "failed as it should")]
    for outcome, properties in reports:
        if "tampering" in properties:
            check, how, expected, why = properties["tampering"]
            others = [name for name in expected if name != check]
            told = "yes" if outcome == "passed" else "NO"
            if others:
                told += f", with {', '.join(others)}: {why}"
            rows.append((check, how, told))
    if len(rows) == 1:
        return []
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return [f"{check:<{widths[0]}}  {how:<{widths[1]}}  {told}" for check, how, told in rows]
