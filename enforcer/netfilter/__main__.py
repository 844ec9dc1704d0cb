"""``corral-netfilter serve | skeleton``: what the system units run; ``guard | join``: see ``rootless``.

Configuration is /etc/corral/netfilter.json, owned by root; a missing file means the defaults.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
from ipaddress import IPv4Network
from pathlib import Path

from enforcer.netfilter import claims as claiming
from enforcer.netfilter import process, rootless
from enforcer.netfilter.claims import Claim
from enforcer.netfilter.detect import LEGACY, NFT
from enforcer.netfilter.kernel import KernelError, RealKernel
from enforcer.netfilter.look import Detector
from enforcer.netfilter.namespace import NotGuarded
from enforcer.netfilter.nflog import Log
from enforcer.netfilter.process import ToolError
from enforcer.netfilter.server import (
    NETLINK_NETFILTER,
    NFNLGRP_NFTABLES,
    RTNLGRP_IPV4_IFADDR,
    RTNLGRP_LINK,
    Server,
    watch_socket,
)
from enforcer.netfilter.skeleton import Skeleton
from enforcer.netfilter.tables import LegacyTables, NftTables, Tables
from enforcer.netfilter.writer import GiveUp, Writer

CONFIG = Path("/etc/corral/netfilter.json")
DECIDED = Path("/run/corral-netfilter/driver")
LISTEN_FD = 3

log = logging.getLogger("corral.netfilter")


def load_config(path: Path) -> tuple[Skeleton, tuple[IPv4Network, ...]]:
    """Return the skeleton and the destination ranges that root permits.

    Raises:
        ValueError: the file is not an object of mark, nflog_group, flows_per_source and permit_ranges.
    """
    try:
        body = json.loads(path.read_text())
    except FileNotFoundError:
        body = {}
    if not isinstance(body, dict):
        raise ValueError(f"{path}: not an object")
    ranges = tuple(IPv4Network(text) for text in body.pop("permit_ranges", []))
    try:
        return Skeleton(**body, permitted=ranges), ranges
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from error


def _version() -> str:
    return (Path(__file__).parent / "VERSION").read_text().strip()


def _claims_file() -> Path | None:
    directory = os.environ.get("RUNTIME_DIRECTORY")
    return Path(directory) / "claims.json" if directory else None


def _read_claims(path: Path | None) -> dict[str, Claim]:
    try:
        return claiming.from_rows(json.loads(path.read_text())) if path else {}
    except (OSError, ValueError, RecursionError):
        return {}


def _writer(path: Path | None, kernel_class: type[RealKernel] = RealKernel) -> Writer:
    skeleton, permitted = load_config(CONFIG)

    def save(claims: dict[str, Claim]) -> None:
        if path is None:
            return
        partial = path.with_suffix(".new")
        try:
            partial.write_text(json.dumps(claiming.to_rows(claims)))
            partial.replace(path)
        except OSError as error:
            raise KernelError(f"the claims cannot be saved: {error}") from error

    claims = _read_claims(path)
    if kernel_class is not RealKernel:
        # A rootless engine's rules are nft's iptables, or it was refused.
        kernel = kernel_class(hold=path is not None)
    else:
        # What was decided outlives the writer. The boot-time run may come later than the boot: an upgrade.
        remember = path.with_name("driver") if path is not None else DECIDED
        tables: dict[str, Tables] = {NFT: NftTables(process.run), LEGACY: LegacyTables()}
        detector = Detector(tables[NFT], tables[LEGACY], remember, keep=path is not None)
        kernel = RealKernel(hold=path is not None, detector=detector, tables=tables)
    journal = Log(skeleton.nflog_group) if path is not None else None
    return Writer(
        kernel, skeleton, _version(), permitted, claims, save, claiming=path is not None, journal=journal
    )


def _notify(text: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(text.encode(), address.replace("@", "\0", 1))


def serve() -> int:
    """Serve the socket that systemd passed and keep the skeleton standing."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS") != "1":
        log.error("corral-netfilter serve is started by corral-netfilter.socket, with one socket")
        return 2
    writer = _writer(_claims_file())
    # Subscribed before the first look, so that no change falls between the two.
    rules = watch_socket(NETLINK_NETFILTER, NFNLGRP_NFTABLES)
    links = watch_socket(socket.NETLINK_ROUTE, RTNLGRP_LINK, RTNLGRP_IPV4_IFADDR)
    writer.heal("the start")
    writer.guard()
    writer.prune()
    server = Server(writer, socket.socket(fileno=LISTEN_FD), rules, links)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    _notify("READY=1")
    server.serve()
    return 0


def _command(words: list[str]) -> int:
    code = 0
    match words:
        case ["serve"]:
            code = serve()
        case ["skeleton"]:
            for problem in _writer(None).heal("the boot"):
                log.warning("%s", problem.text)
        case ["guard", *options]:
            code = rootless.guard(options, os.environ, _writer)
        case ["join"]:
            code = rootless.join(os.environ, rootless.launcher())
        case ["joined", *numbers]:
            code = rootless.joined(numbers, os.environ, _writer, _notify)
        case _:
            log.error("usage: corral-netfilter serve|skeleton|guard|join")
            code = 2
    return code


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    words = sys.argv[1:] if argv is None else argv
    try:
        return _command(words)
    except (GiveUp, KernelError, NotGuarded, ToolError, ValueError, OSError) as error:
        log.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
