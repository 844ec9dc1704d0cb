"""The tables of docs/profiles.md, made of the profiles and the lock. Pure.

python -m agent_image.profilespage      write them into docs/profiles.md
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agent_image.harnesses import load_lock
from policy import profiles
from policy.profiles import Profile

PAGE = Path("docs/profiles.md")
BEGIN, END = "<!-- profiles: made by python -m agent_image.profilespage -->", "<!-- end of profiles -->"
_NONE = "none"


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words) or _NONE


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    columns = list(head)
    lines = [f"| {' | '.join(line)} |" for line in (columns, *rows)]
    return [lines[0], "|---" * len(columns) + "|", *lines[1:]]


def _next(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    return ["", *_table(head, rows)]


def _versions(name: str, lock: Mapping[str, Any]) -> str:
    if name in lock["pip"]:
        return f"{lock['pip'][name]['version']}, for Python {lock['pip'][name]['python']}"
    pins = lock["npm"].get(name, {})
    told = [f"{platform} {pin['version'].partition('-')[0]}" for platform, pin in sorted(pins.items())]
    return ", ".join(told) or "what your lines bring"


def _argv(profile: Profile, words: tuple[str, ...], prompt: bool = False) -> str:
    if not words:
        return _NONE
    program = profile.install.program if profile.install is not None else ""
    shown = [word if word != program else program.rpartition("/")[2] for word in words]
    if prompt:
        shown = [*shown[:-1], shown[-1] + "PROMPT"] if shown[-1].endswith("=") else [*shown, "PROMPT"]
    return f"`{' '.join(shown)}`"


def _approval(profile: Profile, value: str) -> str:
    approval = profile.approvals.get(value)
    if approval is None:
        return _NONE
    told = [json.dumps(_plain(approval.config))] if approval.config else []
    told += [" ".join(approval.argv)] if approval.argv else []
    return _code([*told, *(f"{name}={text}" for name, text in approval.env.items())])


def _plain(value: Any) -> Any:
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def tables(lock: Mapping[str, Any]) -> str:
    """Return the tables."""
    found = [profiles.get(name) for name in profiles.names()]
    fetched = [profile for profile in found if profile.install is not None]
    lines = _table(
        ["profile", "harness", "version", "credential in `secrets.env_file`", "reached by default"],
        (
            [
                f"`{profile.name}`",
                profile.title,
                _versions(profile.name, lock),
                _code(profile.keys),
                _code(profile.default_egress),
            ]
            for profile in found
        ),
    )
    lines += _next(
        ["profile", "interactive", "one-shot", "continues the last", "`mode: daemon`"],
        (
            [
                f"`{profile.name}`",
                _argv(profile, profile.interactive),
                _argv(profile, profile.one_shot, prompt=True),
                _argv(profile, profile.resume),
                _argv(profile, profile.daemon)
                if profile.daemon[:1] != ("/bin/sh",)
                else "the last, or a first",
            ]
            for profile in fetched
        ),
    )
    lines += _next(
        [
            "profile",
            "root-owned in the image",
            "stays (below the home)",
            "seeded once",
            "copied from your home",
            "protected in the project",
        ],
        (
            [
                f"`{profile.name}`",
                _code(file.path for file in profile.baked_files(profile.parse_options({}))),
                _code(profile.state_dirs),
                _code(seed.path for seed in profile.seeds),
                _code(f"~/{path}" for path in profile.carried(profile.parse_options({}))),
                _code(profile.project_files),
            ]
            for profile in fetched
        ),
    )
    lines += _next(
        ["profile", "`ask`", "`auto`", "`off`"],
        (
            [f"`{profile.name}`", *(_approval(profile, value) for value in ("ask", "auto", "off"))]
            for profile in found
        ),
    )
    lines += _next(
        ["profile", "variable", "ends"],
        (
            [f"`{profile.name}`", f"`{switch.variable}={switch.value}`", switch.ends]
            for profile in found
            for switch in profile.switches
        ),
    )
    lines += _next(
        ["profile", "CA bundle", "proxy", "asks for all the same"],
        (
            [
                f"`{profile.name}`",
                _code(profile.ca_env),
                _code(profile.proxy_env),
                "; ".join(f"`{host}`: {when}" for host, when in profile.contacts.items()) or "nothing",
            ]
            for profile in fetched
        ),
    )
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with the tables of today."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables(load_lock())}\n\n{END}{after}"


def main() -> None:
    """Write the page anew."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
