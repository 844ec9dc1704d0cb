"""What each check of ``corral verify`` proves, how, and what to do when it fails. Data, and how it is shown.

``corral verify --explain`` prints it, ``docs/verify.md`` holds its table, and the tests compare it with the
checks that the code can make.
"""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass
from typing import Literal

from policy.errors import CorralError


class UnknownCheck(CorralError):
    """There is no check of that name; an argument that cannot be used."""

    exit_code = 2


@dataclass(frozen=True)
class CheckDoc:
    """One check, or one family of them.

    Args:
        name: as printed; what differs within a family is in capitals after the colon.
        proves: what is true when it passes.
        measured: how that is found out.
        means: what it means when it fails.
        fix: what to do then.
        side: where it is seen from.
        beyond: what is not proven by it, where that is easily taken for granted.
    """

    name: str
    proves: str
    measured: str
    means: str
    fix: str
    side: Literal["inside", "host"] = "inside"
    beyond: str = ""

    @property
    def family(self) -> str:
        """The name without what differs."""
        return self.name.partition(":")[0]


_REBUILD = "corral build --force; if it fails again, look at build.base and build.packages of corral.yaml"
_RESTART = "end the session and start it again: corral run"
_RULES = "systemctl --user restart corral-enforcer; sudo systemctl restart corral-netfilter; corral status"
_STRAY = "it was not made by corral as it is now: corral down, corral install, corral run"

