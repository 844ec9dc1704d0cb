"""The service's log: plain lines on stderr, and events with fields of their own where a journal reads them.

``log.warning(text, extra={FIELDS: {"CORRAL_EVENT": "refused"}})`` reaches journald by its native protocol, so
that ``journalctl --user CORRAL_EVENT=refused`` finds it; elsewhere it is a line like any other.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Mapping
from typing import TextIO

SOCKET = "/run/systemd/journal/socket"
FIELDS = "journal_fields"
IDENTIFIER = "corral-enforcer"
_PRIORITIES = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6, logging.DEBUG: 7}


def encode(fields: Mapping[str, str]) -> bytes:
    """Return a datagram of journald's native protocol; names are upper case, values any text."""
    parts = []
    for name, value in fields.items():
        data = value.encode("utf-8", "backslashreplace")
        if b"\n" in data:
            parts.append(name.encode("ascii") + b"\n" + struct.pack("<Q", len(data)) + data + b"\n")
        else:
            parts.append(name.encode("ascii") + b"=" + data + b"\n")
    return b"".join(parts)


def has_journal(environ: Mapping[str, str], stream: TextIO) -> bool:
    """Say whether ``stream`` is connected to the journal; see JOURNAL_STREAM in systemd.exec(5)."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class Handler(logging.StreamHandler[TextIO]):
    """Writes lines to ``stream``; records with fields go to the journal at ``address``, if there is one."""

    def __init__(self, stream: TextIO, address: str | None) -> None:
        super().__init__(stream)
        self.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        self._address = address

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        fields = getattr(record, FIELDS, None)
        if fields is None or self._address is None or not self._sent(record, fields):
            super().emit(record)

    def _sent(self, record: logging.LogRecord, fields: Mapping[str, str]) -> bool:
        common = {
            "MESSAGE": self.format(record),
            "PRIORITY": str(_PRIORITIES.get(record.levelno, 6)),
            "SYSLOG_IDENTIFIER": IDENTIFIER,
        }
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(1.0)
                sock.sendto(encode({**common, **fields}), str(self._address))
        except OSError:
            return False
        return True
