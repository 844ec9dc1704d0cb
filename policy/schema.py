"""corral.yaml as frozen models. Structure only: policy.loader checks paths against the file system."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from policy import asking, container, profiles
from policy.connection import OWN, connection
from policy.container import PIDS_LIMIT
from policy.declaration import ANSWER, OPEN, PROXY, Declaration, HostService, Name, Pattern, Port
from policy.errors import PolicyError
from policy.hosts import HostError
from policy.limits import default_memory, parse_memory
from policy.patterns import parse_pattern
from policy.profiles import Profile
from policy.urls import UrlError, is_no_proxy, split_http

MAX_NAMES = 256
MAX_SERVICES = 64
MAX_MOUNTS = 128
DNS_PORTS = frozenset({53, 853})
DEFAULT_PORT = 443

_SERVICE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._/:-]*(@sha256:[0-9a-f]{64})?")


def problem(what: str, fix: str | None = None) -> PydanticCustomError:
    """Return an error that is shown as ``what`` with its ``fix``; ``what`` never holds the value."""
    return PydanticCustomError("corral", "{what}", {"what": what, "fix": fix or ""})


def _host(text: str, info: ValidationInfo) -> str:
    try:
        return parse_pattern(text, force=info.data.get("force") is True).text
    except HostError as error:
        raise problem(error.what, error.fix) from error


def _number_as_text(value: Any) -> Any:
    """YAML reads 127.1 or 10 as a number; the host parser has the better message for it."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _entry(value: Any) -> Any:
    """Turn the short form of an allowlist entry into the long one."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return {"host": value}
    if isinstance(value, dict):
        first = next(iter(value), "")
        if len(value) == 1 and "." in str(first):
            ports = value[first] if isinstance(value[first], int) else 443
            raise problem("a host name followed by a colon", f"write {{host: {first}, ports: [{ports}]}}")
        return value
    raise problem("must be a host name or a mapping with the key host")


def _no_dns_port(port: int) -> int:
    if port in DNS_PORTS:
        raise problem("a port of DNS: a sandbox has no DNS", "remove the port")
    return port


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) != len(values):
        raise problem("a value is listed twice", "keep one of them")
    return values


def _url(credentials: bool) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text:
            try:
                split_http(text, credentials=credentials)
            except UrlError as error:
                raise problem(str(error), "write http://host:port or https://host/path") from error
        return text

    return check


def is_image(text: str) -> bool:
    """Say whether that is how images are named."""
    return len(text) <= 255 and _IMAGE.fullmatch(text) is not None


def _image(text: str) -> str:
    if not is_image(text):
        raise problem("not an image reference", "write NAME:TAG or NAME@sha256:DIGEST")
    return text


def _no_proxy(text: str) -> str:
    if not is_no_proxy(text):
        raise problem("a character that does not belong in no_proxy", "list hosts, separated by commas")
    return text


def _name(text: str) -> str:
    if not text.strip() or text != text.strip():
        raise problem("a sandbox name is empty or has spaces around it")
    if not text.isprintable():
        raise problem("a control character in the sandbox name", "remove it")
    return text


def _service_name(text: str) -> str:
    if not _SERVICE_NAME.fullmatch(text):
        raise problem("a service name is made of a-z, 0-9, '-' and '_' (at most 32)", "rename the service")
    return text


def _profile(text: str) -> str:
    try:
        return profiles.get(text).name
    except PolicyError as error:
        what = "is not available yet" if text in profiles.planned() else "unknown profile"
        raise problem(what, error.hint) from error


EGRESS_MODES = ("allowlist", "proxy", "open", "none", "host")


def _egress_mode(text: str) -> str:
    if text in EGRESS_MODES:
        return text
    if text == "bridge":
        raise problem("corral has no such egress mode", "open comes nearest: all public addresses")
    raise problem("unknown egress mode", f"use {' or '.join(EGRESS_MODES)}")


def _runtime(text: str) -> str:
    if text not in {"runc", *container.RUNTIMES}:
        raise problem("unknown runtime", f"use runc, {' or '.join(container.RUNTIMES)}, or remove the key")
    return text


def _argument(text: str) -> str:
    if "\0" in text:
        raise problem("a NUL in an argument")
    return text


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


Listed = Field(strict=False)
HostUrl = Annotated[str, AfterValidator(_url(credentials=False))]
ProxyUrl = Annotated[str, AfterValidator(_url(credentials=True))]


class Mounts(_Model):
    """Host paths as written; inside they appear under the same path. ``project``: how its directory is."""

    project: Literal["rw", "ro"] = "rw"

    rw: Annotated[tuple[str, ...], Listed, Field(max_length=MAX_MOUNTS)] = ()
    ro: Annotated[tuple[str, ...], Listed, Field(max_length=MAX_MOUNTS)] = ()


class AllowEntry(_Model):
    """One allowed name, or what stands for many, in the form of ``policy.patterns``' ``text``.

    ``liveness``: its reachability is checked when a session starts. ``force``: accept a name that is refused
    for what it is known to serve (DNS over HTTPS). ``protocol``, ``sni``: see ``policy.declaration.Pattern``.
    """

    # Before host, whose validation looks at it.
    force: bool = False
    host: Annotated[str, BeforeValidator(_number_as_text), AfterValidator(_host)]
    ports: Annotated[
        tuple[Annotated[Port, AfterValidator(_no_dns_port)], ...],
        Listed,
        Field(min_length=1, max_length=64),
        AfterValidator(_distinct),
    ] = (DEFAULT_PORT,)
    optional: bool = False
    liveness: bool = True
    protocol: Literal["tls", "tcp"] = "tls"
    sni: bool = True

    @property
    def exact(self) -> bool:
        """Whether it is one name."""
        return self.to_pattern().exact

    def to_name(self) -> Name:
        """Return the entry, which is one name, as it is pinned."""
        return Name(host=self.host, ports=self.ports, optional=self.optional, liveness=self.liveness)

    def to_pattern(self) -> Pattern:
        """Return the entry as what may be asked for."""
        return Pattern(host=self.host, ports=self.ports, protocol=self.protocol, sni=self.sni)


class Egress(_Model):
    """What may be reached beyond the sandbox.

    ``from_host``: clients of this host whose configured names are added. ``allow_stale``: start on the last
    good addresses of names that cannot be resolved now. ``dns`` answer: a resolver for the names of the list.
    """

    mode: Annotated[str, AfterValidator(_egress_mode)] = "allowlist"
    allow: Annotated[
        tuple[Annotated[AllowEntry, BeforeValidator(_entry)], ...], Listed, Field(max_length=MAX_NAMES)
    ] = ()
    profile_defaults: bool = True
    from_host: Annotated[
        tuple[Literal["npm", "pip", "apt", "git"], ...], Listed, AfterValidator(_distinct)
    ] = ()
    allow_stale: bool = False
    dns: Literal["dead", "answer"] = "dead"


class Service(_Model):
    """A service on this host's 127.0.0.1; inside it is corral-host:<port>."""

    name: Annotated[str, AfterValidator(_service_name)]
    port: Annotated[Port, AfterValidator(_no_dns_port)]


