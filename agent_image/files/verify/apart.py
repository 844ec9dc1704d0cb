"""Checks of a container without a network of its own, or with a kernel of its own."""

from __future__ import annotations

from .outcome import Failed, Skipped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .expectations import Expectations
    from .system import Check, System

LOOPBACK = "lo"
INTERFACES = "/proc/self/net/dev"
ROUTES = "/proc/self/net/route"
UP = 1
# What some kernel modules put into every new network namespace. Down, nothing passes them.
FALLBACKS = frozenset(
    {"erspan0", "gre0", "gretap0", "ip6_vti0", "ip6gre0", "ip6tnl0", "ip_vti0", "sit0", "tunl0"}
)
# What is asked of a container alone, whatever is outside of it, and therefore without a network, too.
ALWAYS = frozenset({"only-loopback", "embedded-dns-closed", "ipv6-disabled", "no-ipv6-address"})
# What asks the kernel for something that another one than the host's may answer as it likes.
HOST_KERNEL = frozenset({"seccomp", "iptables-refused", "limits", "mounts-equal-policy"})
REASONS = {
    "none": "egress.mode is none: there is no network to try it on, see only-loopback",
    "host": "egress.mode is host, NOT ENFORCED: the container is on this host's own network",
}


def checked(connection: str, name: str, check: Check) -> tuple[str, Check]:
    """Return a check of the network, or one that says why it cannot be made on such a connection."""

    def skipped(_: Expectations, __: System) -> str:
        raise Skipped(REASONS[connection])

    made = connection == "own" or (connection == "none" and name in ALWAYS)
    return name, check if made else skipped


def of_this_kernel(runtime: str, name: str, check: Check) -> Check:
    """Return a check, or one that says why a kernel of the container's own could not answer it."""

    def skipped(_: Expectations, __: System) -> str:
        raise Skipped(f"runtime {runtime}: its own kernel answers here, which proves nothing of this host's")

    return skipped if runtime != "runc" and name in HOST_KERNEL else check


def only_loopback(expected: Expectations, system: System) -> str:
    """There is the loopback interface and no other that is up, no route, and no way to an address outside."""
    lines = system.read(INTERFACES).splitlines()[2:]
    names = [line.rpartition(":")[0].strip() for line in lines if ":" in line]
    if LOOPBACK not in names:
        raise Failed("there is no lo, so nothing is proven")
    for name in names:
        if name == LOOPBACK:
            continue
        up = int(system.read(f"/sys/class/net/{name}/flags"), 16) & UP
        if up or name not in FALLBACKS:
            raise Failed(f"there is {name}, which is {'up' if up else 'down'}")
    if [line for line in system.read(ROUTES).splitlines()[1:] if line.strip()]:
        raise Failed("there are routes")
    address, port = expected.probe
    for way, reply in (("TCP", system.tcp(address, port)), ("UDP", system.udp(address, port, b"corral"))):
        if reply.kind != "no-route":
            raise Failed(f"{way} to {address}:{port} does not fail for want of a route: {reply}")
    return f"{', '.join(names)}; {address} has no route"
