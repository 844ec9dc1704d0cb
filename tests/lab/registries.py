"""The package registries this machine is configured for, read at run time from apt, pip and npm."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from . import execute
from .execute import LabError

_EXTRA = "CORRAL_LAB_REGISTRY_HOSTS"


@dataclass(frozen=True)
class AptSource:
    """One repository as apt itself resolved it (`apt-get indextargets`)."""

    uri: str
    suite: str
    codename: str
    origin: str
    label: str


@dataclass(frozen=True)
class Registries:
    """Hosts builds may reach, the client settings that go into the box, and the way out of this machine."""

    hosts: tuple[str, ...]
    """host or host:port; without a port 80 and 443 are meant."""
    mirror: str
    """URI of the Debian archive."""
    security: str | None
    """URI of Debian's security archive, when the machine uses one."""
    apt_options: tuple[tuple[str, str], ...] = ()
    pip: tuple[tuple[str, str], ...] = ()
    npm: str | None = None
    npm_known: bool = True
    """False when npm is neither configured nor installed, so that nobody could say what its default is."""
    upstream: Mapping[str, str] = field(default_factory=dict)
    """Proxy URL by scheme when this machine itself leaves through a proxy."""

    def proxy_config(self) -> str:
        """What registry_proxy.py reads, as JSON."""
        return json.dumps({"hosts": self.hosts, "upstream": dict(self.upstream)})

    def with_npm_default(self, url: str) -> Registries:
        """The same, and the registry an unconfigured npm asks. Raises LabError when it is no web address."""
        host = host_of(url)
        if host is None:
            raise LabError(f"the npm client's default registry is {url!r}", f"name the hosts in {_EXTRA}")
        return replace(self, hosts=tuple(dict.fromkeys((*self.hosts, host))), npm_known=True)


def parse_index_targets(text: str) -> list[AptSource]:
    """Sources from lines of URI, suite, codename, origin and label, separated by `|`."""
    sources = []
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) == 5 and parts[0].startswith(("http://", "https://")):
            source = AptSource(parts[0].rstrip("/"), *parts[1:])
            if source not in sources:
                sources.append(source)
    return sources


def parse_apt_config(text: str) -> dict[str, str]:
    """`apt-config dump` as a mapping; a later value of a key wins, list items are left out."""
    found = re.findall(r'^([\w:./-]+) "(.*)";$', text, re.MULTILINE)
    return {key: value for key, value in found if not key.endswith("::")}


def parse_pip_config(text: str) -> dict[str, list[str]]:
    """`pip config list` as option -> values; :env: outranks [install], which outranks [global]."""
    rank = {"global": 0, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, list[str]]] = {}
    for line in text.splitlines():
        matched = re.fullmatch(r"(:env:|\w+)\.([\w-]+)=(['\"])(.*)\3", line.strip())
        if matched is None or matched[1] not in rank:
            continue
        option, level = matched[2], rank[matched[1]]
        if option not in found or found[option][0] <= level:
            found[option] = (level, matched[4].replace("\\n", "\n").split())
    return {option: values for option, (_, values) in found.items()}


def host_of(url: str) -> str | None:
    """host or host:port of an http(s) URL; None for every other kind (file, mirror+file, ssh…)."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    return f"{parts.hostname}:{parts.port}" if parts.port else parts.hostname


def debian_archives(sources: Iterable[AptSource]) -> tuple[str, str | None]:
    """URIs of the archive and of the security archive. Raises LabError when there is no Debian archive."""
    mirror = security = None
    for source in sources:
        if source.origin == "Debian" and source.label == "Debian":
            mirror = mirror or source.uri
        elif source.origin == "Debian" and source.label == "Debian-Security":
            security = security or source.uri
    if mirror is None:
        raise LabError(
            "apt knows no Debian archive on this machine, so no box can be made",
            "run apt-get update and look at `apt-cache policy`; the lab needs a Debian machine",
        )
    return mirror, security


def npmrc_registry(texts: Iterable[str]) -> str | None:
    """`registry=` of the first npmrc text that has one."""
    for text in texts:
        matched = re.search(r"^\s*registry\s*=\s*[\"']?(https?://\S+?)[\"']?\s*$", text, re.MULTILINE)
        if matched:
            return matched[1]
    return None


def npm_default(definitions: str) -> str | None:
    """The default of `registry` in the npm client's own source (definitions.js)."""
    matched = re.search(r"\bnew Definition\('registry', \{\s*default: '([^']+)'", definitions)
    return matched[1] if matched else None


