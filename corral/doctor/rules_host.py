"""COR-060 to COR-098: network, names, and the rest of the host. Pure."""

from __future__ import annotations

import json

from corral import subnets
from corral.doctor import routes
from corral.doctor.model import CannotTell, Found, Severity
from corral.doctor.records import (
    Disks,
    Firewalls,
    Modules,
    Programs,
    Resolvers,
    Routing,
    Security,
    Settings,
    Sysctls,
)
from corral.doctor.rules_fence import IP6TABLES
from corral.doctor.table import check
from corral.hostcheck import Facts
from policy.errors import EngineError

BROKEN, ADVICE = Severity.BROKEN, Severity.ADVICE
STAGED = "Staged in a system test."
BY_FACTS = "Tested on recorded facts only."
OTHER_RANGE = (
    'name a free range in ~/.config/corral/enforcer.toml: subnet_range = "10.66.0.0/16"; corral down'
)
FULL, SCARCE = 16 << 20, 1 << 30
FEW_INODES = 100


@check(
    "COR-060",
    "this host does not forward",
    BROKEN,
    Sysctls,
    Facts,
    probe="net.ipv4.ip_forward.",
    cause="Docker switches forwarding on at its start; something switched it off since.",
    fix="sudo sysctl -w net.ipv4.ip_forward=1; look for the file in /etc/sysctl.d that sets 0",
    note=STAGED,
)
def forwarding(sysctls: Sysctls, facts: Facts) -> Found | None:
    """See the table."""
    if facts.trouble is not None:
        raise CannotTell("Docker does not answer")
    return Found("net.ipv4.ip_forward is 0") if sysctls.ip_forward == 0 else None


@check(
    "COR-061",
    "a route takes a sandbox's addresses away",
    BROKEN,
    Routing,
    probe="Routes at least as specific as a sandbox's network, of other interfaces.",
    cause="A VPN or another network came up after the sandbox's network was made. What comes from the "
    "sandbox "
    "fails the reverse-path check and is dropped.",
    fix=f"remove the route, or {OTHER_RANGE}",
    note=STAGED,
)
def shadowed(routing: Routing) -> Found | None:
    """See the table."""
    found = routes.overlapping(routing, shadowing=True)
    return Found("; ".join(found)) if found else None


@check(
    "COR-062",
    "a sandbox's network lies inside another one",
    ADVICE,
    Routing,
    probe="Routes wider than a sandbox's network that contain it, of other interfaces.",
    cause="A VPN or another network came up after the sandbox's network was made. Sandboxes work; the other "
    "network's hosts with addresses of the sandbox cannot be reached from this host.",
    fix=f"if they matter: {OTHER_RANGE}",
    note=STAGED,
)
def inside(routing: Routing) -> Found | None:
    """See the table."""
    found = routes.overlapping(routing, shadowing=False)
    return Found("; ".join(found)) if found else None


@check(
    "COR-063",
    "a routing rule comes before the sandboxes' routes",
    BROKEN,
    Routing,
    Settings,
    probe="What the kernel answers for an address of each sandbox; without one, ip rule and the tables it "
    "names.",
    cause="A rule before table main leads to a table that answers for everything (an exit node of a mesh "
    "VPN, "
    "some VPN clients). What comes from a sandbox fails the reverse-path check and is dropped.",
    fix="sudo ip rule add to RANGE lookup main priority 100, with the range of your sandboxes; or the VPN's "
    "setting that leaves local networks alone",
    note=STAGED,
)
def detour(routing: Routing, settings: Settings) -> Found | None:
    """See the table."""
    found = routes.detours(routing, settings.ranges)
    if not found:
        return None
    names = ", ".join(map(str, routing.bridges.values() or settings.ranges[:1]))
    lines = "; ".join(f"sudo ip rule add to {name} lookup main priority 100" for name in names.split(", "))
    return Found("; ".join(found), f"{lines}; or the VPN's setting that leaves local networks alone")


