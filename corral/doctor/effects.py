"""Looking at the host: one function a record, each bounded in time, none of which changes anything."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv4Network
from pathlib import Path
from typing import Any

from corral import __version__, hostfacts, process, relay, rootless
from corral.doctor import records
from corral.doctor.model import CannotTell
from corral.hostcheck import Facts
from corral.membership import membership
from corral.units import PREFIX
from corral.user import user_units
from policy import versions
from policy.errors import CorralError, EnforcerError, PolicyError
from policy.identity import data_home

SHORT = 10.0
ENFORCER_UNIT = "corral-enforcer.service"
WRITER_UNIT = "corral-netfilter.service"
SYSTEM_UNITS = ("corral-skeleton.service", "corral-netfilter.socket", WRITER_UNIT)
WRITER_SOCKET = Path("/run/corral/netfilter.sock")
DOCKER_DATA = Path("/var/lib/docker")
MODULES = ("br_netfilter", "ip_set", "ip_set_hash_ipportip", "xt_set", "nf_conntrack_netlink")
PROGRAMS = {
    "ip": "iproute2",
    "nft": "nftables",
    "iptables-nft": "iptables",
    "ip6tables-nft": "iptables",
    "systemctl": "systemd",
    "systemd-run": "systemd",
}
# An address that belongs to nobody.
OUTSIDE = "192.0.2.1"
# RFC 2606 keeps it for nobody.
RESERVED_DOMAIN = "example.com"
AS_ROOT = "root has no sandboxes: run corral doctor as the user who runs agents"
_NAME_SERVER = re.compile(r"\[([^\]]+)\](?::(\d+))?|(\d+\.\d+\.\d+\.\d+)(?::(\d+))?")
_PATHS = re.compile(r"(?<![\w.\-])/[^\s;]+")


@dataclass(frozen=True)
class Host:
    """Where the probes look. ``environ`` is the user's."""

    environ: Mapping[str, str]
    home: Path
    uid: int
    root: Path = Path("/")

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> Host:
        """Return this host, as the user of this process."""
        uid = os.geteuid()
        return cls(relay.environment(environ, uid), Path(hostfacts.home(environ)), uid)

    def at(self, path: str | Path) -> Path:
        """Return an absolute path below ``root``."""
        return self.root / str(path).lstrip("/")

    def text(self, path: str) -> str:
        """Return a file's content; empty when there is no such file."""
        try:
            return self.at(path).read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def number(self, path: str) -> int | None:
        """Return the number in a file, None when there is none."""
        text = self.text(path).strip()
        return int(text) if text else None

    def run(self, *argv: str, check: bool = True) -> process.Completed:
        """Run a program of the host."""
        return process.run(argv, environ=self.environ, timeout=SHORT, check=check)

    def as_user(self) -> None:
        """Refuse what has no meaning for root.

        Raises:
            CannotTell: root.
        """
        if self.uid == 0:
            raise CannotTell(AS_ROOT)


def who(host: Host) -> records.Who:
    """Look the user up."""
    return records.Who(membership(host.uid))


def engine(host: Host) -> Facts:
    """Ask the engine."""
    return hostfacts.collect(host.environ, timeout=int(SHORT))


def manager(host: Host) -> records.Manager:
    """Ask the user's service manager for what it passes on to services."""
    host.as_user()
    done = host.run("systemctl", "--user", "show-environment", check=False)
    if done.code != 0:
        return records.Manager(error=done.stderr.strip() or f"exit code {done.code}")
    fields = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    return records.Manager(docker_host=fields.get("DOCKER_HOST", ""))


def enforcer_unit(host: Host) -> records.EnforcerUnit:
    """Ask the user's service manager for the enforcer."""
    host.as_user()
    return records.EnforcerUnit(_unit(host, ENFORCER_UNIT, "--user"))


def sandbox_units(host: Host) -> records.SandboxUnits:
    """Ask the user's service manager for the units that corral enable wrote."""
    host.as_user()
    found = sorted(host.at(user_units(host.home, host.environ)).glob(f"{PREFIX}*.service"))
    return records.SandboxUnits({file.name: _unit(host, file.name, "--user") for file in found})


