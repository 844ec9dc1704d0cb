from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy import aptfiles, clientfiles
from policy.hostclient import SYSTEM_BUNDLES, BuildEnvironment, Proxies, RealFiles, gather, merge
from policy.schema import Build
from policy.urls import UrlError, is_loopback, redact, split_http

HOME = "/home/zach"
MIRROR = "http://mirror.example.com/debian"


@dataclass
class FakeFiles:
    """Files by path; ``links`` by path too."""

    content: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def read(self, path: str) -> str | None:
        return self.content.get(path)

    def names(self, directory: str) -> list[str]:
        prefix = directory + "/"
        return sorted({p[len(prefix) :].split("/")[0] for p in self.content if p.startswith(prefix)})

    def resolve(self, path: str) -> str:
        return self.links.get(path, path)


def found(content: dict[str, str] | None = None, **environ: str) -> BuildEnvironment:
    return gather(Path(HOME), environ, FakeFiles(content or {}))


def test_host_without_any_configuration_gives_nothing() -> None:
    assert found() == BuildEnvironment()


# Proxies


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY"])
def test_proxy_is_taken_from_either_case(name: str) -> None:
    assert found(**{name: "http://proxy.example.com:3128"}).proxies.http == "http://proxy.example.com:3128"


def test_lower_case_wins_and_variables_come_in_both_cases() -> None:
    proxies = found(
        https_proxy="http://a.example.com:1",
        HTTPS_PROXY="http://b.example.com:2",
        NO_PROXY="localhost,.example.com",
    ).proxies
    assert proxies.variables() == {
        "https_proxy": "http://a.example.com:1",
        "HTTPS_PROXY": "http://a.example.com:1",
        "no_proxy": "localhost,.example.com",
        "NO_PROXY": "localhost,.example.com",
    }


def test_dockers_proxies_outrank_the_environment() -> None:
    config = {
        "proxies": {"default": {"httpProxy": "http://docker.example.com:1", "noProxy": "x.example.com"}}
    }
    for environ, path in (
        (({}, f"{HOME}/.docker/config.json")),
        ({"DOCKER_CONFIG": "/cfg"}, "/cfg/config.json"),
    ):
        proxies = found(
            {path: json.dumps(config)},
            http_proxy="http://env.example.com:2",
            https_proxy="http://env.example.com:3",
            no_proxy="y.example.com",
            **environ,
        ).proxies
        assert proxies == Proxies("http://docker.example.com:1", "http://env.example.com:3", "x.example.com")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"proxies": 3}',
        '{"proxies": {"default": []}}',
        '{"proxies": {"default": {"httpProxy": 3}}}',
    ],
)
def test_broken_docker_configuration_is_passed_over(text: str) -> None:
    assert found({f"{HOME}/.docker/config.json": text}) == BuildEnvironment()


def test_proxy_without_a_scheme_is_an_http_proxy() -> None:
    assert found(http_proxy="proxy.example.com:3128").proxies.http == "http://proxy.example.com:3128"


def test_no_proxy_alone_is_nothing() -> None:
    assert found(no_proxy="localhost").proxies == Proxies()


@pytest.mark.parametrize(
    "url", ["socks5://proxy.example.com:1080", "file:///proxy", "http://a b", 'http://x"y', "http://$(x)"]
)
def test_proxy_that_a_build_cannot_use_is_not_taken_and_noted(url: str) -> None:
    environment = found(http_proxy=url)
    assert environment.proxies == Proxies()
    assert "HTTP proxy of this host not taken" in environment.notes[0]


def test_no_proxy_with_odd_characters_is_not_taken() -> None:
    environment = found(http_proxy="http://proxy.example.com:1", no_proxy='x"\nRUN y')
    assert environment.proxies.no_proxy is None
    assert environment.notes


def test_proxy_on_loopback_is_noted() -> None:
    environment = found(http_proxy="http://127.0.0.1:3128")
    assert environment.proxies.http == "http://127.0.0.1:3128"
    assert "loopback" in environment.notes[0]