@check(
    "COR-064",
    "no subnet is free for a new sandbox",
    BROKEN,
    Routing,
    Settings,
    probe="Every range that subnets come from, against this host's routes and addresses.",
    cause="A VPN or another network covers all of them.",
    fix=OTHER_RANGE.partition("; corral")[0],
    note=BY_FACTS,
)
def no_subnet(routing: Routing, settings: Settings) -> Found | None:
    """See the table."""
    if settings.error is not None:
        raise CannotTell("enforcer.toml is not valid")
    taken = subnets.taken_by_routes(json.dumps([dict(row) for row in routing.routes]))
    try:
        subnets.choose(settings.ranges, taken)
    except EngineError as error:
        return Found(error.message)
    return None


@check(
    "COR-065",
    "this host has no default route",
    BROKEN,
    Routing,
    probe="What the kernel answers for an address that belongs to nobody.",
    cause="Without a network the gate cannot prove that an unlisted address is refused, and starts nothing.",
    fix="connect this host to its network",
    note=STAGED,
)
def no_default(routing: Routing) -> Found | None:
    """See the table."""
    return None if routing.outside else Found("there is no route to addresses elsewhere")


def _servers(resolvers: Resolvers) -> str:
    return "; ".join(f"{server}: {text}" for server, text in resolvers.answers.items() if text)


@check(
    "COR-066",
    "no name server answers",
    BROKEN,
    Resolvers,
    probe="Each name server that the enforcer asks (enforcer.toml, else /etc/resolv.conf) is asked for a "
    "random "
    "name below example.com; any answer but SERVFAIL will do.",
    cause="The network is down, the servers are those of a VPN that is not, or a local firewall is in "
    "between. "
    "A sandbox with names to resolve does not start; running ones keep the addresses they have.",
    fix="put /etc/resolv.conf right, or name servers in ~/.config/corral/enforcer.toml: [dns] servers",
    note=STAGED,
)
def no_name_server(resolvers: Resolvers) -> Found | None:
    """See the table."""
    return Found(_servers(resolvers)) if all(resolvers.answers.values()) else None


@check(
    "COR-067",
    "one of the name servers does not answer",
    ADVICE,
    Resolvers,
    probe="As COR-066.",
    cause="The others are asked instead, after two seconds of waiting each time.",
    fix="remove it from /etc/resolv.conf or from ~/.config/corral/enforcer.toml",
    note=STAGED,
)
def a_name_server(resolvers: Resolvers) -> Found | None:
    """See the table."""
    text = _servers(resolvers)
    return Found(text) if text and not all(resolvers.answers.values()) else None


@check(
    "COR-070",
    "the kernel lacks modules",
    BROKEN,
    Modules,
    probe="/proc/modules, /sys/module and /lib/modules for br_netfilter, ip_set, ip_set_hash_ipportip, "
    "xt_set and "
    "nf_conntrack_netlink.",
    cause="corral's rules are made of sets; without these modules they cannot be loaded, and nothing is "
    "granted.",
    fix="install the kernel's package of further modules (Ubuntu: linux-modules-extra), then: "
    "sudo systemctl restart corral-skeleton corral-netfilter",
    note=BY_FACTS,
)
def no_modules(modules: Modules) -> Found | None:
    """See the table."""
    absent = [name for name, state in modules.states.items() if state == "absent"]
    return Found(f"kernel {modules.release} has no {', '.join(absent)}") if absent else None


@check(
    "COR-071",
    "the running kernel's modules are gone",
    ADVICE,
    Modules,
    probe="/lib/modules.",
    cause="The kernel was upgraded and this host not restarted: a module that is needed now for the first "
    "time "
    "cannot be loaded.",
    fix="restart this host",
    note=BY_FACTS,
)
def upgraded(modules: Modules) -> Found | None:
    """See the table."""
    if not modules.gone or all(state in ("loaded", "built-in") for state in modules.states.values()):
        return None
    return Found(f"/lib/modules has no directory for kernel {modules.release}, which runs")


@check(
    "COR-072",
    "programs are missing",
    BROKEN,
    Programs,
    Sysctls,
    probe="ip, nft, iptables-nft, ip6tables-nft, systemctl and systemd-run.",
    cause="corral and its netfilter writer run them.",
    fix="sudo apt install iproute2 nftables iptables systemd",
    note=BY_FACTS,
)
def no_programs(programs: Programs, sysctls: Sysctls) -> Found | None:
    """See the table; ip6tables is a check of its own where it matters most."""
    missing = {
        name: package
        for name, package in programs.missing.items()
        if name != IP6TABLES or sysctls.ipv6_off != 0
    }
    if not missing:
        return None
    return Found(
        f"not installed: {', '.join(missing)}", f"sudo apt install {' '.join(sorted(set(missing.values())))}"
    )