def _distinct_services(services: tuple[Service, ...]) -> tuple[Service, ...]:
    for what in ("name", "port"):
        seen = [getattr(service, what) for service in services]
        if len(set(seen)) != len(seen):
            raise problem(f"two host services have the same {what}", "keep one of them")
    return services


class Secrets(_Model):
    """``env_file``: a KEY=VALUE file on the host; its values become environment, it is never mounted."""

    env_file: str | None = None


class Proxy(_Model):
    """Proxies for building the image. None: take the host's; empty text: use none."""

    http: ProxyUrl | None = None
    https: ProxyUrl | None = None
    no_proxy: Annotated[str, AfterValidator(_no_proxy)] | None = None


class Build(_Model):
    """How the image is built. None means: what the host's own clients are configured with."""

    base_image: Annotated[str, AfterValidator(_image)] = "debian:bookworm-slim"
    proxy: Proxy = Proxy.model_construct()
    ca_certificates: Annotated[tuple[str, ...], Listed, Field(max_length=64)] = ()
    npm_registry: HostUrl | None = None
    pip_index: HostUrl | None = None
    apt_mirror: HostUrl | None = None


def _memory(text: str) -> str:
    try:
        parse_memory(text)
    except ValueError as error:
        raise problem(str(error), "write an amount with its unit: 512m, 8g") from error
    return text


class Limits(_Model):
    """What one container may use of this host.

    ``memory`` None: three quarters of the host's. ``cpus`` None: all processors. ``best_effort``: start even
    where the host has no cgroup controller for a limit.
    """

    pids: Annotated[int, Field(ge=32, le=4194304)] = PIDS_LIMIT
    memory: Annotated[str, AfterValidator(_memory)] | None = None
    cpus: Annotated[float, Field(strict=False, ge=0.1, le=4096)] | None = None
    best_effort: bool = False

    @field_validator("cpus", mode="before")
    @classmethod
    def _cpus(cls, value: Any) -> Any:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise problem("must be a number of processors", "write 2 or 0.5")
        return value

    def container(self, memory_total: int) -> container.Limits:
        """Return what the container gets on a host with that much memory, in bytes."""
        memory = default_memory(memory_total) if self.memory is None else parse_memory(self.memory)
        return container.Limits(self.pids, memory, round((self.cpus or 0) * 100) * 10**7)