def system_units(host: Host) -> records.SystemUnits:
    """Ask systemd for the units of the netfilter writer."""
    if rootless.chosen(host.environ):
        return records.SystemUnits({WRITER_UNIT: _unit(host, WRITER_UNIT, "--user")}, rootless=True)
    return records.SystemUnits({name: _unit(host, name) for name in SYSTEM_UNITS})


def _unit(host: Host, name: str, *options: str) -> records.Unit:
    shown = "LoadState,ActiveState,SubState,UnitFileState,ExecStart"
    done = host.run("systemctl", *options, "show", "-p", shown, name, check=False)
    if done.code != 0:
        raise CannotTell(f"systemd does not answer: {done.stderr.strip().partition(chr(10))[0]}")
    fields = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    return records.Unit(
        load=fields.get("LoadState", ""),
        active=fields.get("ActiveState", ""),
        sub=fields.get("SubState", ""),
        enabled=fields.get("UnitFileState", ""),
        missing=tuple(
            path for path in command_paths(fields.get("ExecStart", "")) if not host.at(path).exists()
        ),
    )


def command_paths(shown: str) -> list[str]:
    """Return the absolute paths in a command line as ``systemctl show`` prints it, each once."""
    command = shown.partition("argv[]=")[2].partition(" ; ")[0]
    return list(dict.fromkeys(_PATHS.findall(command)))


def _client(host: Host) -> Any:
    from enforcer.client import Client, socket_path

    host.as_user()
    return Client(socket_path(host.environ), timeout=SHORT)


def enforcer(host: Host) -> records.Enforcer:
    """Ask the enforcer for the versions."""
    try:
        return records.Enforcer(answer=_client(host).version())
    except EnforcerError as error:
        return records.Enforcer(error=error)


def skeleton(host: Host) -> records.Skeleton:
    """Ask the writer, through the enforcer, how the rules in the kernel stand."""
    try:
        found = _client(host).live("")["skeleton"]
    except EnforcerError as error:
        raise CannotTell(f"the rules can be read by the writer only: {error.message}") from error
    problems = tuple(str(text) for text in found["problems"])
    return records.Skeleton(problems, str(found.get("driver", "")))


def writer_socket(host: Host) -> records.WriterSocket:
    """Look at the writer's socket."""
    place = WRITER_SOCKET
    if rootless.chosen(host.environ):
        place = rootless.runtime(host.environ) / "corral" / "netfilter.sock"
    path = host.at(place)
    return records.WriterSocket(str(place), path.exists(), os.access(path, os.W_OK))


def sysctls(host: Host) -> records.Sysctls:
    """Read kernel settings."""
    net, inside = "/proc/sys/net", _inside(host)

    def setting(path: str) -> int | None:
        # Each network namespace has its own.
        if not inside:
            return host.number(path)
        told = host.run(*inside, "cat", path, check=False)
        return int(told.stdout) if told.code == 0 else None

    return records.Sysctls(
        setting(f"{net}/ipv4/ip_forward"),
        setting(f"{net}/bridge/bridge-nf-call-iptables"),
        setting(f"{net}/bridge/bridge-nf-call-ip6tables"),
        setting(f"{net}/ipv6/conf/all/disable_ipv6"),
        host.number("/proc/sys/user/max_user_namespaces"),
    )


def _inside(host: Host) -> tuple[str, ...]:
    """Return the beginning of a command that looks where the bridges are.

    Raises:
        CannotTell: the user's own engine does not run.
    """
    try:
        return rootless.entering(host.environ)
    except EnforcerError as error:
        raise CannotTell(error.message) from error


def tables(host: Host) -> records.Tables:
    """Ask iptables which one it is."""
    try:
        told = host.run("iptables", "--version", check=False).stdout
    except process.ProgramError:
        return records.Tables("")
    return records.Tables("legacy" if "(legacy)" in told else "nf_tables" if "(nf_tables)" in told else "")


def programs(host: Host) -> records.Programs:
    """Look for the programs corral runs."""
    missing = {}
    for program, package in PROGRAMS.items():
        try:
            process.find(program, host.environ)
        except process.ProgramError:
            missing[program] = package
    return records.Programs(missing)