@check(
    "COR-073",
    "the disk is full",
    BROKEN,
    Disks,
    probe="Room below ~/.local/share/corral and /var/lib/docker: less than 16 MiB, or 100 files.",
    cause="Neither a session's files nor a container can be made.",
    fix="make room; docker system df shows what images take",
    note=STAGED,
)
def full(disks: Disks) -> Found | None:
    """See the table."""
    found = [
        f"{disk.path}: {disk.free >> 20} MiB and {disk.inodes} files are left"
        for disk in disks.disks
        if disk.free < FULL or disk.inodes < FEW_INODES
    ]
    return Found("; ".join(found)) if found else None


@check(
    "COR-074",
    "the disk is nearly full",
    ADVICE,
    Disks,
    probe="Room below ~/.local/share/corral and /var/lib/docker: less than 1 GiB.",
    cause="Building an image needs more.",
    fix="make room; docker system df shows what images take",
    note=BY_FACTS,
)
def scarce(disks: Disks) -> Found | None:
    """See the table."""
    found = [
        f"{disk.path}: {disk.free >> 20} MiB are left" for disk in disks.disks if FULL <= disk.free < SCARCE
    ]
    return Found("; ".join(found)) if found else None


@check(
    "COR-080",
    "firewalld is active",
    ADVICE,
    Firewalls,
    probe="The unit firewalld.service.",
    cause="Its reload removes rules of others, Docker's too; corral's are mended within a second, and the "
    "backstop "
    "(a table of its own) drops what they would have decided meanwhile. Bridges of sandboxes are in no "
    "zone of it; "
    "a zone that rejects forwarding adds to corral's refusals.",
    fix="nothing; after a reload with COR-020: sudo systemctl restart docker",
    note="firewalld itself: untested.",
)
def firewalld(firewalls: Firewalls) -> Found | None:
    """See the table."""
    return Found("firewalld is active") if "firewalld" in firewalls.active else None


@check(
    "COR-081",
    "ufw is active",
    ADVICE,
    Firewalls,
    probe="/etc/ufw/ufw.conf.",
    cause="ufw's reload may put its chains before Docker's; corral's hooks are put back to the top. A "
    "default policy "
    "of deny for incoming packets closes host services of a sandbox only where ufw's chains come first.",
    fix="nothing; after a reload with COR-020: sudo systemctl restart docker",
    note="Its configuration file is staged in a system test; ufw itself: untested.",
)
def ufw(firewalls: Firewalls) -> Found | None:
    """See the table."""
    return Found("ufw is enabled") if "ufw" in firewalls.active else None


@check(
    "COR-082",
    "SELinux is enforcing",
    ADVICE,
    Security,
    probe="/sys/fs/selinux/enforce.",
    cause="corral mounts directories without relabelling them, so that a sandbox may be denied its own "
    "project.",
    fix="if it is: chcon -Rt container_file_t PROJECT, or Docker without selinux-enabled",
    note="Untested.",
)
def selinux(security: Security) -> Found | None:
    """See the table."""
    return Found("SELinux is enforcing") if security.selinux == "enforcing" else None


@check(
    "COR-083",
    "AppArmor is on",
    ADVICE,
    Security,
    probe="/sys/module/apparmor/parameters/enabled.",
    cause="Docker confines containers with its profile docker-default, which adds to corral's own limits.",
    fix="nothing; a harness that needs what the profile denies says permission denied",
    note="Untested.",
)
def apparmor(security: Security) -> Found | None:
    """See the table."""
    return Found("AppArmor is on") if security.apparmor else None


@check(
    "COR-084",
    "this host allows no user namespaces",
    ADVICE,
    Sysctls,
    probe="user.max_user_namespaces.",
    cause="corral itself needs none. Programs that sandbox their own children with them fail, on the host "
    "as in "
    "a sandbox.",
    fix="if they are wanted: sudo sysctl -w user.max_user_namespaces=15000",
    note="Untested.",
)
def user_namespaces(sysctls: Sysctls) -> Found | None:
    """See the table."""
    return Found("user.max_user_namespaces is 0") if sysctls.user_namespaces == 0 else None