def read_registries(environ: Mapping[str, str] = os.environ) -> Registries:
    """Ask apt, pip and npm. Raises LabError when there is no Debian archive among apt's sources."""
    fields = "$(REPO_URI)|$(SUITE)|$(CODENAME)|$(ORIGIN)|$(LABEL)"
    targets = execute.run(
        [execute.tool("apt-get"), "indextargets", "--format", fields, "Created-By: Packages"]
    )
    sources = parse_index_targets(targets.stdout)
    apt = parse_apt_config(execute.run([execute.tool("apt-config"), "dump"]).stdout)
    mirror, security = debian_archives(sources)
    pip_config = parse_pip_config(_pip("config", "list"))
    pip_urls = _web(pip_config.get("index-url", [])) or _pip_default()
    pip_urls += _web(pip_config.get("extra-index-url", []))
    npm_configured, npm_default = _npm(environ)
    urls = [source.uri for source in sources] + pip_urls + [npm_configured or npm_default or ""]
    hosts = [host for host in map(host_of, urls) if host] + environ.get(_EXTRA, "").split()
    return Registries(
        hosts=tuple(dict.fromkeys(hosts)),
        mirror=mirror,
        security=security,
        apt_options=tuple(
            (key, value)
            for key, value in sorted(apt.items())
            if key in ("Acquire::Check-Valid-Until", "Acquire::Check-Date") and value
        ),
        pip=tuple(_box_pip(pip_config)),
        npm=npm_configured,
        npm_known=bool(npm_configured or npm_default),
        upstream=upstream_proxies(urllib.request.getproxies(), apt),
    )


def upstream_proxies(environment: Mapping[str, str], apt: Mapping[str, str]) -> dict[str, str]:
    """The proxies this machine leaves through: those of the environment, else apt's."""
    found = {}
    for scheme in ("http", "https"):
        proxy = environment.get(scheme) or apt.get(f"Acquire::{scheme}::Proxy")
        if proxy and proxy != "DIRECT":
            found[scheme] = proxy
    if "https" not in found and apt.get("Acquire::http::Proxy", "DIRECT") != "DIRECT" and "http" in found:
        found["https"] = found["http"]
    return found


def _pip(*arguments: str) -> str:
    return execute.run([sys.executable, "-m", "pip", *arguments]).stdout


def _pip_default() -> list[str]:
    """pip's own defaults: an unconfigured pip is configured too, namely in its source."""
    code = (
        "from pip._internal.models.index import PyPI\n"
        "print(PyPI.simple_url, 'https://' + PyPI.file_storage_domain)"
    )
    return execute.run([sys.executable, "-c", code]).stdout.split()


def _box_pip(config: Mapping[str, list[str]]) -> Iterable[tuple[str, str]]:
    for option in ("index-url", "extra-index-url"):
        if urls := _web(config.get(option, [])):
            yield option, " ".join(urls)
    if "trusted-host" in config:
        yield "trusted-host", " ".join(config["trusted-host"])


def _npm(environ: Mapping[str, str]) -> tuple[str | None, str | None]:
    """The registry npm was told to use, and the one it uses untold (known only when npm is installed)."""
    home = Path(environ.get("HOME", "/root"))
    texts = [execute.read_text(path) for path in (home / ".npmrc", Path("/etc/npmrc"))]
    configured = environ.get("npm_config_registry") or npmrc_registry(texts)
    default = None
    with contextlib.suppress(LabError):
        default = execute.run([execute.tool("npm"), "config", "get", "registry"]).stdout.strip()
    if default and not configured and host_of(default) is None:
        default = None
    return configured, default


def _web(urls: Iterable[str]) -> list[str]:
    return [url for url in urls if host_of(url)]
