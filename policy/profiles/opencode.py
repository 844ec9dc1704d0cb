"""opencode: one self-contained binary from its platform package; no node in the image."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic import Field, JsonValue, field_validator
from pydantic_core import PydanticCustomError

from policy.profiles.base import BakedFile, ManagedDir, NpmTarball, Profile, ProfileOptions, VerifyCheck

BINARY = "/usr/local/bin/opencode"
MANAGED_CONFIG = "/etc/opencode/opencode.json"
CONFIG_DIR = ".config/opencode"

# Settings that follow from how corral runs the harness; a policy cannot set them otherwise.
FIXED: Mapping[str, JsonValue] = MappingProxyType({"autoupdate": False, "share": "disabled"})
# A title costs a whole extra completion per session, on a model server that may serve one request at a time.
DEFAULTS: Mapping[str, JsonValue] = MappingProxyType({"agent": {"title": {"disable": True}}})

_SECRET_KEYS = frozenset({"apikey", "api_key", "token", "authorization", "x-api-key", "password", "secret"})
MAX_CONFIG = 32768
# ``approvals`` in opencode's words. Left alone it allows most tools, and asks before it leaves the project.
APPROVALS: Mapping[str, Mapping[str, JsonValue]] = MappingProxyType(
    {
        "ask": {"edit": "ask", "bash": "ask", "webfetch": "ask", "external_directory": "ask"},
        "auto": {"edit": "allow", "bash": "allow", "webfetch": "allow", "external_directory": "ask"},
        "off": {"edit": "allow", "bash": "allow", "webfetch": "allow", "external_directory": "allow"},
    }
)


class OpencodeOptions(ProfileOptions):
    """``config`` is opencode's own configuration. It is baked root-owned and outranks the project's files."""

    config: dict[str, JsonValue] = Field(default_factory=dict)

    @field_validator("config")
    @classmethod
    def _check_config(cls, config: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for key in FIXED:
            if key in config:
                raise _problem(f"{key} is set by corral", f"remove {key}")
        for key, value in _strings(config):
            if key.lower() in _SECRET_KEYS and "{env:" not in value and "{file:" not in value:
                raise _problem(
                    f"a literal {key} would be stored in the image",
                    f'write {key}: "{{env:NAME}}" and NAME=... into the file of secrets.env_file',
                )
        try:
            text = json.dumps(config, allow_nan=False)
        except ValueError as error:
            raise _problem("a number that JSON cannot hold (.inf or .nan)", "remove it") from error
        if len(text) > MAX_CONFIG:
            raise _problem(f"longer than {MAX_CONFIG} characters as JSON", "shorten it")
        return config


@dataclass(frozen=True)
class Opencode(Profile):
    """The opencode profile."""

    def with_approvals(self, options: ProfileOptions, approvals: str) -> ProfileOptions:
        """See Profile."""
        assert isinstance(options, OpencodeOptions)  # noqa: S101 - for the type checker
        if "permission" in options.config:
            raise ValueError("profile_options.opencode.config has a permission of its own")
        config = {**options.config, "permission": dict(APPROVALS[approvals])}
        return options.model_copy(update={"config": config})

    def baked_files(self, options: ProfileOptions) -> tuple[BakedFile, ...]:
        """Return the managed configuration."""
        config = options.config if isinstance(options, OpencodeOptions) else {}
        merged = _merge(_merge(dict(DEFAULTS), config), dict(FIXED))
        text = json.dumps(merged, indent=2, sort_keys=True, ensure_ascii=True) + "\n"
        return (BakedFile(MANAGED_CONFIG, text),)


def _problem(what: str, fix: str) -> PydanticCustomError:
    return PydanticCustomError("corral", "{what}", {"what": what, "fix": fix})


def _strings(value: JsonValue, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text in a JSON value with the mapping key it stands under."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item, key)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _strings(item, name)


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``over`` on top, mapping by mapping."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        merged[key] = _merge(below, value) if both and isinstance(below, dict) else value
    return merged


OPENCODE = Opencode(
    name="opencode",
    title="OpenCode",
    packages=(
        NpmTarball(
            name="opencode-linux-x64",
            version="1.18.33",
            integrity=(
                "sha512-q/t/3p2CTxOT9y2kvjesb/LZab2+1eqlhhWA02Be6mjTtmYtNBcBsrI5yDo4Fw7ZSPBW2oyMIGMNRqiKQjiAWw=="
            ),
            member="package/bin/opencode",
            target=BINARY,
        ),
    ),
    interactive=(BINARY,),
    one_shot=(BINARY, "run"),
    resume=(BINARY, "--continue"),
    options=OpencodeOptions,
    modes=frozenset({"run", "daemon"}),
    daemon=(BINARY, "--continue"),
    env=MappingProxyType(
        {
            # Each of these ends one kind of contact that is not the model: the model catalogue, the release
            # feed, language servers, shared sessions.
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_SHARE": "1",
        }
    ),
    ca_env=("NODE_EXTRA_CA_CERTS", "SSL_CERT_FILE"),
    state_dirs=(".local/share/opencode", ".local/state/opencode", ".cache/opencode"),
    # opencode installs a plugin SDK from the registry into a configuration directory it can write, and dies
    # when it cannot create this file in one that is mounted read-only.
    managed_dirs=(ManagedDir(CONFIG_DIR, MappingProxyType({".gitignore": ""})),),
    owned_dirs=("/etc/opencode",),
    project_files=("opencode.json", "opencode.jsonc", ".opencode/"),
    # Without rg on PATH its search tools download one and then fail.
    debian_packages=("ca-certificates", "git", "ripgrep"),
    default_egress=("openrouter.ai", "api.openai.com", "api.anthropic.com"),
    base_urls=MappingProxyType(
        {"openai": "provider.openai.options.baseURL", "anthropic": "provider.anthropic.options.baseURL"}
    ),
    verify=(
        VerifyCheck("root-owned", BINARY),
        VerifyCheck("root-owned", MANAGED_CONFIG),
        # The terminal interface unpacks shared objects there and maps them.
        VerifyCheck("exec-dir", "/tmp"),  # noqa: S108 - the path inside the container
        VerifyCheck("runs", BINARY),
    ),
)
