"""opencode: one self-contained binary from its platform package; no node in the image."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from policy.profiles.base import (
    Install,
    ManagedDir,
    NpmTarball,
    Profile,
    Switch,
    VerifyCheck,
)
from policy.profiles.config import Approval, ConfigFile, HarnessOptions

BINARY = "/usr/local/bin/opencode"
MANAGED_CONFIG = "/etc/opencode/opencode.json"
CONFIG_DIR = ".config/opencode"


class OpencodeOptions(HarnessOptions):
    """``from_host``: what of the user's own comes along; unless it is said, both, where there is something.

    "config" is the user's global configuration, read-only and as it is at each start; "login" copies the
    logins of providers into the sandbox, once.
    """

    from_host: Annotated[tuple[Literal["config", "login"], ...], Field(strict=False, max_length=2)] = (
        "config",
        "login",
    )


def _tarball(package: str) -> NpmTarball:
    return NpmTarball(package, (("package/bin/opencode", BINARY),))


def _asks(edit: str, leaving: str) -> Approval:
    """Left alone it allows most tools, and asks before it leaves the project."""
    tools: dict[str, JsonValue] = {
        "edit": edit,
        "bash": edit,
        "webfetch": edit,
        "external_directory": leaving,
    }
    return Approval(config=MappingProxyType({"permission": tools}), key="permission")


OPENCODE = Profile(
    name="opencode",
    title="OpenCode",
    install=Install(
        program=BINARY,
        tarballs=MappingProxyType(
            {
                "amd64": _tarball("opencode-linux-x64"),
                "amd64-baseline": _tarball("opencode-linux-x64-baseline"),
                "arm64": _tarball("opencode-linux-arm64"),
            }
        ),
    ),
    options=OpencodeOptions,
    interactive=(BINARY,),
    one_shot=(BINARY, "run"),
    resume=(BINARY, "--continue"),
    daemon=(BINARY, "--continue"),
    modes=frozenset({"run", "daemon"}),
    config=ConfigFile(
        MANAGED_CONFIG,
        "json",
        # A title costs a whole extra completion per session, on a model server that may serve one request at
        # a time.
        defaults=MappingProxyType({"agent": {"title": {"disable": True}}}),
        fixed=MappingProxyType({"autoupdate": False, "share": "disabled"}),
    ),
    approvals=MappingProxyType(
        {"ask": _asks("ask", "ask"), "auto": _asks("allow", "ask"), "off": _asks("allow", "allow")}
    ),
    switches=(
        Switch("OPENCODE_DISABLE_MODELS_FETCH", "1", "the model catalogue"),
        Switch("OPENCODE_DISABLE_AUTOUPDATE", "1", "the release feed"),
        Switch("OPENCODE_DISABLE_LSP_DOWNLOAD", "1", "downloads of language servers"),
        Switch("OPENCODE_DISABLE_SHARE", "1", "shared sessions"),
    ),
    ca_env=("NODE_EXTRA_CA_CERTS", "SSL_CERT_FILE"),
    proxy_env=("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY"),
    keys=("OPENROUTER_API_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY"),
    state_dirs=(".local/share/opencode", ".local/state/opencode", ".cache/opencode"),
    host_files=MappingProxyType({"login": ".local/share/opencode/auth.json"}),
    # opencode installs a plugin SDK from the registry into a configuration directory it can write, and dies
    # when it cannot create this file in one that is mounted read-only.
    managed_dirs=(ManagedDir(CONFIG_DIR, MappingProxyType({".gitignore": ""}), "config"),),
    owned_dirs=("/etc/opencode",),
    project_files=("opencode.json", "opencode.jsonc", ".opencode/"),
    # Without rg on PATH its search tools download one and then fail.
    debian_packages=("ca-certificates", "git", "ripgrep"),
    default_egress=("openrouter.ai", "api.openai.com", "api.anthropic.com"),
    verify=(
        VerifyCheck("root-owned", BINARY),
        VerifyCheck("root-owned", MANAGED_CONFIG),
        # The terminal interface unpacks shared objects there and maps them.
        VerifyCheck("exec-dir", "/tmp"),  # noqa: S108 - the path inside the container
        VerifyCheck("runs", BINARY),
    ),
)