def linger(host: Host) -> records.Linger:
    """Look whether the user lingers."""
    host.as_user()
    return records.Linger(host.at(f"/var/lib/systemd/linger/{membership(host.uid).user}").exists())


def firewalls(host: Host) -> records.Firewalls:
    """Ask for firewalld and ufw."""
    active = []
    if host.run("systemctl", "is-active", "firewalld.service", check=False).stdout.strip() == "active":
        active.append("firewalld")
    if re.search(r"^ENABLED=[\"']?yes", host.text("/etc/ufw/ufw.conf"), re.MULTILINE):
        active.append("ufw")
    return records.Firewalls(tuple(active))


def routing(host: Host) -> records.Routing:
    """Ask the kernel for addresses, rules, routes, and which way an address of each sandbox network lies."""
    ip = (*_inside(host), "ip", "-j")
    bridges = corral_bridges(json.loads(host.run(*ip, "-4", "address", "show").stdout or "[]"))
    routes = json.loads(host.run(*ip, "-4", "route", "show", "table", "all").stdout or "[]")
    rules = json.loads(host.run(*ip, "-4", "rule", "show").stdout or "[]")
    lookups = {name: _lookup(host, str(subnet.network_address + 2), ip) for name, subnet in bridges.items()}
    return records.Routing(
        bridges,
        {name: row for name, row in lookups.items() if row is not None},
        tuple(rules),
        tuple(routes),
        outside=_lookup(host, OUTSIDE) is not None,
    )


def _lookup(host: Host, address: str, ip: tuple[str, ...] = ("ip", "-j")) -> records.Row | None:
    done = host.run(*ip, "route", "get", address, check=False)
    if done.code != 0:
        return None
    rows = json.loads(done.stdout or "[]")
    return rows[0] if rows else None


def corral_bridges(rows: Iterable[Mapping[str, Any]]) -> dict[str, IPv4Network]:
    """Return corral's bridges and their subnets from rows of ``ip -j address``."""
    found = {}
    for row in rows:
        name = str(row.get("ifname", ""))
        for address in row.get("addr_info") or ():
            if name.startswith("corral-") and address.get("local"):
                found[name] = IPv4Interface(f"{address['local']}/{address['prefixlen']}").network
    return found


def settings(host: Host) -> records.Settings:
    """Read the service's configuration."""
    from corral.lifecycle import subnet_ranges

    try:
        versions.check_state(data_home(host.home, dict(host.environ)), __version__)
        newer = None
    except CorralError as error:
        newer = error
    try:
        config = _config(host)
    except PolicyError as error:
        return records.Settings(error=error, newer=newer)
    return records.Settings(ranges=tuple(subnet_ranges(config.subnet_range)), newer=newer)


def _config(host: Host) -> Any:
    from enforcer.client import load_config

    return load_config(host.home, host.environ)


def resolvers(host: Host) -> records.Resolvers:
    """Ask each name server that the enforcer asks for a name nobody has, all at the same time."""
    try:
        servers = list(_config(host).dns.servers)
    except PolicyError as error:
        raise CannotTell("enforcer.toml is not valid") from error
    if not servers:
        servers = name_servers(host.text("/etc/resolv.conf"))
    with ThreadPoolExecutor(max_workers=8) as pool:
        return records.Resolvers(dict(zip(servers, pool.map(ask_server, servers), strict=True)))


def name_servers(resolv_conf: str) -> list[str]:
    """Return the name servers of a resolv.conf, each once; the C library's default when it names none."""
    words = (line.split() for line in resolv_conf.splitlines())
    found = [row[1] for row in words if len(row) >= 2 and row[0] == "nameserver"]
    return list(dict.fromkeys(found)) or ["127.0.0.1"]