DOCS: tuple[CheckDoc, ...] = (
    CheckDoc(
        "session-ready",
        "the host service made the policy of a fresh container true in the kernel before it was started",
        "the service is asked, and answers once it has read back what the kernel holds",
        "the service refuses or cannot: a name without a usable address, a container that is not of corral's "
        "shape, or rules that somebody changes again and again; nothing was started",
        "the detail names the reason; corral status shows the service's side",
        "host",
    ),
    CheckDoc(
        "gate",
        "the entrypoint itself found the fence closed before it handed over to the program",
        "by the gate of every start, see `corral run`; its words are the detail",
        "the entrypoint refused, as it would refuse the agent; nothing else was checked inside",
        "the detail names what was open or could not be reached",
    ),
    CheckDoc(
        "expectations",
        "the checker in the image understands what it is asked to prove",
        "it refuses what it does not know; listed only when that happens",
        "the image's checker is of another version than corral",
        "corral build --force",
    ),
    CheckDoc(
        "checker",
        "the checker ran to its end, and said nothing but results",
        "its exit code and output are compared; listed only when they are odd",
        "it was killed or stopped, did not start, or is not corral's; in a running session the agent can do "
        "the first two, and nothing that is said there proves anything then",
        "corral build --force; in a session: end it and look at what ran in it",
    ),
    CheckDoc(
        "non-root",
        "none of the agent's ids and groups is root's",
        "real, effective, saved and file-system ids and the groups in /proc/self/status",
        "the container was started as root or with a group of root's",
        _STRAY,
    ),
    CheckDoc(
        "uid-matches-host",
        "the agent has your uid and gid, so what it writes is yours",
        "all four uids and gids in /proc/self/status, as /proc/self/uid_map and gid_map lead to the host's",
        "files in the project would belong to somebody else",
        _STRAY,
    ),
    CheckDoc(
        "no-sudo",
        "no program of the image changes ids or brings capabilities when executed",
        "sudo, doas and pkexec are looked for, and set-id bits and capabilities of every file of the root "
        "file system",
        "the image has a way to become root, which no-new-privileges alone would have to stop",
        _REBUILD,
    ),
    CheckDoc(
        "no-capabilities",
        "all five capability sets are empty, and no execution can fill them",
        "/proc/self/status: CapInh, CapPrm, CapEff, CapBnd, CapAmb, NoNewPrivs",
        "the container was given a capability, or may gain one",
        _STRAY,
    ),
    CheckDoc(
        "seccomp",
        "the engine's filter of system calls is on, and no user namespace can be made",
        "Seccomp in /proc/self/status, and unshare(2) is called",
        "the engine runs without its default profile: namespaces, vsock and more are open to the agent",
        "look at seccomp-profile in /etc/docker/daemon.json and at docker info; then corral run again",
    ),
    CheckDoc(
        "iptables-refused",
        "the packet filter can neither be read nor passed by raw sockets",
        "netlink, raw IP and packet sockets must give EPERM; a firewall program that is there must fail",
        "the agent holds a network capability, or a tool that lends it one",
        _STRAY,
    ),
    CheckDoc(
        "no-docker-socket:PATH",
        "nothing has the name of Docker's socket",
        "the name is looked up, dangling links included",
        "who may talk to that socket is root on the host",
        "take it out of mounts, or out of the base image",
    ),
    CheckDoc(
        "no-credential-dir:NAME",
        "no directory or file of credentials of that name is in the agent's home or in yours",
        "both names are looked up",
        "keys and tokens are in reach of the agent, or an agent of this session made such a directory itself",
        "take it out of mounts; a session's home goes with the session",
    ),
    CheckDoc(
        "host-home-only-mounts",
        "of your home directory nothing is visible but the mounts and the directories that lead to them",
        "the directories are walked, and the mount table is read",
        "something else of your home is mounted, or the image has files at the same path",
        "corral down, corral run; if it stays, look at build.base",
    ),
    CheckDoc(
        "mounts-equal-policy",
        "the mounts are the policy's, corral's own and Docker's, and no others; none is a socket",
        "every line of /proc/self/mountinfo is accounted for",
        "something is mounted that the policy does not name, or something it names is not",
        "the detail names it; end the session and start it again",
    ),
    CheckDoc(
        "env-file-not-mounted",
        "the file of secrets is not in the container",
        "its path is looked up; skipped when the policy has none",
        "a mount or the image holds the file at its place",
        "move the file out of what is mounted: secrets.env_file",
    ),
    CheckDoc(
        "read-only-root",
        "nothing of the image can be changed while it runs",
        "a file is created in /, /usr, /etc, /opt and /var, and the flags of their mount are read",
        "the container was started with a writable root",
        _STRAY,
    ),
    CheckDoc(
        "root-owned:PATH",
        "a file that guards the start is root's, and the agent cannot change, replace or cover it; "
        "/etc/hosts, which your own service publishes, is mounted read-only instead, and so is all of the "
        "image where a rootless engine calls you 0",
        "owner and mode; then writing, appending, truncating, renaming, removing, chmod, chown, utime, link, "
        "replacing, moving its directories, mount(2), and mount(2) in new namespaces are tried; what "
        "succeeds is undone and named",
        "the agent could change what its next start runs, or what names mean",
        _REBUILD,
    ),
    CheckDoc(
        "exec-dir:PATH",
        "a program in that directory can be executed, which the harness needs",
        "a page of a new file is mapped executable",
        "the harness cannot unpack its libraries there",
        _STRAY,
    ),
    CheckDoc(
        "runs:PATH",
        "the harness starts",
        "it is run with --version",
        "the image's harness is broken, or does not fit this machine's processor",
        _REBUILD,
    ),
    CheckDoc(
        "rw-writable:PATH",
        "the agent can write to a mount of mounts.rw, and what it writes is yours",
        "a file is written, its owner read, and it is removed",
        "the mount is read-only, full, or owned by somebody else",
        "look at the directory on the host: its owner, its mode, its disk",
    ),
    CheckDoc(
        "ro-unwritable:PATH",
        "the kernel refuses every change at and below a mount of mounts.ro, and of corral's read-only ones",
        "a write is tried; the flags of the mount and of those below it are read",
        "the agent can change what it was only to read",
        _RESTART,
    ),
    CheckDoc(
        "state-writable:PATH",
        "the agent's home and the directories that outlive a session belong to it",
        "owner, and a file is written and removed",
        "the harness could not keep its sessions",
        "look at the sandbox's directory below ~/.local/share/corral: owner and disk",
    ),
    CheckDoc(
        "limits",
        "the limits on processes, memory, processors and open files are the ones asked for",
        "pids.max, memory.max and cpu.max of the container's own control group, and its limit on open files",
        "a runaway agent is not held; the fence does not depend on it",
        "enable the controller that the detail names, or set limits.best_effort: true to do without",
    ),
    CheckDoc(
        "only-loopback",
        "with egress.mode: none there is no interface but lo, no route, and no way to an address outside",
        "/proc/self/net/dev and route are read; TCP and UDP to the probe must fail for want of a route",
        "the container has a network, by the engine or by whoever connected one",
        _STRAY,
    ),
    CheckDoc(
        "unlisted-host-blocked",
        "an address that no policy can allow is refused by the fence",
        "TCP must be answered by a reset at once, which a router or a dead host does not do; UDP by nothing",
        "packets leave the fence, or something else than the fence stops them, which proves nothing",
        _RULES,
    ),
    CheckDoc(
        "dns-closed",
        "nobody answers DNS: the gateway, the host's resolvers, an outside address, the container's own",
        "A and TXT over UDP and TCP to port 53 of each; TCP to the outside address must be reset",
        "names, and with them data, can leave through a resolver",
        _RULES,
    ),
    CheckDoc(
        "embedded-dns-closed",
        "Docker's resolver in the container, which would ask from the host, has nobody to ask",
        "A and TXT over UDP and TCP to 127.0.0.11",
        "the container was created without the dead resolver, so Docker asks the host's",
        _STRAY,
    ),
    CheckDoc(
        "proxy-answers",
        "the name proxy leads to this host's end of the sandbox's network, and an HTTP server is behind it",
        "/etc/hosts is read, and a request that no proxy serves is answered",
        "the proxy's container or the relay to it is gone, or the kernel has no entry for it; programs that "
        "go through the proxy reach nothing",
        "end the sandbox's sessions and start them again; corral status shows the proxy",
        beyond="that it is corral's proxy: what it may reach is the kernel's to say, see proxy-elements",
    ),
    CheckDoc(
        "proxy-denies",
        "the proxy refuses what nobody allowed: a name of no entry with 403, addresses and malformed names "
        "with 400, another method than CONNECT with 405",
        "seven requests, each refused for its own reason, in one line of the proxy's own",
        "the proxy is not corral's, or does not ask the service; the kernel still holds what it may reach",
        "corral build --force, then end the sandbox's sessions and start them again",
        beyond="that every other name is refused: one that exists is tried",
    ),
    CheckDoc(
        "proxy-permits",
        "a name of the policy is connected through the proxy, so that its refusals mean something",
        "CONNECT to the first entry that is one name and speaks TLS; skipped when the far end does not "
        "answer, or when the policy has no such entry",
        "the service does not open what the policy allows, or a session that still runs allows less",
        "corral denied says who refused; end sessions of an older policy",
        beyond="anything of zones and regular expressions: no name of theirs is known here",
    ),
    CheckDoc(
        "proxy-checks-sni",
        "a TLS connection through the proxy that asks for another server than was allowed is closed",
        "a ClientHello with another name is sent to the name of proxy-permits; it must end without an answer",
        "the proxy does not look: another site at the same address could be reached",
        "corral build --force, then end the sandbox's sessions and start them again",
        beyond="what is asked for inside of TLS: a server that serves other sites to whoever names them "
        "(fronting), and an outer name that hides another (ECH)",
    ),
    CheckDoc(
        "proxy-is-the-only-way",
        "a session reaches the proxy and nothing beside it: no other port of this host, not the proxy's "
        "container, and no address that is open for the proxy alone",
        "TCP to a few ports of this host and of the proxy, and to up to eight addresses that the kernel lets "
        "the proxy reach at that moment; the fence has to refuse",
        "the kernel lets the session itself go where only the proxy should",
        _RULES,
        beyond="ports that are not tried; the whole is compared by live-rules",
    ),
    CheckDoc(
        "dns-answers-only-permitted",
        "with egress.dns: answer a name that exists and that no entry means does not exist inside",
        "A, AAAA and TXT over UDP and TCP, at Docker's resolver and at the gateway: NXDOMAIN, no record",
        "names, and with them data, can leave through the resolver",
        _RULES,
        beyond="that nobody outside hears of names below an allowed zone: its name servers do",
    ),
    CheckDoc(
        "dns-answers-permitted",
        "with egress.dns: answer a name of the policy has an address, which is open when it is told",
        "the first entry that is one name is asked for and connected; skipped when there is none",
        "the service cannot open what it answers, or the far end is down",
        _RULES,
        beyond="anything of zones and regular expressions: no name of theirs is known here",
    ),
    CheckDoc(
        "dns-outside-closed",
        "where the gateway answers names (egress.mode: open, egress.dns: answer), nobody else does",
        "port 53 of the host's resolvers and of an outside address, TCP and UDP; the fence has to refuse",
        "names, and with them data, can leave through a resolver that no policy is asked by",
        _RULES,
    ),
    CheckDoc(
        "closed-address:ADDRESS",
        "with egress.mode: open an address that is not public stays closed",
        "TCP must be refused at once, UDP be answered by nothing",
        "metadata services or private networks are in reach of the agent",
        _RULES,
    ),
    CheckDoc(
        "host-closed",
        "with egress.mode: open this host takes no connection but for its services",
        "two of its ports, TCP and UDP; the fence has to refuse",
        "what listens on this host is in reach of the agent",
        _RULES,
    ),
    CheckDoc(
        "public-name",
        "with egress.mode: open a public name has an address, and is reachable there",
        "it is asked for over UDP and TCP, and connected; skipped when this host knows no such name",
        "the service does not answer names, or this host has no way out",
        _RULES,
    ),
    CheckDoc(
        "ipv6-disabled",
        "IPv6 is off on every interface there is or will be",
        "/proc/sys/net/ipv6/conf/*/disable_ipv6",
        "somebody with root on the host switched it on; the fence refuses IPv6 all the same",
        _RESTART,
    ),
    CheckDoc(
        "no-ipv6-address",
        "no interface has an IPv6 address",
        "/proc/net/if_inet6",
        "somebody with root on the host gave it one; the fence refuses IPv6 all the same",
        _RESTART,
    ),
    CheckDoc(
        "pinned-name:NAME",
        "the container finds a name at exactly the addresses that are allowed for it (running sessions)",
        "/etc/hosts in the container is compared with what the service published",
        "the hosts file was changed by somebody else, or the service could not write it",
        _RESTART,
    ),
    CheckDoc(
        "host-service:PORT",
        "a declared service of the host is reachable as corral-host, with something behind the relay",
        "a connection that is not closed again at once",
        "nothing listens on 127.0.0.1 of the host, the relay is down, or the kernel has no entry for it",
        "start the service; systemctl --user list-units 'corral-*'",
    ),
    CheckDoc(
        "peer-unreachable:CONTAINER",
        "no other running sandbox container of yours takes a connection from this one",
        "TCP to its ports 8080, 8081, 8443, 8765 and 443 must be refused or dropped; a sample: what enforces "
        "it is `live-rules` and `skeleton-in-path`",
        "the kernel allows an address of another sandbox, or lets a bridge's members talk to each other",
        _RULES,
    ),
    CheckDoc(
        "session-policy",
        "a running session has the mounts, limits and egress that corral.yaml says now",
        "the container's labels and configuration are compared with what `corral run` would create",
        "corral.yaml was changed after the session had started; it still has what it was started with",
        "end the session and start it again",
        "host",
    ),
    CheckDoc(
        "live-rules",
        "policy, hosts file and kernel agree, element by element",
        "the service reads the kernel's sets; each difference is named",
        "somebody changes the sets, or the service cannot write them",
        _RULES,
        "host",
    ),
    CheckDoc(
        "proxy-elements",
        "what the kernel lets the sandbox's proxy reach are addresses of names that the policy means",
        "the kernel's elements of the proxy's address are compared with the service's account of them, and "
        "each name there with the policy",
        "somebody changed the sets, or the service opened what it must not",
        _RULES,
        "host",
        beyond="that the addresses are those of the names: that is the word of the host's resolver",
    ),
    CheckDoc(
        "no-network",
        "with egress.mode: none the engine gave the container no network",
        "the network mode and the networks of its inspect; skipped with egress.mode: host",
        "it was connected to a network from outside",
        _STRAY,
        "host",
    ),
    CheckDoc(
        "foreign-image",
        "nothing: it says that the image is an existing one, in which checks inside are that image's word",
        "listed, as skipped, when the policy names an image",
        "it cannot fail",
        "to have everything checked by programs of corral's own: build.base_image instead of image",
        "host",
    ),
    CheckDoc(
        "skeleton-in-path",
        "packets of sandboxes meet corral's chains before any other rule",
        "the writer reads the kernel's rules and compares each with its own",
        "another program put its rules first, or removed corral's; `backstop` drops what they let through",
        "sudo iptables -S FORWARD, DOCKER-USER and INPUT: see who puts rules before corral's",
        "host",
    ),
    CheckDoc(
        "backstop",
        "corral's own table stands: it drops whatever of a sandbox no chain of corral's has marked",
        "the writer reads `nft list table inet corral` and compares each rule with its own",
        "somebody removed or changed the table; nothing new is granted until it is back",
        "sudo nft list ruleset; sudo systemctl restart corral-netfilter",
        "host",
    ),
)


