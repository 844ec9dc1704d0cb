"""aider: Python packages, for the Python of Debian 12; it edits files itself and has no tools."""

from __future__ import annotations

from types import MappingProxyType

from policy.profiles.base import BakedFile, Install, Profile, Switch, VerifyCheck
from policy.profiles.config import Approval, WiredOptions, Wiring

PROGRAM = "/usr/local/bin/aider"
DIRECTORY = "/usr/local/lib/aider"

# A server of one's own may want no key; the harness does.
LAUNCHER = f"""\
#!/usr/bin/python3 -I
import os, sys

if os.environ.get("OPENAI_API_BASE"):
    os.environ.setdefault("OPENAI_API_KEY", "none")
sys.path.insert(0, "{DIRECTORY}")
from aider.main import main

sys.exit(main())
"""


def _asks(yes: str) -> Approval:
    return Approval(env=MappingProxyType({"AIDER_YES_ALWAYS": yes}))


AIDER = Profile(
    name="aider",
    title="aider",
    install=Install(program=PROGRAM, python="aider-chat", directory=DIRECTORY),
    interactive=(PROGRAM,),
    one_shot=(PROGRAM, "--message="),
    resume=(PROGRAM, "--restore-chat-history"),
    options=WiredOptions,
    endpoint=Wiring("base_url", env=MappingProxyType({"OPENAI_API_BASE": "{base_url}"})),
    model=Wiring("model", env=MappingProxyType({"AIDER_MODEL": "{model}"})),
    # It edits without a question; what it asks about is everything else.
    approvals=MappingProxyType({"ask": _asks("false"), "auto": _asks("false"), "off": _asks("true")}),
    switches=(
        Switch("AIDER_ANALYTICS_DISABLE", "true", "analytics"),
        Switch("AIDER_CHECK_UPDATE", "false", "the release feed"),
        Switch("AIDER_SHOW_RELEASE_NOTES", "false", "release notes"),
        Switch("AIDER_SHOW_MODEL_WARNINGS", "false", "a page about models it does not know"),
        Switch("LITELLM_LOCAL_MODEL_COST_MAP", "True", "the price list of its model library"),
    ),
    ca_env=("SSL_CERT_FILE",),
    proxy_env=("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY"),
    keys=("OPENAI_API_KEY", "ANTHROPIC_API_KEY"),
    state_dirs=(".aider",),
    baked=(BakedFile(PROGRAM, LAUNCHER, 0o755),),
    project_files=(".aider.conf.yml", ".aider.model.settings.yml"),
    debian_packages=("ca-certificates", "git"),
    default_egress=("api.openai.com", "api.anthropic.com"),
    contacts=MappingProxyType(
        {"raw.githubusercontent.com": "its own price list, for a model that its library does not know"}
    ),
    verify=(
        VerifyCheck("root-owned", PROGRAM),
        VerifyCheck("root-owned", f"{DIRECTORY}/aider/main.py"),
        VerifyCheck("runs", PROGRAM),
    ),
)
