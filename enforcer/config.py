"""The service's own configuration, ~/.config/corral/enforcer.toml. Never part of a project's policy.

::

    permit_ranges = ["203.0.113.0/24"]   # addresses that vetting would refuse and a lab needs; loud in status
    subnet_range = "172.16.0.0/16"       # where sandboxes get their /26 from
    [dns]
    servers = ["192.0.2.53"]             # or "tls://192.0.2.53#dns.example", asked over TLS only;
                                         # default: the host's resolv.conf, read anew when it changes
    [timers]                             # seconds
    reconcile = 60
    renew = 300
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from policy import savedfile
from policy.errors import PolicyError

RESOLV_CONF = Path("/etc/resolv.conf")
WRITER_SOCKET = Path("/run/corral/netfilter.sock")


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Dns(_Model):
    """``servers`` as `enforcer.resolver.Server` reads them; empty means the host's resolv.conf."""

    servers: tuple[str, ...] = ()

    @field_validator("servers")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        # The command line reads this configuration too and should not wait for a DNS library.
        from enforcer.resolver import Server

        for text in value:
            Server.parse(text)
        return value


class Timers(_Model):
    """Seconds between full passes, and between renewals of the kernel's elements."""

    reconcile: Annotated[float, Field(ge=1, le=3600)] = 60
    renew: Annotated[float, Field(ge=1, le=1500)] = 300


class Config(_Model):
    """See the module."""

    permit_ranges: tuple[IPv4Network | IPv6Network, ...] = ()
    subnet_range: IPv4Network | None = None
    dns: Dns = Dns()
    timers: Timers = Timers()


def path(home: Path, environ: Mapping[str, str]) -> Path:
    """Return where the configuration of a user lies."""
    base = environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else home / ".config") / "corral" / "enforcer.toml"


def load(file: Path) -> Config:
    """Read the configuration; a missing file means the defaults.

    Raises:
        PolicyError: not TOML, an unknown key, or a value that does not validate.
    """
    try:
        body = tomllib.loads(savedfile.text(file))
    except FileNotFoundError:
        return Config()
    except (OSError, ValueError) as error:
        raise PolicyError(f"{file}: {error}") from error
    except RecursionError as error:
        raise PolicyError(f"{file}: it is nested too deeply") from error
    try:
        return Config.model_validate(body)
    except ValidationError as error:
        lines = [f"{file}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise PolicyError("\n".join(lines)) from error