def find(name: str) -> CheckDoc:
    """Return what is known of a check, by its name as printed.

    Raises:
        UnknownCheck: exit code 2, with names that are close.
    """
    wanted = name.partition("@")[0].partition(":")[0]
    for doc in DOCS:
        if doc.family == wanted:
            return doc
    families = [doc.family for doc in DOCS]
    close = difflib.get_close_matches(wanted.lower(), families, n=3, cutoff=0.5)
    close += [family for family in families if wanted and wanted in family and family not in close]
    raise UnknownCheck(
        f"there is no check {name!r}",
        f"did you mean: {', '.join(close)}" if close else f"the checks are: {', '.join(families)}",
    )


def explain(doc: CheckDoc) -> str:
    """Return the explanation for people, without a final newline."""
    seen = "from the host" if doc.side == "host" else "inside the container"
    rows = [
        ("proves", doc.proves),
        ("measured", f"{seen}: {doc.measured}"),
        ("when it fails", doc.means),
        ("fix", doc.fix),
    ]
    if doc.beyond:
        rows.insert(1, ("does not", doc.beyond))
    return "\n".join([doc.name, *(f"  {head + ':':<15}{text}" for head, text in rows)])


def body(doc: CheckDoc) -> dict[str, str]:
    """Return the explanation for programs."""
    return asdict(doc)


def table() -> str:
    """Return the table of ``docs/verify.md``."""
    rows = [f"| `{doc.name}` | {doc.proves} | {doc.measured} | {doc.side} |" for doc in DOCS]
    return "\n".join(["| check | what it proves | how | seen from |", "|---|---|---|---|", *rows])
