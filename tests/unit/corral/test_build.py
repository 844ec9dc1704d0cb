from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_image import builder
from agent_image.builder import Built
from corral import build as module
from corral import state
from corral.build import build_proxies, image_spec, read_certificates, suite_of
from corral.context import Invocation
from policy.errors import PolicyError
from policy.hostclient import BuildEnvironment, Proxies
from policy.hostnames import FromHost
from policy.loader import LoadedPolicy

PEM = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize(
    ("image", "suite"),
    [
        ("debian:bookworm-slim", "bookworm"),
        ("debian:trixie", "trixie"),
        ("registry.example:5000/library/debian:trixie-slim", "trixie"),
        ("debian:trixie@sha256:" + "0" * 64, "trixie"),
        ("example/base:1.2", "bookworm"),
    ],
)
def test_the_suite_is_read_off_the_base_image(image: str, suite: str) -> None:
    assert suite_of(image) == suite


def test_profile_policy_and_host_meet_in_the_image(loaded: LoadedPolicy) -> None:
    host = BuildEnvironment(
        apt_mirror="https://mirror.example/debian",
        npm_registry="https://npm.example",
        pip_index="https://pip.example/simple",
    )
    spec = image_spec(loaded, uid=1000, gid=1001, architecture="amd64", host=host, certificates=[b"pem"])
    assert (spec.uid, spec.gid, spec.harness) == (1000, 1001, "opencode")
    assert spec.base == loaded.policy.build.base_image
    assert set(spec.packages) >= {"git", "ripgrep"}
    assert {file.path for file in spec.baked_files} >= {"/etc/opencode/opencode.json"}
    assert spec.apt_mirror == "https://mirror.example/debian"
    assert (spec.npm_registry, spec.pip_index) == ("https://npm.example", "https://pip.example/simple")
    assert spec.ca_certificates == (b"pem",)


def test_root_gets_no_image(loaded: LoadedPolicy) -> None:
    with pytest.raises(PolicyError, match="root"):
        image_spec(loaded, uid=0, gid=0, architecture="amd64", host=BuildEnvironment(), certificates=())


def test_only_certificates_are_taken_from_a_ca_file(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text(
        f"# ours\n{PEM}-----BEGIN PRIVATE KEY-----\nKEY\n-----END PRIVATE KEY-----\n{PEM.replace('AAAA', 'BBBB')}"
    )
    found = b"".join(read_certificates([str(file)]))
    assert found.count(b"BEGIN CERTIFICATE") == 2
    assert b"KEY" not in found
    with pytest.raises(PolicyError, match="cannot read the CA certificates"):
        read_certificates([str(tmp_path / "none")])


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, invocation: Invocation) -> list[dict[str, Any]]:
    """Calls of the builder, which finds the image up to date unless forced."""
    calls: list[dict[str, Any]] = []

    def build(spec: Any, **options: Any) -> Built:
        calls.append({"spec": spec, **options})
        return Built("sha256:0123456789abcdef", "sha256:1", "buildkit" if options["force"] else None)

    monkeypatch.setattr(builder, "build", build)
    monkeypatch.setattr(invocation.api, "version", lambda: {"Arch": "amd64"}, raising=False)
    monkeypatch.setattr(
        module, "gather", lambda *_: BuildEnvironment(Proxies(http="http://u:p@proxy.example:1"))
    )
    invocation.__dict__["user"] = replace(invocation.user, uid=1000, gid=1000)
    return calls


def test_proxies_reach_the_build_as_arguments_and_not_the_image(
    invocation: Invocation, built: list[dict[str, Any]]
) -> None:
    assert module.build(invocation, force=False) == (
        f"{invocation.loaded.sandbox.image} is up to date (0123456789ab)"
    )
    (call,) = built
    assert call["proxies"] == {
        "http_proxy": "http://u:p@proxy.example:1",
        "HTTP_PROXY": "http://u:p@proxy.example:1",
    }
    assert "proxy.example" not in repr(call["spec"])
    assert call["engine"] == "unix:///var/run/docker.sock"
    assert call["directory"] == invocation.paths.build
    assert call["log"].parent == invocation.paths.root
    assert invocation.paths.root.is_dir()


def test_what_from_host_did_not_find_is_told(
    invocation: Invocation, built: list[dict[str, Any]], said: io.StringIO
) -> None:
    loaded = replace(invocation.loaded, from_host=FromHost(notes=("npm: this host configures none",)))
    invocation.__dict__["loaded"] = invocation.__dict__["approved"] = loaded
    module.build(invocation, force=False)
    assert "warning: egress.from_host: npm: this host configures none" in said.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_first_build_is_announced_at_a_terminal_and_a_proxy_it_cannot_use_is_everywhere(
    terminal: bool,
    invocation: Invocation,
    built: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    said: io.StringIO,
) -> None:
    proxies = Proxies(http="http://u:p@127.0.0.1:3128", https="http://proxy.example:1")
    monkeypatch.setattr(module, "gather", lambda *_: BuildEnvironment(proxies))
    invocation.console.progress = terminal
    said.truncate(0)
    module.build(invocation, force=False)
    said.truncate(0)
    said.seek(0)
    assert said.getvalue() == ""
    (call,) = built
    for line in ("step 1", "step 2"):
        call["progress"](line)
    *announced, warning = said.getvalue().splitlines()
    assert len(announced) == terminal
    assert all(line.startswith("corral: building the image of demo-") for line in announced)
    assert "the build cannot use the http proxy http://***@127.0.0.1:3128" in warning
    assert "build.proxy.http" in warning


def test_the_image_s_sandbox_remembers_its_project(
    invocation: Invocation, built: list[dict[str, Any]]
) -> None:
    module.build(invocation, force=False)
    found = state.sandboxes_of(invocation.data, invocation.loaded.project)
    assert found == [invocation.loaded.sandbox.id]


def test_the_policy_s_own_mirror_wins(
    invocation: Invocation, built: list[dict[str, Any]], loaded_of: Callable[[str], LoadedPolicy]
) -> None:
    invocation.__dict__["loaded"] = invocation.__dict__["approved"] = loaded_of(
        "profile: opencode\nname: demo\nbuild: {npm_registry: https://npm.example, proxy: {http: ''}}\n"
    )
    assert module.build(invocation, force=True).endswith("built (0123456789ab)")
    (call,) = built
    assert call["spec"].npm_registry == "https://npm.example"
    assert call["proxies"] == {}


def test_a_proxy_that_only_apt_conf_names_serves_the_whole_build() -> None:
    apt = BuildEnvironment(
        apt_proxy="http://apt.example.com:3128", apt_https_proxy="http://apt.example.com:3129"
    )
    assert build_proxies(apt) == Proxies("http://apt.example.com:3128", "http://apt.example.com:3129", None)
    own = replace(apt, proxies=Proxies("http://own.example.com:3128", None, "localhost"))
    assert build_proxies(own) == Proxies(
        "http://own.example.com:3128", "http://apt.example.com:3129", "localhost"
    )


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse2 avx\n", True),
        ("processor\t: 0\nflags\t\t: fpu sse2 avx avx2\nflags\t: fpu\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False),
        ("", False),
    ],
    ids=["old", "new", "arm", "unknown"],
)
def test_a_processor_without_avx2_is_known_by_its_flags(cpuinfo: str, expected: bool) -> None:
    assert module.without_avx2(cpuinfo) is expected
