"""Two network namespaces, the wire between them, and the packet counters of the internet's end."""

from __future__ import annotations

import json
from pathlib import Path

from . import execute, layout
from .layout import Layout, netns_path

DNS_PORTS = (5301, 5302)
"""Two ports, so that the next DNS server is up before the former one goes; the wire only ever sees 53."""

_TABLE = "corral_lab"
_SIZE = 262144


def make_internet(lab: Layout) -> None:
    """The internet's namespace: every address of the servers' range is local, nothing is forwarded."""
    ip = execute.tool("ip")
    name = lab.inet_netns
    execute.run([ip, "netns", "add", name])
    execute.run([ip, "-n", name, "link", "set", "lo", "up"])
    for address in (layout.RESOLVER, layout.GATEWAY):
        execute.run([ip, "-n", name, "address", "add", f"{address}/32", "dev", "lo"])
    execute.run([ip, "-n", name, "route", "add", "local", layout.SERVERS, "dev", "lo"])
    if has_ipv6():
        execute.run([ip, "-n", name, "route", "add", "local", layout.SERVERS6, "dev", "lo"])
    in_netns(name, [execute.tool("nft"), "-f", "-"], input=ruleset(DNS_PORTS[0]))


def make_box(lab: Layout) -> None:
    """The box's namespace and its wire to the internet. Both ends are born inside the namespaces."""
    ip = execute.tool("ip")
    box, inet = lab.box_netns, lab.inet_netns
    execute.run([ip, "netns", "add", box])
    execute.run([ip, "-n", box, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", inet])
    ends = ((box, layout.BOX, layout.BOX6), (inet, layout.GATEWAY, layout.GATEWAY6))
    for namespace, v4, v6 in ends:
        add = [ip, "-n", namespace, "address", "add"]
        execute.run([*add, f"{v4}/{layout.LINK_PREFIX}", "dev", "eth0"])
        if has_ipv6():
            execute.run([*add, f"{v6}/{layout.LINK_PREFIX6}", "dev", "eth0", "nodad"])
        execute.run([ip, "-n", namespace, "link", "set", "eth0", "up"])
    execute.run([ip, "-n", box, "link", "set", "lo", "up"])
    execute.run([ip, "-n", box, "route", "add", "default", "via", layout.GATEWAY])
    if has_ipv6():
        execute.run([ip, "-n", box, "route", "add", "default", "via", layout.GATEWAY6])
    in_netns(box, ["/bin/sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward"])


def cut_box(lab: Layout) -> None:
    """Remove the box's namespace. The wire goes first: the kernel takes its time with a namespace."""
    ip = execute.tool("ip")
    execute.run([ip, "-n", lab.inet_netns, "link", "delete", "eth0"], check=False)
    remove_netns(lab.box_netns)


def remove_netns(name: str) -> None:
    if netns_path(name).exists():
        execute.run([execute.tool("ip"), "netns", "delete", name])


def has_ipv6() -> bool:
    """Whether this kernel has IPv6 at all."""
    return Path("/proc/net/if_inet6").exists()


def netns_exists(name: str) -> bool:
    return netns_path(name).exists()


def in_netns(name: str, argv: list[str], input: str | None = None) -> str:  # noqa: A002
    """Output of a program run in a namespace. (`ip netns exec` would remount /sys and hide the cgroups.)"""
    command = [execute.tool("nsenter"), f"--net={netns_path(name)}", *argv]
    return execute.run(command, input=input).stdout


def ruleset(dns_port: int) -> str:
    """Count whatever arrives, by protocol, address and port, before anything can drop it; then steer DNS."""
    resolver, ports = layout.RESOLVER, ", ".join(map(str, DNS_PORTS))
    steer = "\n".join(
        f'    iifname "eth0" ip daddr {resolver} {proto} dport 53 {proto} dport set {dns_port}'
        for proto in ("udp", "tcp")
    )
    unsteer = "\n".join(
        f'    oifname "eth0" ip saddr {resolver} {proto} sport {{ {ports} }} {proto} sport set 53'
        for proto in ("udp", "tcp")
    )
    return f"""
table inet {_TABLE} {{
  set packets4 {{ type inet_proto . ipv4_addr; size {_SIZE}; flags dynamic; counter; }}
  set packets6 {{ type inet_proto . ipv6_addr; size {_SIZE}; flags dynamic; counter; }}
  set ports4 {{ type inet_proto . ipv4_addr . inet_service; size {_SIZE}; flags dynamic; counter; }}
  set icmp4 {{ type icmp_type . ipv4_addr . icmp_code; size {_SIZE}; flags dynamic; counter; }}
  chain arrive {{
    type filter hook prerouting priority -310;
    iifname "eth0" meta nfproto ipv4 update @packets4 {{ meta l4proto . ip daddr }}
    iifname "eth0" meta nfproto ipv6 update @packets6 {{ meta l4proto . ip6 daddr }}
    iifname "eth0" ip protocol {{ tcp, udp }} update @ports4 {{ meta l4proto . ip daddr . th dport }}
    iifname "eth0" update @icmp4 {{ icmp type . ip daddr . icmp code }}
    jump steer
  }}
  chain steer {{
{steer}
  }}
  chain leave {{
    type filter hook output priority -310;
{unsteer}
  }}
}}
"""


def steer_dns(lab: Layout, dns_port: int) -> None:
    """Send port 53 to the DNS server on `dns_port`, in one transaction."""
    rules = [f"flush chain inet {_TABLE} steer"]
    for proto in ("udp", "tcp"):
        match = f'iifname "eth0" ip daddr {layout.RESOLVER} {proto} dport 53'
        rules.append(f"add rule inet {_TABLE} steer {match} {proto} dport set {dns_port}")
    in_netns(lab.inet_netns, [execute.tool("nft"), "-f", "-"], input="\n".join(rules) + "\n")


def reset_counters(lab: Layout) -> None:
    flush = "".join(
        f"flush set inet {_TABLE} {name}\n" for name in ("packets4", "packets6", "ports4", "icmp4")
    )
    in_netns(lab.inet_netns, [execute.tool("nft"), "-f", "-"], input=flush)


def read_counters(lab: Layout, set_name: str) -> dict[tuple[str, ...], int]:
    """(protocol, address[, port]), or (ICMP type, address, code) -> packets that arrived."""
    text = in_netns(lab.inet_netns, [execute.tool("nft"), "-j", "list", "set", "inet", _TABLE, set_name])
    return parse_counters(text)


def parse_counters(text: str) -> dict[tuple[str, ...], int]:
    """Elements with counters of `nft -j list set`; protocol numbers nft has no name for stay numbers."""
    found: dict[tuple[str, ...], int] = {}
    for item in json.loads(text)["nftables"]:
        for element in item.get("set", {}).get("elem", []):
            key = tuple(str(part) for part in element["elem"]["val"]["concat"])
            found[key] = element["elem"]["counter"]["packets"]
    return found


def count(counters: dict[tuple[str, ...], int], address: str, proto: str | None, port: int | None) -> int:
    """Packets to `address`, of one protocol or all, to one port or all."""
    return sum(
        packets
        for key, packets in counters.items()
        if key[1] == address and proto in (None, key[0]) and (port is None or key[2:] == (str(port),))
    )
