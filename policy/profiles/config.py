"""A harness's own configuration as root-owned file of the image: what it is made of, and in which order.

From the weakest to the strongest: the profile's defaults, what ``base_url`` and ``model`` of the options
mean, ``config`` of the options, what ``approvals`` means, and what corral fixes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PrivateAttr,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from policy.profiles import tomltext
from policy.records import dataclass
from policy.urls import UrlError, split_http

MAX_CONFIG = 32768
_SECRET_KEYS = frozenset({"apikey", "api_key", "token", "authorization", "x-api-key", "password", "secret"})
Tree = Mapping[str, JsonValue]


def _nothing() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True)
class ConfigFile:
    """``form`` is how it is written. ``defaults`` may be replaced by the policy, ``fixed`` may not."""

    path: str
    form: Literal["json", "toml"]
    defaults: Tree = field(default_factory=_nothing)
    fixed: Tree = field(default_factory=_nothing)


@dataclass(frozen=True)
class Approval:
    """What one value of ``approvals`` is to a harness: settings, environment, words after the program.

    ``key`` is the setting, its names joined by dots, that a policy must not have on its own besides.
    """

    config: Tree = field(default_factory=_nothing)
    key: str = ""
    env: Mapping[str, str] = field(default_factory=_nothing)
    argv: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wiring:
    """What an option is to a harness, when it is given: settings and environment.

    ``{base_url}`` and ``{model}`` in their texts become the options. What speaks of one that is not given is
    left out.
    """

    option: Literal["base_url", "model"]
    config: Tree = field(default_factory=_nothing)
    env: Mapping[str, str] = field(default_factory=_nothing)

    def variables(self, options: HarnessOptions) -> dict[str, str]:
        """Return the environment."""
        return self._filled(self.env, options)

    def settings(self, options: HarnessOptions) -> dict[str, Any]:
        """Return the settings."""
        return self._filled(self.config, options)

    def _filled(self, tree: Mapping[str, Any], options: HarnessOptions) -> dict[str, Any]:
        values = {name: getattr(options, name, None) for name in ("base_url", "model")}
        if values[self.option] is None:
            return {}
        return dict(_filled(tree, values))


class ProfileOptions(BaseModel):
    """Base of what ``profile_options.<profile>`` may hold; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    def shape(self) -> dict[str, Any]:
        """Return fields of the profile (policy.profiles.base.Profile) that the options replace."""
        return {}


class HarnessOptions(ProfileOptions):
    """``config`` is the harness's own configuration: root-owned, it outranks the project's files."""

    config: dict[str, JsonValue] = Field(default_factory=dict)
    _approvals: str | None = PrivateAttr(default=None)

    @property
    def approvals(self) -> str | None:
        """What ``approvals`` of the policy says."""
        return self._approvals

    @field_validator("config")
    @classmethod
    def _check_config(cls, config: dict[str, JsonValue], info: ValidationInfo) -> dict[str, JsonValue]:
        file = info.context if isinstance(info.context, ConfigFile) else None
        for path in _leaves(file.fixed if file is not None else {}):
            if _at(config, path) is not None:
                name = ".".join(path)
                raise problem(f"{name} is set by corral", f"remove {name}")
        for key, value in _strings(config):
            if key.lower() in _SECRET_KEYS and "{env:" not in value and "{file:" not in value:
                raise problem(
                    f"a literal {key} would be stored in the image",
                    f'write {key}: "{{env:NAME}}" and NAME=... into the file of secrets.env_file',
                )
        try:
            text = json.dumps(config, allow_nan=False)
        except ValueError as error:
            raise problem("a number that JSON cannot hold (.inf or .nan)", "remove it") from error
        if len(text) > MAX_CONFIG:
            raise problem(f"longer than {MAX_CONFIG} characters as JSON", "shorten it")
        if file is not None and file.form == "toml":
            try:
                tomltext.dumps(config)
            except ValueError as error:
                raise problem(f"TOML cannot hold {error}", "remove it") from error
        return config


def problem(what: str, fix: str) -> PydanticCustomError:
    """Return an error that is shown as ``what`` with its ``fix``; ``what`` never holds a secret."""
    return PydanticCustomError("corral", "{what}", {"what": what, "fix": fix})


def _base_url(text: str) -> str:
    try:
        split_http(text, credentials=False)
    except UrlError as error:
        raise problem(str(error), "write http://corral-host:PORT or https://host") from error
    return text.rstrip("/")


class WiredOptions(HarnessOptions):
    """``base_url``: a server that speaks the harness's protocol. ``model``: what is asked of it."""

    base_url: Annotated[str, Field(max_length=1024), AfterValidator(_base_url)] | None = None
    model: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[!-~]+$")] | None = None


def content(file: ConfigFile, options: HarnessOptions, wirings: Sequence[Wiring]) -> str:
    """Return the text of the file."""
    made: dict[str, Any] = dict(file.defaults)
    for wiring in wirings:
        made = merge(made, wiring.settings(options))
    made = merge(merge(made, options.config), file.fixed)
    if file.form == "toml":
        return tomltext.dumps(made)
    return json.dumps(made, indent=2, sort_keys=True, ensure_ascii=True) + "\n"


def with_approval(
    profile: str, options: HarnessOptions, wanted: str, approval: Approval, file: ConfigFile | None
) -> HarnessOptions:
    """Return the options with what a value of ``approvals`` means.

    Raises:
        ValueError: the options say the same on their own.
    """
    if file is not None and approval.key and _at(options.config, tuple(approval.key.split("."))) is not None:
        raise ValueError(f"profile_options.{profile}.config has a {approval.key} of its own")
    made = options.model_copy(update={"config": merge(options.config, approval.config)})
    made._approvals = wanted
    return made


def _filled(value: Any, values: Mapping[str, str | None]) -> Any:
    """Return a value with the options put in the place of their names in braces; None to leave it out."""
    if isinstance(value, str):
        for name, text in values.items():
            if f"{{{name}}}" in value:
                if text is None:
                    return None
                value = value.replace(f"{{{name}}}", text)
        return value
    if isinstance(value, Mapping):
        made = {key: _filled(item, values) for key, item in value.items()}
        return {key: item for key, item in made.items() if item is not None}
    return value


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``over`` on top, mapping by mapping."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(below, value) if both and isinstance(below, Mapping) else _plain(value)
    return merged


def _plain(value: Any) -> Any:
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _leaves(value, (*path, key))
    elif path:
        yield path


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    """Return what stands at a path, or above it in place of a mapping; None when there is nothing."""
    for key in path:
        if not isinstance(tree, Mapping):
            return tree
        if key not in tree:
            return None
        tree = tree[key]
    return tree if tree is not None else "null"


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