def test_credentials_of_a_proxy_are_never_shown() -> None:
    environment = found(
        {"/etc/apt/apt.conf": 'Acquire::http::Proxy "http://user:hidden@apt.example.com:1";'},
        http_proxy="http://user:hidden@proxy.example.com:3128",
        https_proxy="http://user:hid%40den@proxy.example.com:3128",
        npm_config_registry="https://user:hidden@npm.example.com/",
    )
    assert environment.proxies.http == "http://user:hidden@proxy.example.com:3128"
    assert environment.apt_proxy == "http://user:hidden@apt.example.com:1"
    for shown in (
        repr(environment),
        str(environment),
        repr(environment.proxies),
        repr(environment.redacted()),
        f"{environment}",
    ):
        assert "hid" not in shown
        assert "***@proxy.example.com:3128" in shown
    assert "hidden" not in "".join(environment.notes)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://u:p@h:1/x", "http://***@h:1/x"),
        ("http://u:p/w@h:1", "http://***@h:1"),
        ("http://u:p@w@h", "http://***@h"),
        ("u:p@h", "***@h"),
        ("http://h:1", "http://h:1"),
    ],
)
def test_redact(url: str, shown: str) -> None:
    assert redact(url) == shown


# npm and pip


def test_npm_registry_from_files_and_environment_in_order() -> None:
    files = {"/etc/npmrc": "registry=https://machine.example.com/\n"}
    assert found(files).npm_registry == "https://machine.example.com/"
    files[f"{HOME}/.npmrc"] = (
        '; comment\n# too\nregistry = "https://user.example.com/npm/"\n//user.example.com/:_authToken=x\n'
    )
    assert found(files).npm_registry == "https://user.example.com/npm/"
    assert (
        found(files, NPM_CONFIG_REGISTRY="https://env.example.com/").npm_registry
        == "https://env.example.com/"
    )
    moved = {"/cfg/rc": "registry=${SCHEME}://moved.example.com/\n", **files}
    assert (
        found(moved, npm_config_userconfig="/cfg/rc", SCHEME="https").npm_registry
        == "https://moved.example.com/"
    )


def test_npmrc_details() -> None:
    text = "a=1\nb = 'x y'\nc[]=1\nnot a setting\nd=${UNSET}\n[section]\ne=2\n"
    assert clientfiles.npmrc(text, {}) == {"a": "1", "b": "x y", "d": "${UNSET}"}


@pytest.mark.parametrize(
    "url", ["file:///srv/npm", "ftp://npm.example.com", "https://user:x@npm.example.com", "/srv/npm"]
)
def test_registry_that_an_image_cannot_use_is_not_taken(url: str) -> None:
    environment = found(npm_config_registry=url)
    assert environment.npm_registry is None
    assert "npm registry of this host not taken" in environment.notes[0]


def test_pip_index_from_files_and_environment_in_order() -> None:
    files = {"/etc/pip.conf": "[global]\nindex-url = https://machine.example.com/simple\n"}
    assert found(files).pip_index == "https://machine.example.com/simple"
    files[f"{HOME}/.config/pip/pip.conf"] = (
        "[global]\nindex_url = https://user.example.com/simple\n[install]\nindex-url=https://install.example.com/simple\n"
    )
    assert found(files).pip_index == "https://install.example.com/simple"
    files["/cfg/pip.conf"] = "[global]\nindex-url = https://own.example.com/simple\n"
    assert found(files, PIP_CONFIG_FILE="/cfg/pip.conf").pip_index == "https://own.example.com/simple"
    assert (
        found(files, PIP_INDEX_URL="https://env.example.com/simple").pip_index
        == "https://env.example.com/simple"
    )
    assert found(files, PIP_CONFIG_FILE="/dev/null").pip_index is None


def test_local_indexes_and_wheels_are_not_taken() -> None:
    text = "[global]\nfind-links = /opt/wheels\nindex-url = file:///srv/simple\nextra-index-url = file:///srv/more\n"
    environment = found({"/etc/pip.conf": text})
    assert environment.pip_index is None
    assert len(environment.notes) == 1
    assert "extra package indexes" in found(PIP_EXTRA_INDEX_URL="https://extra.example.com/simple").notes[0]


