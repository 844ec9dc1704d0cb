"""ClientHellos: built by hand, made by OpenSSL, and read by OpenSSL."""

from __future__ import annotations

import contextlib
import ssl
import struct
import warnings
from collections.abc import Sequence
from functools import cache

RETRY_RANDOM = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")


def extension(kind: int, data: bytes) -> bytes:
    return struct.pack(">HH", kind, len(data)) + data


def names(*entries: tuple[int, bytes]) -> bytes:
    """Return a server_name extension with these entries of (type, name)."""
    listed = b"".join(struct.pack(">BH", kind, len(name)) + name for kind, name in entries)
    return extension(0, struct.pack(">H", len(listed)) + listed)


def body(
    *extensions: bytes,
    version: int = 0x0303,
    session: bytes = b"",
    suites: bytes = b"\x13\x01",
    tail: bytes = b"",
) -> bytes:
    """Return the body of a ClientHello; without extensions it has no list of them."""
    listed = b"".join(extensions)
    return (
        struct.pack(">H", version)
        + bytes(32)
        + bytes([len(session)])
        + session
        + struct.pack(">H", len(suites))
        + suites
        + b"\x01\0"
        + (struct.pack(">H", len(listed)) + listed if extensions else b"")
        + tail
    )


def message(data: bytes, kind: int = 1) -> bytes:
    return bytes([kind]) + len(data).to_bytes(3, "big") + data


def records(data: bytes, size: int = 1 << 14, kind: int = 22) -> bytes:
    """Return ``data`` in records of at most ``size`` bytes."""
    return b"".join(
        struct.pack(">BHH", kind, 0x0301, len(data[at : at + size])) + data[at : at + size]
        for at in range(0, len(data), size)
    )


def hello(name: str | None = "api.example.com", *more: bytes, size: int = 1 << 14) -> bytes:
    """Return a ClientHello in records."""
    said = [names((0, name.encode("latin-1")))] if name is not None else []
    return records(message(body(*said, *more)), size)


def server_hello(retry: bool, size: int = 1 << 14) -> bytes:
    """Return a ServerHello in records, or a HelloRetryRequest."""
    random = RETRY_RANDOM if retry else bytes(range(32))
    return records(message(b"\x03\x03" + random + b"\0\x13\x01\0\0\0", 2), size)


VERSIONS = {
    "1.0": ssl.TLSVersion.TLSv1,
    "1.1": ssl.TLSVersion.TLSv1_1,
    "1.2": ssl.TLSVersion.TLSv1_2,
    "1.3": ssl.TLSVersion.TLSv1_3,
}


def made(name: str | None, version: str = "1.3", protocols: Sequence[str] = ()) -> bytes:
    """Return what OpenSSL sends first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        context.minimum_version = context.maximum_version = VERSIONS[version]
    if protocols:
        context.set_alpn_protocols(list(protocols))
    came, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(came, sent, server_hostname=name).do_handshake()
    return sent.read()


@cache
def _reading() -> tuple[ssl.SSLContext, list[str | None]]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        context.minimum_version = ssl.TLSVersion.TLSv1
    seen: list[str | None] = []

    def called(_: object, name: str | None, __: object) -> int:
        seen.append(name)
        return ssl.ALERT_DESCRIPTION_HANDSHAKE_FAILURE

    context.sni_callback = called  # type: ignore[assignment]
    return context, seen


def openssl_reads(data: bytes) -> tuple[bool, str | None]:
    """Return whether OpenSSL takes this for a whole ClientHello, and the name it finds in it."""
    context, seen = _reading()
    seen.clear()
    came, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(came, sent, server_side=True)
    came.write(data)
    with contextlib.suppress(ssl.SSLError, ValueError):
        server.do_handshake()
    return bool(seen), seen[0] if seen else None
