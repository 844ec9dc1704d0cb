"""Codex: static binaries from its platform package; no node in the image.

Its own sandbox is off: inside a container without capabilities and with Docker's seccomp profile it cannot
make the namespaces it is made of, and corral is the boundary.
"""

from __future__ import annotations

from types import MappingProxyType

from policy.container import HOME
from policy.profiles.base import (
    BakedFile,
    Install,
    NpmTarball,
    Profile,
    SeedFile,
    VerifyCheck,
)
from policy.profiles.config import Approval, ConfigFile, WiredOptions, Wiring

PROGRAM = "/usr/local/bin/codex"
DIRECTORY = "/usr/local/lib/codex"
BINARY = f"{DIRECTORY}/bin/codex"
MANAGED_CONFIG = "/etc/codex/managed_config.toml"
REQUIREMENTS = "/etc/codex/requirements.toml"
STATE = ".codex"
PROVIDER = "corral"

# Where nobody answers it says "waiting for network" and never ends, whatever its retries are set to. A server
# of one's own may want no key; the harness does.
LAUNCHER = f"""\
#!/usr/bin/python3 -IS
import http.client, os, ssl, sys, tomllib, urllib.parse

OPENAI = "api.openai.com"
PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")

with open("{MANAGED_CONFIG}", "rb") as file:
    config = tomllib.load(file)
provider = config.get("model_providers", {{}}).get(config.get("model_provider"), {{}})
url = urllib.parse.urlsplit(provider.get("base_url", ""))
if url.hostname and url.hostname != OPENAI and "env_key" in provider:
    os.environ.setdefault(provider["env_key"], "none")
if sys.argv[1:2] == ["exec"] and url.hostname and not any(map(os.environ.get, PROXIES)):
    # Only whether anybody answers: nothing is said that needs to be kept from whoever does.
    if url.scheme == "https":
        context = ssl._create_unverified_context()
        server = http.client.HTTPSConnection(url.netloc, timeout=20, context=context)
    else:
        server = http.client.HTTPConnection(url.netloc, timeout=20)
    try:
        server.request("HEAD", url.path or "/")
        server.getresponse()
    except (OSError, http.client.HTTPException) as error:
        sys.exit(f"codex: the model's server {{url.netloc}} does not answer: {{error}}")
    server.close()
os.execv("{BINARY}", ["{PROGRAM}", *sys.argv[1:]])
"""


def _tarball(variant: str, triple: str) -> NpmTarball:
    # Beside these it holds a host for voice, with libraries of 45 MB.
    below = f"package/vendor/{triple}"
    parts = ("bin/", "codex-path/", "codex-resources/bwrap", "codex-package.json")
    return NpmTarball(
        "@openai/codex", tuple((f"{below}/{part}", f"{DIRECTORY}/{part}") for part in parts), variant
    )


def _asks(policy: str) -> Approval:
    return Approval(MappingProxyType({"approval_policy": policy}), "approval_policy")


CODEX = Profile(
    name="codex",
    title="Codex",
    install=Install(
        program=PROGRAM,
        tarballs=MappingProxyType(
            {
                "amd64": _tarball("-linux-x64", "x86_64-unknown-linux-musl"),
                "arm64": _tarball("-linux-arm64", "aarch64-unknown-linux-musl"),
            }
        ),
    ),
    interactive=(PROGRAM,),
    one_shot=(PROGRAM, "exec", "--skip-git-repo-check"),
    prompted=(PROGRAM,),
    resume=(PROGRAM, "resume", "--last"),
    daemon=(PROGRAM, "resume", "--last"),
    modes=frozenset({"run", "daemon"}),
    options=WiredOptions,
    config=ConfigFile(
        MANAGED_CONFIG,
        "toml",
        defaults=MappingProxyType(
            {
                # Its provider "openai" asks for a login and tries a WebSocket six times first.
                "model_provider": PROVIDER,
                "model_providers": {
                    PROVIDER: {
                        "name": "OpenAI",
                        "base_url": "https://api.openai.com/v1",
                        "wire_api": "responses",
                        "env_key": "OPENAI_API_KEY",
                        "request_max_retries": 3,
                        "stream_max_retries": 3,
                    }
                },
                "features": {"apps": False, "plugins": False},
            }
        ),
        fixed=MappingProxyType(
            {
                "sandbox_mode": "danger-full-access",
                "check_for_update_on_startup": False,
                "features": {"daemon_auto_start": False},
                "analytics": {"enabled": False},
                "feedback": {"enabled": False},
            }
        ),
    ),
    endpoint=Wiring(
        "base_url",
        config=MappingProxyType(
            {"model_providers": {PROVIDER: {"name": "a model server", "base_url": "{base_url}"}}}
        ),
    ),
    model=Wiring("model", config=MappingProxyType({"model": "{model}"})),
    # Nothing is "ask": its questions are about leaving its own sandbox, which is off, and "untrusted",
    # about each command, is no longer supported.
    approvals=MappingProxyType({"auto": _asks("on-request"), "off": _asks("never")}),
    ca_env=("CODEX_CA_CERTIFICATE", "SSL_CERT_FILE"),
    proxy_env=("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY"),
    keys=("OPENAI_API_KEY",),
    state_dirs=(STATE,),
    seeds=(
        SeedFile(
            f"{STATE}/config.toml",
            "\n".join(f'[projects."{place}"]\ntrust_level = "trusted"\n' for place in ("{project}", HOME)),
        ),
    ),
    baked=(BakedFile(PROGRAM, LAUNCHER, 0o755),),
    owned_dirs=("/etc/codex",),
    project_files=(".codex/config.toml",),
    debian_packages=("ca-certificates", "git"),
    default_egress=("api.openai.com",),
    contacts=MappingProxyType({"raw.githubusercontent.com": "its terminal interface, once per start"}),
    verify=(
        VerifyCheck("root-owned", PROGRAM),
        VerifyCheck("root-owned", BINARY),
        VerifyCheck("root-owned", MANAGED_CONFIG),
        VerifyCheck("runs", PROGRAM),
    ),
)