def ask_server(server: str, timeout: float = 2.0, tries: int = 2) -> str:
    """Return why a name server is of no use, empty when it answers. What it answers does not matter."""
    import dns.exception
    import dns.message
    import dns.query
    import dns.rcode

    where, _, certificate = server.removeprefix("tls://").partition("#")
    match = _NAME_SERVER.fullmatch(where)
    host, port = (match[1] or match[3], match[2] or match[4]) if match else (where, None)
    # Answers that a forwarder remembers, or makes up for the root, would hide that it cannot ask anybody.
    question = dns.message.make_query(f"{secrets.token_hex(8)}.{RESERVED_DOMAIN}", "A")
    said = ""
    for _ in range(tries):
        try:
            if certificate:
                answer = dns.query.tls(
                    question, host, timeout=timeout, port=int(port or 853), server_hostname=certificate
                )
            else:
                answer, _tcp = dns.query.udp_with_fallback(
                    question, host, timeout=timeout, port=int(port or 53)
                )
        except dns.exception.Timeout:
            said = "no answer"
        except (OSError, EOFError, ValueError, dns.exception.DNSException) as error:
            said = str(error) or type(error).__name__
        else:
            if answer.rcode() != dns.rcode.SERVFAIL:
                return ""
            said = "it answers SERVFAIL: the servers that it asks itself do not answer"
    return said


def modules(host: Host) -> records.Modules:
    """Look for the kernel modules the rules need."""
    release = os.uname().release
    loaded = {line.split()[0] for line in host.text("/proc/modules").splitlines()}
    directory = f"/lib/modules/{release}"
    builtin = _module_names(host.text(f"{directory}/modules.builtin"))
    loadable = _module_names(host.text(f"{directory}/modules.dep"))

    def state(name: str) -> str:
        if name in loaded:
            return "loaded"
        if name in builtin or host.at(f"/sys/module/{name}").exists():
            return "built-in"
        if name in loadable:
            return "loadable"
        # Without a list (a container, a kernel of one's own) nothing can be told from files.
        return "absent" if loadable else "unknown"

    others = host.at("/lib/modules")
    gone = not loadable and others.is_dir() and any(others.iterdir())
    return records.Modules({name: state(name) for name in MODULES}, release, gone)


def _module_names(listing: str) -> set[str]:
    paths = (line.partition(":")[0] for line in listing.splitlines())
    return {Path(path).name.partition(".ko")[0].replace("-", "_") for path in paths if ".ko" in path}


def disks(host: Host) -> records.Disks:
    """Ask for the room where corral and Docker write."""
    found = []
    engine_data = DOCKER_DATA
    if rootless.chosen(host.environ):
        base = host.environ.get("XDG_DATA_HOME", "")
        engine_data = (Path(base) if base.startswith("/") else host.home / ".local/share") / "docker"
    for place in (data_home(host.home, dict(host.environ)), engine_data):
        path = host.at(place)
        while not path.exists():
            path = path.parent
        room = os.statvfs(path)
        # A file system without inodes (btrfs) says 0 of 0.
        inodes = room.f_favail if room.f_files else 1 << 30
        found.append(records.Disk(str(place), room.f_bavail * room.f_frsize, inodes))
    return records.Disks(tuple(found))


def security(host: Host) -> records.Security:
    """Ask the kernel for SELinux and AppArmor."""
    enforcing = {"1": "enforcing", "0": "permissive"}.get(host.text("/sys/fs/selinux/enforce").strip(), "")
    apparmor = host.text("/sys/module/apparmor/parameters/enabled").strip() == "Y"
    return records.Security(enforcing, apparmor)


Probe = Callable[[Host], Any]

PROBES: dict[type, Probe] = {
    records.Who: who,
    Facts: engine,
    records.Manager: manager,
    records.EnforcerUnit: enforcer_unit,
    records.SandboxUnits: sandbox_units,
    records.SystemUnits: system_units,
    records.Enforcer: enforcer,
    records.Skeleton: skeleton,
    records.WriterSocket: writer_socket,
    records.Sysctls: sysctls,
    records.Tables: tables,
    records.Programs: programs,
    records.Linger: linger,
    records.Firewalls: firewalls,
    records.Routing: routing,
    records.Settings: settings,
    records.Resolvers: resolvers,
    records.Modules: modules,
    records.Disks: disks,
    records.Security: security,
}
