"""What is sent from a container. Whether it arrives is counted elsewhere; here is what the sender is told."""

from __future__ import annotations

import os
import socket
import struct

from .tools import Given, Probe, said

TRIES = 5
WAIT = 1.0


def _datagrams(address: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sender:
        for _ in range(TRIES):
            sender.sendto(b"probe", (address, port))


def _connection(address: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(WAIT)
        client.connect((address, port))


def _both(address: str) -> str:
    said(lambda: _datagrams(address, 9))
    return said(lambda: _connection(address, 80), "connected")


def metadata(given: Given) -> str:
    return _agreed([_both(address) for address in given["metadata"]])


def metadata_six(given: Given) -> str:
    return _both(given["metadata_six"])


def forbidden(given: Given) -> str:
    return _both(given["forbidden"])


def forbidden_six(given: Given) -> str:
    return _both(given["forbidden_six"])


def _agreed(answers: list[str]) -> str:
    return ", ".join(dict.fromkeys(answers))


def all_nodes(given: Given) -> str:
    """Everybody on the link, by IPv6."""
    answers = []
    for index, name in socket.if_nameindex():
        if name not in {"lo", "docker0"} and not name.startswith(("veth", "br-", "corral-")):
            with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sender:
                for _ in range(TRIES):
                    answers.append(said(lambda: sender.sendto(b"probe", ("ff02::1", 9, 0, index)), "sent"))  # noqa: B023
    return _agreed(answers) or "no link"


def ping(given: Given) -> str:
    """An echo request from a socket that needs no privilege."""
    try:
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
    except OSError as error:
        return f"no socket: {error.strerror}"
    with sender:
        sender.settimeout(WAIT)
        for number in range(TRIES):
            head = struct.pack("!BBHHH", 8, 0, 0, 0, number)
            said(lambda: sender.sendto(head + b"probe", (given["pinged"], 0)))  # noqa: B023
        try:
            sender.recv(100)
        except TimeoutError:
            return "silence"
        except OSError as error:
            return f"refused: {error.strerror}"
    return "answered"


def _question(name: str) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return (
        struct.pack("!6H", os.getpid() & 0xFFFF, 0x0100, 1, 0, 0, 0)
        + labels
        + b"\0"
        + struct.pack("!2H", 16, 1)
    )


def names(given: Given) -> str:
    """Bytes in the labels of a name, by whoever might ask on: the C library, and each resolver itself."""
    secret = os.urandom(12).hex()
    answers = ["nothing"]
    for number in range(2):
        try:
            socket.getaddrinfo(f"{secret}-{number}.{given['domain']}", 443)
        except OSError:
            continue
    for address in given["resolvers"]:
        name = f"{secret}-{address.replace('.', '-')}.{given['domain']}"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.settimeout(WAIT)
            try:
                sender.sendto(_question(name), (address, 53))
                # A code that is not "refused" is an answer about the name.
                if sender.recv(512)[3] & 15 in {0, 3}:
                    answers.append("answered")
            except OSError:
                pass
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
            client.settimeout(WAIT)
            try:
                client.connect((address, 53))
                client.sendall(struct.pack("!H", len(_question(name))) + _question(name))
            except OSError:
                continue
    return "answered" if "answered" in answers else "no answer"


def host_port(given: Given) -> str:
    """A service that listens on every address of the host."""
    port = given["host_port"]
    answers = [said(lambda to=to: _connection(to, port), "connected") for to in given["host_addresses"]]  # type: ignore[misc]
    return "connected" if "connected" in answers else _agreed(answers)


def host_loopback(given: Given) -> str:
    """One that listens on the host's loopback, at this container's own."""
    return said(lambda: _connection("127.0.0.1", given["loopback_port"]), "connected")


PROBES: dict[str, Probe] = {
    "metadata": metadata,
    "metadata-six": metadata_six,
    "forbidden": forbidden,
    "forbidden-six": forbidden_six,
    "all-nodes": all_nodes,
    "ping": ping,
    "names": names,
    "host-port": host_port,
    "host-loopback": host_loopback,
}