class Hooks(_Model):
    """``pre_launch``: a program of this host and its arguments, run before each session."""

    pre_launch: Annotated[
        tuple[Annotated[str, Field(max_length=4096), AfterValidator(_argument)], ...],
        Listed,
        Field(max_length=64),
    ] = ()


class Policy(_Model):
    """The whole file."""

    profile: Annotated[str, AfterValidator(_profile)]
    name: Annotated[str, Field(max_length=512), AfterValidator(_name)] | None = None
    mode: Literal["run", "daemon"] = "run"
    mounts: Mounts = Mounts.model_construct()
    egress: Egress = Egress.model_construct()
    host_services: Annotated[
        tuple[Service, ...], Listed, Field(max_length=MAX_SERVICES), AfterValidator(_distinct_services)
    ] = ()
    secrets: Secrets = Secrets.model_construct()
    limits: Limits = Limits.model_construct()
    build: Build = Build.model_construct()
    profile_options: dict[str, dict[str, JsonValue]] = Field(default_factory=dict)
    background: Annotated[tuple[str, ...], Listed, AfterValidator(_distinct), Field(max_length=16)] = ()
    image: Annotated[str, AfterValidator(_image)] | None = None
    runtime: Annotated[str, AfterValidator(_runtime)] = "runc"
    keep: bool = False
    hooks: Hooks = Hooks.model_construct()
    approvals: Literal["ask", "auto", "off"] | None = None
    protect: bool = True


def effective_declaration(policy: Policy, profile: Profile) -> Declaration:
    """Return what a sandbox container of this policy declares.

    The policy's names come first, in their order, then the profile's defaults. Entries of one host are
    merged: the union of their ports in order of appearance; of several entries in the policy the strict wish
    wins (optional only if all say so, liveness if any does); a profile default adds its ports only. Without
    a network of its own it declares nothing; an open sandbox has no names, as it reaches them all.

    Where something is asked for by name (a zone or expression, ``mode: proxy``, ``dns: answer``), every entry
    is a pattern too. With ``mode: proxy`` none is pinned.
    """
    egress = policy.egress
    if connection(egress.mode) != OWN:
        return Declaration()
    services = tuple(HostService(name=service.name, port=service.port) for service in policy.host_services)
    if egress.mode == OPEN:
        return Declaration(mode="open", host_services=services)
    defaults = profile.default_egress if egress.profile_defaults else ()
    asked = egress.mode == PROXY or egress.dns == ANSWER or any(not entry.exact for entry in egress.allow)
    return Declaration(
        mode="proxy" if egress.mode == PROXY else "allowlist",
        names=_names(egress, defaults) if egress.mode != PROXY else (),
        patterns=_patterns(egress, defaults) if asked else (),
        host_services=services,
        allow_stale=egress.allow_stale,
        dns=egress.dns,
    )


def _names(egress: Egress, defaults: Iterable[str]) -> tuple[Name, ...]:
    names: dict[str, Name] = {}
    for entry in egress.allow:
        if entry.exact:
            names[entry.host] = _merged(names.get(entry.host), entry.to_name())
    for host in defaults:
        known = names.get(host)
        default = Name(host=host)
        if known is not None:
            default = Name(host=host, optional=known.optional, liveness=known.liveness)
        names[host] = _merged(known, default)
    return tuple(names.values())


def _merged(first: Name | None, second: Name) -> Name:
    if first is None:
        return second
    return Name(
        host=first.host,
        ports=_union(first.ports, second.ports),
        optional=first.optional and second.optional,
        liveness=first.liveness or second.liveness,
    )


def _patterns(egress: Egress, defaults: Iterable[str]) -> tuple[Pattern, ...]:
    patterns: dict[str, Pattern] = {}
    for entry in egress.allow:
        new = entry.to_pattern()
        known = patterns.get(entry.host, new)
        wish = asking.strictest(asking.Terms(one.protocol, one.sni) for one in (known, new))
        patterns[entry.host] = Pattern(
            host=entry.host, ports=_union(known.ports, new.ports), protocol=wish.protocol, sni=wish.sni
        )
    for host in defaults:
        patterns[host] = with_port(patterns.get(host), host, DEFAULT_PORT)
    return tuple(patterns.values())


def with_port(known: Pattern | None, host: str, port: int) -> Pattern:
    """Return a pattern with one more port, which changes no wish; None: there was none."""
    if known is None:
        return Pattern(host=host, ports=(port,))
    return known.model_copy(update={"ports": _union(known.ports, (port,))})


def _union(first: Iterable[int], second: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*first, *second)))