@pytest.mark.parametrize("text", ["", "no section\n", "[global\n", "[global]\nindex-url\n"])
def test_broken_pip_configuration_is_passed_over(text: str) -> None:
    assert found({"/etc/pip.conf": text}).pip_index is None


# apt


def test_mirror_of_the_suite_is_found_in_both_formats() -> None:
    one_line = (
        "# deb http://no.example.com/debian bookworm main\n"
        "deb-src http://src.example.com/debian bookworm main\n"
        "deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
        f" {MIRROR}/ bookworm main contrib\n"
        "deb\thttp://security.example.com/debian-security\tbookworm-security\tmain\n"
    )
    deb822 = (
        "# comment\nTypes: deb deb-src\nURIs: http://mirror.example.com/debian\n http://second.example.com/debian\n"
        "Suites: bookworm bookworm-updates\nComponents: main\n"
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n\n\n"
        "Types: deb\nURIs: http://security.example.com/debian-security/\n"
        "Suites: bookworm-security\nComponents: main\n"
    )
    for files in ({"/etc/apt/sources.list": one_line}, {"/etc/apt/sources.list.d/debian.sources": deb822}):
        environment = found(files)
        assert environment.apt_mirror == MIRROR
        assert environment.apt_security_mirror == "http://security.example.com/debian-security"


@pytest.mark.parametrize(
    "text",
    [
        "deb http://mirror.example.com/ubuntu jammy main\n",
        "deb http://mirror.example.com/debian trixie main\n",
        "deb https://vendor.example.com/linux/debian bookworm stable\n",
        "deb [signed-by=/etc/apt/keyrings/vendor.gpg] https://vendor.example.com/debian bookworm main\n",
        "deb file:///srv/debian bookworm main\n",
        "deb cdrom:[Debian]/ bookworm main\n",
        "deb mirror+file:/etc/apt/mirrors.txt bookworm main\n",
        "deb http://mirror.example.com\n",
        "deb\n",
        "deb [broken http://mirror.example.com/debian bookworm main\n",
    ],
)
def test_other_archives_are_no_mirror(text: str) -> None:
    assert found({"/etc/apt/sources.list": text}).apt_mirror is None


@pytest.mark.parametrize(
    "stanza",
    [
        "Enabled: no\nTypes: deb\nURIs: http://x.example.com/debian\nSuites: bookworm\nComponents: main\n",
        "Types: deb-src\nURIs: http://x.example.com/debian\nSuites: bookworm\nComponents: main\n",
        "Types: deb\nURIs: http://x.example.com/debian\nSuites: bookworm\nComponents: main\n"
        "Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n x\n",
        "Types: deb\nSuites: bookworm\nComponents: main\n",
        " continuation\nno colon\n",
    ],
)
def test_other_stanzas_are_no_mirror(stanza: str) -> None:
    assert found({"/etc/apt/sources.list.d/x.sources": stanza}).apt_mirror is None


def test_only_files_that_apt_reads_are_read() -> None:
    line = f"deb {MIRROR} bookworm main\n"
    assert found({"/etc/apt/sources.list.d/x.list.disabled": line}).apt_mirror is None
    assert found({"/etc/apt/sources.list.d/x.list": line}).apt_mirror == MIRROR
    proxy = 'Acquire::http::Proxy "http://proxy.example.com:1";'
    assert found({"/etc/apt/apt.conf.d/50proxy.dpkg-old": proxy}).apt_proxy is None
    assert found({"/etc/apt/apt.conf.d/50proxy": proxy}).apt_proxy == "http://proxy.example.com:1"


