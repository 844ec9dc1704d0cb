"""Claude Code: one self-contained binary from its platform package; no node in the image."""

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
    Switch,
    VerifyCheck,
)
from policy.profiles.config import Approval, ConfigFile, WiredOptions, Wiring

PROGRAM = "/usr/local/bin/claude"
BINARY = "/usr/local/lib/claude/claude"
MANAGED_SETTINGS = "/etc/claude-code/managed-settings.json"
STATE = ".claude"

# A key in the environment that nobody approved costs a dialog, and an approval would keep a part of the key
# on disk. A helper that prints it needs none. A server of one's own may want no credential; the harness does.
#
# --bg leaves the work to a service and ends. As a session's first program that is the end of the container,
# service and work included, so there it becomes the session itself, where it has a terminal: corral is what
# leaves it and comes back.
LAUNCHER = f"""\
#!/bin/sh
if [ "$PPID" = 1 ]; then
    background=
    for word do
        shift
        case "$word" in
            --bg | --background) background=1 ;;
            *) set -- "$@" "$word" ;;
        esac
    done
    if [ -n "$background" ] && ! [ -t 0 ]; then
        echo "corral: claude --bg would end with this container, because it is the first program in it" >&2
        echo "corral: corral run --detach -- claude PROMPT goes on, and corral attach comes back" >&2
        exit 1
    fi
fi
if [ -n "${{ANTHROPIC_API_KEY:-}}" ]; then
    export CORRAL_API_KEY="$ANTHROPIC_API_KEY"
    unset ANTHROPIC_API_KEY
fi
if [ -n "${{CORRAL_API_KEY:-}}" ]; then
    set -- --settings '{{"apiKeyHelper":"printenv CORRAL_API_KEY"}}' "$@"
elif [ -z "${{ANTHROPIC_AUTH_TOKEN:-}}${{CLAUDE_CODE_OAUTH_TOKEN:-}}" ] &&
    grep -q ANTHROPIC_BASE_URL {MANAGED_SETTINGS}; then
    export ANTHROPIC_AUTH_TOKEN=none
fi
exec {BINARY} "$@"
"""

# Where nothing was said yet there is nothing to continue, and it ends. It names a directory's conversations
# by its path.
ALWAYS = (
    f'ls "$CLAUDE_CONFIG_DIR"/projects/{HOME.replace("/", "-")}/*.jsonl >/dev/null 2>&1 && '
    f"exec {PROGRAM} --continue; exec {PROGRAM}"
)


def _tarball(package: str) -> NpmTarball:
    return NpmTarball(package, (("package/claude", BINARY),))


def _onboarded(*projects: str) -> str:
    """Return the state of somebody who answered every question of the first start."""
    trusted = {"hasTrustDialogAccepted": True, "hasCompletedProjectOnboarding": True}
    body = {
        "hasCompletedOnboarding": True,
        "officialMarketplaceAutoInstallAttempted": True,
        "projects": dict.fromkeys(projects, trusted),
    }
    return json.dumps(body, indent=2) + "\n"


CLAUDE = Profile(
    name="claude",
    title="Claude Code",
    install=Install(
        program=PROGRAM,
        tarballs=MappingProxyType(
            {
                "amd64": _tarball("@anthropic-ai/claude-code-linux-x64"),
                "arm64": _tarball("@anthropic-ai/claude-code-linux-arm64"),
            }
        ),
    ),
    interactive=(PROGRAM,),
    one_shot=(PROGRAM, "--print"),
    prompted=(PROGRAM,),
    resume=(PROGRAM, "--continue"),
    daemon=("/bin/sh", "-c", ALWAYS),
    modes=frozenset({"run", "daemon"}),
    options=WiredOptions,
    config=ConfigFile(
        MANAGED_SETTINGS,
        "json",
        # Without it each fetch of a page asks api.anthropic.com about its domain first.
        defaults=MappingProxyType({"skipWebFetchPreflight": True}),
    ),
    endpoint=Wiring(
        "base_url",
        config=MappingProxyType(
            {"env": {"ANTHROPIC_BASE_URL": "{base_url}", "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}"}}
        ),
    ),
    model=Wiring("model", config=MappingProxyType({"model": "{model}"})),
    approvals=MappingProxyType(
        {
            "ask": Approval(
                MappingProxyType(
                    {"permissions": {"defaultMode": "default", "disableBypassPermissionsMode": "disable"}}
                ),
                "permissions.defaultMode",
            ),
            "auto": Approval(
                MappingProxyType(
                    {
                        "permissions": {
                            "defaultMode": "acceptEdits",
                            "disableBypassPermissionsMode": "disable",
                            "allow": ["Bash", "WebFetch"],
                        }
                    }
                ),
                "permissions.defaultMode",
            ),
            "off": Approval(
                MappingProxyType({"permissions": {"defaultMode": "bypassPermissions"}}),
                "permissions.defaultMode",
            ),
        }
    ),
    fixed=MappingProxyType(
        {
            # Moves .claude.json, which is replaced by renaming, into the directory that stays.
            "CLAUDE_CONFIG_DIR": f"{HOME}/{STATE}",
            # Ten, its own, are minutes of silence when a key is wrong or nobody answers.
            "CLAUDE_CODE_MAX_RETRIES": "4",
        }
    ),
    switches=(
        Switch("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1", "whatever is not the model"),
        Switch("CLAUDE_CODE_DISABLE_OFFICIAL_MARKETPLACE_AUTOINSTALL", "1", "the market of plugins"),
        Switch("CLAUDE_CODE_DISABLE_FEEDBACK_SURVEY", "1", "surveys"),
        Switch("DISABLE_AUTOUPDATER", "1", "the release feed"),
        Switch("DISABLE_ERROR_REPORTING", "1", "reports of errors"),
        Switch("DISABLE_INSTALLATION_CHECKS", "1", "advice about how it is installed"),
        Switch("DISABLE_TELEMETRY", "1", "telemetry"),
    ),
    ca_env=("NODE_EXTRA_CA_CERTS", "SSL_CERT_FILE"),
    proxy_env=("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY"),
    keys=("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN"),
    state_dirs=(STATE,),
    seeds=(
        SeedFile(f"{STATE}/.claude.json", _onboarded("{project}", HOME)),
        SeedFile(
            f"{STATE}/settings.json",
            json.dumps({"theme": "dark", "skipDangerousModePermissionPrompt": True}) + "\n",
        ),
    ),
    baked=(BakedFile(PROGRAM, LAUNCHER, 0o755),),
    owned_dirs=("/etc/claude-code",),
    project_files=(".claude/settings.json", ".claude/settings.local.json", ".mcp.json"),
    debian_packages=("ca-certificates", "git"),
    default_egress=("api.anthropic.com",),
    verify=(
        VerifyCheck("root-owned", PROGRAM),
        VerifyCheck("root-owned", BINARY),
        VerifyCheck("root-owned", MANAGED_SETTINGS),
        VerifyCheck("runs", PROGRAM),
    ),
)
