"""How this host's own clients reach the world: proxies, mirrors and certificates, for building an image.

On a company's network an image can only be built the way everything else is fetched there. The host already
knows how; the policy's ``build`` section overrides it field by field.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Protocol

from policy.aptfiles import Source, deb822_sources, one_line_sources, settings
from policy.clientfiles import docker_proxies, npmrc, pip_config
from policy.records import dataclass
from policy.schema import Build
from policy.urls import UrlError, is_loopback, is_no_proxy, redact, split_http

CA_DIRECTORY = "/usr/local/share/ca-certificates"
# The bundles that distributions ship: naming one of them adds nothing.
SYSTEM_BUNDLES = frozenset(
    {
        "/etc/ssl/certs/ca-certificates.crt",
        "/etc/ssl/cert.pem",
        "/etc/ssl/ca-bundle.pem",
        "/etc/pki/tls/certs/ca-bundle.crt",
        "/etc/pki/tls/cert.pem",
        "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
        "/usr/share/ca-certificates",
    }
)
CA_VARIABLES = (
    "NODE_EXTRA_CA_CERTS",
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "PIP_CERT",
    "GIT_SSL_CAINFO",
)
# apt settings that say what the mirror is like, and that an update in the image needs just as here.
APT_OPTIONS = {
    "acquire::check-valid-until": "Acquire::Check-Valid-Until",
    "acquire::check-date": "Acquire::Check-Date",
    "acquire::retries": "Acquire::Retries",
    "acquire::http::timeout": "Acquire::http::Timeout",
    "acquire::https::timeout": "Acquire::https::Timeout",
    "acquire::http::pipeline-depth": "Acquire::http::Pipeline-Depth",
}


_DEBIAN = re.compile(r"(?:.*/)?debian:([a-z]+)(?:-.*)?")
DEFAULT_SUITE = "bookworm"


class HostFiles(Protocol):
    """What is read of the host. Paths are absolute; no method raises."""

    def read(self, path: str) -> str | None:
        """Return the text of a file, or None when it is missing, unreadable or not text."""
        ...

    def names(self, directory: str) -> list[str]:
        """Return the names in a directory, sorted; nothing when there is none."""
        ...

    def resolve(self, path: str) -> str:
        """Return the path without symbolic links."""
        ...


class RealFiles:
    """The files of this host."""

    def read(self, path: str) -> str | None:
        """See HostFiles."""
        try:
            return Path(path).read_text(encoding="utf-8") if Path(path).is_file() else None
        except (OSError, ValueError):
            return None

    def names(self, directory: str) -> list[str]:
        """See HostFiles."""
        try:
            return sorted(entry.name for entry in Path(directory).iterdir())
        except (OSError, ValueError):
            return []

    def resolve(self, path: str) -> str:
        """See HostFiles."""
        return os.path.realpath(path)


@dataclass(frozen=True, repr=False)
class Proxies:
    """Proxy URLs; they may hold credentials, so ``repr`` shows them redacted."""

    http: str | None = None
    https: str | None = None
    no_proxy: str | None = None

    def variables(self) -> dict[str, str]:
        """Return the environment that programs look at, in both cases, because they do not agree on one."""
        named = {"http_proxy": self.http, "https_proxy": self.https, "no_proxy": self.no_proxy}
        return {key: value for name, value in named.items() if value for key in (name, name.upper())}

    def redacted(self) -> Proxies:
        """Return the same without credentials."""
        return Proxies(_redacted(self.http), _redacted(self.https), self.no_proxy)

    def __repr__(self) -> str:
        shown = self.redacted()
        return f"Proxies(http={shown.http!r}, https={shown.https!r}, no_proxy={shown.no_proxy!r})"


@dataclass(frozen=True, repr=False)
class BuildEnvironment:
    """How a build reaches the world. None or empty: nothing is set, the client's own default holds.

    Args:
        proxies: HTTP proxies.
        ca_files: absolute paths of PEM files; take only their certificates (`clientfiles.certificates`).
        npm_registry, pip_index, apt_mirror, apt_security_mirror: http(s) URLs without credentials.
        apt_proxy, apt_https_proxy: proxies that apt alone uses; may hold credentials.
        apt_options: (name, value) for apt.conf.
        notes: for people: what was found and not taken, and why. Hold no secret.
    """

    proxies: Proxies = Proxies()
    ca_files: tuple[str, ...] = ()
    npm_registry: str | None = None
    pip_index: str | None = None
    apt_mirror: str | None = None
    apt_security_mirror: str | None = None
    apt_proxy: str | None = None
    apt_https_proxy: str | None = None
    apt_options: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def redacted(self) -> BuildEnvironment:
        """Return the same without credentials, for display."""
        return replace(
            self,
            proxies=self.proxies.redacted(),
            apt_proxy=_redacted(self.apt_proxy),
            apt_https_proxy=_redacted(self.apt_https_proxy),
        )

    def __repr__(self) -> str:
        shown = self.redacted()
        fields = ", ".join(f"{name}={getattr(shown, name)!r}" for name in self.__dataclass_fields__)
        return f"BuildEnvironment({fields})"


def gather(
    home: Path, environ: Mapping[str, str], files: HostFiles, suite: str = "bookworm"
) -> BuildEnvironment:
    """Return what the host's clients are configured with.

    Args:
        home: home directory of the user.
        environ: the user's environment.
        files: the host's files.
        suite: Debian suite of the base image; a mirror of another distribution is of no use.
    """
    return _Gatherer(str(home), environ, files, suite).gather()


def merge(build: Build, host: BuildEnvironment) -> BuildEnvironment:
    """Return ``host`` with what the policy sets on top; an empty text in the policy means none at all.

    ``build.ca_certificates`` must be resolved (LoadedPolicy.policy.build has them so).
    """

    def pick(own: str | None, theirs: str | None) -> str | None:
        return theirs if own is None else own or None

    moved = build.apt_mirror is not None
    return replace(
        host,
        proxies=Proxies(
            pick(build.proxy.http, host.proxies.http),
            pick(build.proxy.https, host.proxies.https),
            pick(build.proxy.no_proxy, host.proxies.no_proxy),
        ),
        ca_files=tuple(dict.fromkeys((*build.ca_certificates, *host.ca_files))),
        npm_registry=pick(build.npm_registry, host.npm_registry),
        pip_index=pick(build.pip_index, host.pip_index),
        apt_mirror=pick(build.apt_mirror, host.apt_mirror),
        # The host's security mirror belongs to the host's mirror.
        apt_security_mirror=None if moved else host.apt_security_mirror,
    )


def suite_of(base_image: str) -> str:
    """Return the Debian suite that a base image's name tells."""
    match = _DEBIAN.fullmatch(base_image.partition("@")[0])
    return match.group(1) if match else DEFAULT_SUITE


