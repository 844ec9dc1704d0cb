"""The network part of a policy as a container carries it in its labels.

The labels are the declaration: the enforcer needs no database, and a restart rebuilds everything from the
containers that exist. What is written here is the contract between the CLI and the enforcer.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from policy import versions
from policy.errors import PolicyError

SCHEMA = versions.SCHEMAS[versions.LABELS]
LABEL = "io.corral."
LABEL_SCHEMA = LABEL + "schema"
LABEL_SANDBOX = LABEL + "sandbox"
LABEL_SERVICE = LABEL + "service"
LABEL_SESSION = LABEL + "session"
LABEL_UID = LABEL + "uid"
LABEL_PROJECT = LABEL + "project"
LABEL_PURPOSE = LABEL + "purpose"  # run | shell | verify | daemon | proxy
LABEL_EGRESS = LABEL + "egress"
# Of a container that is not on a network of its own: none or host. Absent from all others.
LABEL_CONNECTION = LABEL + "connection"

Port = Annotated[int, Field(ge=1, le=65535)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Name(_Frozen):
    """One allowed name: ``host`` is a lower-case absolute DNS name without the final dot."""

    host: Annotated[str, Field(pattern=r"^[a-z0-9_](?:[a-z0-9_.-]{0,251}[a-z0-9_])?$")]
    ports: Annotated[tuple[Port, ...], Field(min_length=1, strict=False)] = (443,)
    optional: bool = False
    liveness: bool = True


class HostService(_Frozen):
    """A service on the host's 127.0.0.1 that the sandbox reaches as corral-host:<port>."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    port: Port


class Pattern(_Frozen):
    """What may be asked for by name: of the sandbox's proxy, or of the answerer.

    ``host``: an entry as ``policy.patterns.parse_pattern`` reads it (a name, ``*.zone``, ``regex:...``).
    ``protocol`` tcp: what passes is not looked at; tls: it begins with a ClientHello. ``sni`` false: one
    without a name passes too.
    """

    host: Annotated[str, Field(min_length=1, max_length=300)]
    ports: Annotated[tuple[Port, ...], Field(min_length=1, strict=False)] = (443,)
    protocol: Literal["tls", "tcp"] = "tls"
    sni: bool = True

    @property
    def exact(self) -> bool:
        """Whether it stands for one name."""
        return not self.host.startswith(("*.", "regex:", "^"))


ALLOWLIST, OPEN, PROXY = "allowlist", "open", "proxy"
DEAD, ANSWER = "dead", "answer"


class Declaration(_Frozen):
    """What one container may reach.

    ``mode`` open: all public addresses; then it has no names. ``mode`` proxy: names through the sandbox's
    proxy alone, none pinned. ``names`` are pinned; ``patterns`` may be asked for, and hold pinned ones too
    where there are any. ``dns`` answer: names that ``patterns`` match are answered at the gateway.
    """

    mode: Literal["allowlist", "open", "proxy"] = "allowlist"
    names: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    patterns: Annotated[tuple[Pattern, ...], Field(strict=False)] = ()
    host_services: Annotated[tuple[HostService, ...], Field(strict=False)] = ()
    allow_stale: bool = False
    dns: Literal["dead", "answer"] = "dead"

    @property
    def proxied(self) -> bool:
        """Whether its sandbox has a proxy: somebody has to ask for what cannot be pinned ahead."""
        return self.mode == PROXY or any(not pattern.exact for pattern in self.patterns)

    @property
    def answered(self) -> bool:
        """Whether its container's questions for names are answered at the gateway."""
        return self.mode == OPEN or self.dns == ANSWER

    def to_label(self) -> str:
        """Return canonical JSON for the label ``io.corral.egress``."""
        body = {"schema": SCHEMA, **self.model_dump(mode="json")}
        # As containers of releases that did not know them are labelled.
        if not self.allow_stale:
            del body["allow_stale"]
        if self.mode == ALLOWLIST:
            del body["mode"]
        if not self.patterns:
            del body["patterns"]
        if self.dns == DEAD:
            del body["dns"]
        return json.dumps(body, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_label(cls, text: str) -> Declaration:
        """Parse a label.

        Raises:
            PolicyError: not JSON, another schema version, or a field that does not validate.
        """
        try:
            body: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PolicyError(f"label {LABEL_EGRESS} is not JSON: {error}") from error
        schema = body.pop("schema", "none") if isinstance(body, dict) else "none"
        if schema != SCHEMA:
            raise PolicyError(
                f"label {LABEL_EGRESS} has schema {schema}, and this version reads {SCHEMA}",
                "corral and its enforcer differ in version; run: corral install",
            )
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise PolicyError(f"label {LABEL_EGRESS}: {where}: {first['msg']}") from error
