"""Gemini CLI: JavaScript in one tarball, with node of the npm client's wheel beside it, off PATH."""

from __future__ import annotations

import json
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

PROGRAM = "/usr/local/bin/gemini"
DIRECTORY = "/usr/local/lib/gemini"
NODE = f"{DIRECTORY}/node"
SETTINGS = "/etc/gemini-cli/settings.json"
STATE = ".gemini"

# A server of one's own may want no key; the harness does.
LAUNCHER = f"""\
#!/bin/sh
if [ -n "${{GOOGLE_GEMINI_BASE_URL:-}}" ] && [ -z "${{GEMINI_API_KEY:-}}" ]; then
    export GEMINI_API_KEY=none
fi
exec {NODE} {DIRECTORY}/bundle/gemini.js "$@"
"""

_TARBALL = NpmTarball("@google/gemini-cli", (("package/bundle/", f"{DIRECTORY}/bundle/"),))

GEMINI = Profile(
    name="gemini",
    title="Gemini CLI",
    install=Install(
        program=PROGRAM,
        tarballs=MappingProxyType({"amd64": _TARBALL, "arm64": _TARBALL}),
        node=NODE,
    ),
    interactive=(PROGRAM,),
    one_shot=(PROGRAM, "--prompt="),
    prompted=(PROGRAM, "--prompt-interactive="),
    resume=(PROGRAM, "--resume", "latest"),
    daemon=(PROGRAM, "--resume", "latest"),
    modes=frozenset({"run", "daemon"}),
    options=WiredOptions,
    config=ConfigFile(
        SETTINGS,
        "json",
        defaults=MappingProxyType(
            {
                "security": {"auth": {"selectedType": "gemini-api-key"}},
                # Ten, its own, are minutes of silence when nobody answers.
                "general": {"maxAttempts": 4},
            }
        ),
        fixed=MappingProxyType(
            {
                "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
                "privacy": {"usageStatisticsEnabled": False},
                "telemetry": {"enabled": False},
            }
        ),
    ),
    endpoint=Wiring("base_url", env=MappingProxyType({"GOOGLE_GEMINI_BASE_URL": "{base_url}"})),
    model=Wiring("model", env=MappingProxyType({"GEMINI_MODEL": "{model}"})),
    # The mode without questions can only be had in so many words.
    approvals=MappingProxyType(
        {
            "ask": Approval(argv=("--approval-mode=default",)),
            "auto": Approval(argv=("--approval-mode=auto_edit",)),
            "off": Approval(argv=("--approval-mode=yolo",)),
        }
    ),
    fixed=MappingProxyType({"GEMINI_CLI_SYSTEM_SETTINGS_PATH": SETTINGS}),
    ca_env=("NODE_EXTRA_CA_CERTS",),
    proxy_env=("HTTPS_PROXY", "HTTP_PROXY"),
    keys=("GEMINI_API_KEY",),
    state_dirs=(STATE,),
    seeds=(
        SeedFile(
            f"{STATE}/trustedFolders.json",
            json.dumps({"{project}": "TRUST_FOLDER", HOME: "TRUST_FOLDER"}, indent=2) + "\n",
        ),
    ),
    baked=(BakedFile(PROGRAM, LAUNCHER, 0o755),),
    owned_dirs=("/etc/gemini-cli",),
    project_files=(".gemini/settings.json", ".gemini/.env"),
    debian_packages=("ca-certificates", "git", "ripgrep"),
    default_egress=("generativelanguage.googleapis.com",),
    verify=(
        VerifyCheck("root-owned", PROGRAM),
        VerifyCheck("root-owned", NODE),
        VerifyCheck("root-owned", SETTINGS),
        VerifyCheck("runs", PROGRAM),
    ),
)