def test_suite_of_the_base_image_decides() -> None:
    files = FakeFiles({"/etc/apt/sources.list": "deb http://mirror.example.com/debian trixie main\n"})
    assert gather(Path(HOME), {}, files, suite="trixie").apt_mirror == MIRROR


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('Acquire::http::Proxy "http://p.example.com:1";', "http://p.example.com:1"),
        ('Acquire { http { Proxy "http://p.example.com:1"; }; };', "http://p.example.com:1"),
        ('Acquire::http { Proxy "http://p.example.com:1"; };', "http://p.example.com:1"),
        ('acquire { HTTP::proxy "http://p.example.com:1"; }', "http://p.example.com:1"),
        ("Acquire::http::Proxy http://p.example.com:1;", "http://p.example.com:1"),
        ('// Acquire::http::Proxy "http://p.example.com:1";', None),
        ('/* Acquire::http::Proxy "http://p.example.com:1"; */', None),
        ('# Acquire::http::Proxy "http://p.example.com:1";', None),
        ('Acquire::http::Proxy "DIRECT";', None),
        ('Acquire::http::Proxy::mirror.example.com "DIRECT";', None),
        ('Other { Acquire::http::Proxy "http://p.example.com:1"; };', None),
        ('Acquire::http::Proxy "http://p.example.com:1"', None),
        ('}}};Acquire::http::Proxy "http://p.example.com:1";', "http://p.example.com:1"),
        ('A { "x"; "y"; };Acquire::http::Proxy "http://p.example.com:1";', "http://p.example.com:1"),
    ],
)
def test_proxy_of_apt_is_found_in_every_spelling(text: str, expected: str | None) -> None:
    assert found({"/etc/apt/apt.conf.d/proxy": text}).apt_proxy == expected


def test_later_apt_file_wins_and_options_of_the_mirror_are_kept() -> None:
    environment = found(
        {
            "/etc/apt/apt.conf.d/10a": 'Acquire::https::Proxy "http://a.example.com:1";Acquire::Retries "5";',
            "/etc/apt/apt.conf.d/20b.conf": 'Acquire::https::Proxy "http://b.example.com:1";DPkg::P {"rm";};',
            "/etc/apt/apt.conf": 'Acquire::Check-Valid-Until "false"; Acquire::Check-Date "no; rm";',
        }
    )
    assert environment.apt_https_proxy == "http://b.example.com:1"
    assert environment.apt_options == (("Acquire::Check-Valid-Until", "false"), ("Acquire::Retries", "5"))


@given(st.text('{}";:/*#\n ab', max_size=80))
def test_any_apt_configuration_is_parsed(text: str) -> None:
    aptfiles.settings(text)
    list(aptfiles.one_line_sources("deb " + text))
    list(aptfiles.deb822_sources(text))


# Certificates


def test_certificates_an_administrator_added_and_those_that_variables_name() -> None:
    files = {
        "/usr/local/share/ca-certificates/b.crt": "x",
        "/usr/local/share/ca-certificates/a.crt": "x",
        "/usr/local/share/ca-certificates/README": "x",
        "/corp/ca.pem": "x",
        "/corp/npm.pem": "x",
        "/corp/pip.pem": "x",
        f"{HOME}/.npmrc": "cafile=/corp/npm.pem\n",
        "/etc/pip.conf": "[global]\ncert = /corp/pip.pem\n",
    }
    assert found(files, NODE_EXTRA_CA_CERTS="/corp/ca.pem", SSL_CERT_FILE="/corp/ca.pem").ca_files == (
        "/usr/local/share/ca-certificates/a.crt",
        "/usr/local/share/ca-certificates/b.crt",
        "/corp/ca.pem",
        "/corp/npm.pem",
        "/corp/pip.pem",
    )