def npm_settings(home: Path, environ: Mapping[str, str], files: HostFiles) -> dict[str, str]:
    """Return the settings of the host's npm, those of scopes too."""
    return _Gatherer(str(home), environ, files, "").npm()


def pip_settings(home: Path, environ: Mapping[str, str], files: HostFiles) -> dict[str, str]:
    """Return the settings of the host's pip; further indexes of the environment are not among them."""
    return _Gatherer(str(home), environ, files, "").pip()


def apt_sources(files: HostFiles) -> list[Source]:
    """Return the archives that the host's apt uses."""
    return _Gatherer("", {}, files, "").sources()


def _redacted(url: str | None) -> str | None:
    return None if url is None else redact(url)


@dataclass
class _Gatherer:
    home: str
    environ: Mapping[str, str]
    files: HostFiles
    suite: str
    notes: list[str] = field(default_factory=list)

    def gather(self) -> BuildEnvironment:
        npm, pip, apt = self.npm(), self.pip(), self.apt()
        mirror, security = self.mirrors()
        return BuildEnvironment(
            proxies=self.proxies(),
            ca_files=self.ca_files(
                (npm.get("cafile", ""), pip.get("cert", ""), apt.get("acquire::https::cainfo", ""))
            ),
            npm_registry=self.url(npm.get("registry"), "npm registry"),
            pip_index=self.url(pip.get("index-url"), "pip index"),
            apt_mirror=mirror,
            apt_security_mirror=security,
            apt_proxy=self.apt_proxy(apt, "http"),
            apt_https_proxy=self.apt_proxy(apt, "https"),
            apt_options=tuple(
                (name, apt[key])
                for key, name in APT_OPTIONS.items()
                if apt.get(key, "").replace(".", "").isalnum()
            ),
            notes=tuple(self.notes),
        )

    def url(self, text: str | None, what: str, *, credentials: bool = False) -> str | None:
        """Return a URL that can be used in a build, or None with a note."""
        if not text:
            return None
        try:
            split_http(text, credentials=credentials)
        except UrlError as error:
            self.notes.append(f"{what} of this host not taken: {error}")
            return None
        return text

    def proxies(self) -> Proxies:
        config = self.environ.get("DOCKER_CONFIG", "") or f"{self.home}/.docker"
        # What the user configured for containers outranks what they configured for themselves.
        found = docker_proxies(self.files.read(f"{config}/config.json") or "")
        for key, name in (("http", "http_proxy"), ("https", "https_proxy"), ("no_proxy", "no_proxy")):
            value = self.environ.get(name) or self.environ.get(name.upper()) or ""
            if value:
                found.setdefault(key, value)
        proxies = Proxies(
            self.proxy_url(found.get("http"), "HTTP proxy"),
            self.proxy_url(found.get("https"), "HTTPS proxy"),
            self.no_proxy(found.get("no_proxy")),
        )
        return proxies if proxies.http or proxies.https else Proxies()

    def proxy_url(self, text: str | None, what: str) -> str | None:
        if text and "://" not in text:
            text = f"http://{text}"
        url = self.url(text, what, credentials=True)
        if url and is_loopback(url):
            self.notes.append(f"{what} of this host is on a loopback address, which a build does not reach")
        return url

    def no_proxy(self, text: str | None) -> str | None:
        if text and not is_no_proxy(text):
            self.notes.append("no_proxy of this host not taken: a character that does not belong in it")
            return None
        return text or None

    def npm(self) -> dict[str, str]:
        """Return npm's settings: global file, user file, environment, each on top of the one before."""
        lowered = {
            key.lower(): value for key, value in self.environ.items() if key.lower().startswith("npm_config_")
        }
        user = lowered.get("npm_config_userconfig") or f"{self.home}/.npmrc"
        machine = lowered.get("npm_config_globalconfig")
        found: dict[str, str] = {}
        for path in (machine,) if machine else ("/etc/npmrc", "/usr/etc/npmrc", "/usr/local/etc/npmrc"):
            found |= npmrc(self.files.read(path) or "", self.environ)
        found |= npmrc(self.files.read(user) or "", self.environ)
        for key in ("registry", "cafile"):
            if lowered.get(f"npm_config_{key}"):
                found[key] = lowered[f"npm_config_{key}"]
        return found

    def pip(self) -> dict[str, str]:
        """Return pip's settings: machine, user, PIP_CONFIG_FILE, environment."""
        config = self.environ.get("XDG_CONFIG_HOME", "") or f"{self.home}/.config"
        own = self.environ.get("PIP_CONFIG_FILE", "")
        paths = [
            "/etc/xdg/pip/pip.conf",
            "/etc/pip.conf",
            f"{self.home}/.pip/pip.conf",
            f"{config}/pip/pip.conf",
            own,
        ]
        found: dict[str, str] = {}
        # PIP_CONFIG_FILE=/dev/null is pip's way to say: no configuration file at all.
        for path in paths if own != os.devnull else []:
            found |= pip_config(self.files.read(path) or "") if path else {}
        if self.environ.get("PIP_INDEX_URL"):
            found["index-url"] = self.environ["PIP_INDEX_URL"]
        extra = f"{found.get('extra-index-url', '')} {self.environ.get('PIP_EXTRA_INDEX_URL', '')}"
        if any(url.startswith(("http://", "https://")) for url in extra.split()):
            self.notes.append(
                "extra package indexes of this host's pip not taken; set build.pip_index if needed"
            )
        return found

    def ca_files(self, named: Iterable[str]) -> tuple[str, ...]:
        """Return the certificates an administrator added, then those that variables and settings name."""
        found = [f"{CA_DIRECTORY}/{name}" for name in self.files.names(CA_DIRECTORY) if name.endswith(".crt")]
        for path in (*(self.environ.get(variable, "") for variable in CA_VARIABLES), *named):
            if (
                not path.startswith("/")
                or path in SYSTEM_BUNDLES
                or self.files.resolve(path) in SYSTEM_BUNDLES
            ):
                continue
            if self.files.read(path) is None:
                self.notes.append(f"certificates in {path} not taken: the file cannot be read")
            else:
                found.append(path)
        return tuple(dict.fromkeys(found))

    def apt(self) -> dict[str, str]:
        """Return apt's settings in the order apt reads them: apt.conf.d, then apt.conf."""
        directory = "/etc/apt/apt.conf.d"
        # apt reads files without an extension and *.conf.
        names = [name for name in self.files.names(directory) if "." not in name or name.endswith(".conf")]
        found: dict[str, str] = {}
        for path in (*(f"{directory}/{name}" for name in names), "/etc/apt/apt.conf"):
            found |= settings(self.files.read(path) or "")
        return found

    def apt_proxy(self, apt: Mapping[str, str], scheme: str) -> str | None:
        value = apt.get(f"acquire::{scheme}::proxy", "")
        return None if value.upper() == "DIRECT" else self.proxy_url(value, f"apt's {scheme} proxy")

    def mirrors(self) -> tuple[str | None, str | None]:
        """Return the host's mirrors of the suite and of its security updates."""
        sources = [source for source in self.sources() if source.is_distribution]
        return (
            self.first(sources, lambda suite: suite == self.suite, "apt mirror"),
            self.first(sources, lambda suite: suite in self.security_suites(), "apt security mirror"),
        )

    def security_suites(self) -> tuple[str, str]:
        return f"{self.suite}-security", f"{self.suite}/updates"

    def first(self, sources: Iterable[Source], wanted: Callable[[str], bool], what: str) -> str | None:
        uris = (source.uri.rstrip("/") for source in sources if wanted(source.suite.rstrip("/")))
        return self.url(next(uris, None), what)

    def sources(self) -> list[Source]:
        directory = "/etc/apt/sources.list.d"
        found = list(one_line_sources(self.files.read("/etc/apt/sources.list") or ""))
        for name in self.files.names(directory):
            parse = {".list": one_line_sources, ".sources": deb822_sources}.get(os.path.splitext(name)[1])  # noqa: PTH122
            if parse is not None:
                found += parse(self.files.read(f"{directory}/{name}") or "")
        return found