@pytest.mark.parametrize(
    "variable", ["SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "PIP_CERT"]
)
@pytest.mark.parametrize("bundle", sorted(SYSTEM_BUNDLES))
def test_bundle_of_the_system_adds_nothing(variable: str, bundle: str) -> None:
    assert found({bundle: "x"}, **{variable: bundle}) == BuildEnvironment()


def test_link_to_the_bundle_of_the_system_adds_nothing() -> None:
    files = FakeFiles({"/corp/link.pem": "x"}, {"/corp/link.pem": "/etc/ssl/certs/ca-certificates.crt"})
    assert gather(Path(HOME), {"SSL_CERT_FILE": "/corp/link.pem"}, files).ca_files == ()


def test_missing_certificate_file_is_noted() -> None:
    environment = found(SSL_CERT_FILE="/corp/none.pem")
    assert environment.ca_files == ()
    assert "/corp/none.pem" in environment.notes[0]


def test_only_certificates_are_taken_out_of_a_pem_file() -> None:
    first = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"
    second = "-----BEGIN CERTIFICATE-----\r\nBBBB\r\n-----END CERTIFICATE-----"
    key = "-----BEGIN PRIVATE KEY-----\nhidden\n-----END PRIVATE KEY-----"
    broken = first.replace("AAAA", "not! base64")
    text = f"# issuer\n{first}\n{key}\n{second}\n{first}\n{broken}"
    assert clientfiles.certificates(text) == (first, second.replace("\r\n", "\n"))


# Merging


def host() -> BuildEnvironment:
    return BuildEnvironment(
        proxies=Proxies("http://host.example.com:1", "http://host.example.com:2", "host.example.com"),
        ca_files=("/host.crt", "/both.crt"),
        npm_registry="https://host.example.com/npm",
        pip_index="https://host.example.com/pip",
        apt_mirror="http://host.example.com/debian",
        apt_security_mirror="http://host.example.com/security",
        apt_options=(("Acquire::Retries", "3"),),
    )


def build(**fields: object) -> Build:
    return Build.model_validate(fields)


def test_policy_that_says_nothing_keeps_the_host() -> None:
    assert merge(build(), host()) == host()


def test_policy_overrides_field_by_field() -> None:
    merged = merge(
        build(
            proxy={"http": "http://policy.example.com:1"},
            ca_certificates=["/policy.crt", "/both.crt"],
            npm_registry="https://policy.example.com/npm",
            apt_mirror="http://policy.example.com/debian",
        ),
        host(),
    )
    assert merged.proxies == Proxies(
        "http://policy.example.com:1", "http://host.example.com:2", "host.example.com"
    )
    assert merged.ca_files == ("/policy.crt", "/both.crt", "/host.crt")
    assert merged.npm_registry == "https://policy.example.com/npm"
    assert merged.pip_index == "https://host.example.com/pip"
    assert merged.apt_mirror == "http://policy.example.com/debian"
    assert merged.apt_security_mirror is None
    assert merged.apt_options == host().apt_options


def test_empty_text_in_the_policy_means_none() -> None:
    merged = merge(
        build(proxy={"http": "", "https": "", "no_proxy": ""}, npm_registry="", apt_mirror=""), host()
    )
    assert merged.proxies == Proxies()
    assert merged.proxies.variables() == {}
    assert (merged.npm_registry, merged.apt_mirror, merged.apt_security_mirror) == (None, None, None)


# URLs and real files


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://:80",
        "http://h:0",
        "http://h:99999",
        "http://[::1",
        "file:///x",
        "x",
        "",
        "http://h/\n",
        "http://h/`x`",
        "http://h/" + "x" * 3000,
    ],
)
def test_url_that_is_refused(url: str) -> None:
    with pytest.raises(UrlError) as caught:
        split_http(url, credentials=True)
    assert not url or url not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:1", True),
        ("http://127.8.8.8", True),
        ("http://[::1]:1", True),
        ("http://localhost", True),
        ("http://x.localhost", True),
        ("http://proxy.example.com", False),
        ("http://[::1", False),
    ],
)
def test_is_loopback(url: str, expected: bool) -> None:
    assert is_loopback(url) is expected


def test_real_files(tmp_path: Path) -> None:
    files = RealFiles()
    (tmp_path / "text").write_text("x")
    (tmp_path / "binary").write_bytes(b"\xff")
    assert files.read(str(tmp_path / "text")) == "x"
    assert files.read(str(tmp_path / "binary")) is None
    assert files.read(str(tmp_path)) is None
    assert files.read(str(tmp_path / "none")) is None
    assert files.read("\0") is None
    assert files.names(str(tmp_path)) == ["binary", "text"]
    assert files.names(str(tmp_path / "none")) == []
