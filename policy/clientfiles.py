"""Parsers of the configuration files of npm, pip and Docker, as far as building an image needs them.

Each takes text and returns settings; none raises on a malformed file: the client it belongs to will complain.
"""

from __future__ import annotations

import configparser
import json
import re
from collections.abc import Mapping
from typing import Any

_VARIABLE = re.compile(r"(?<!\\)\$\{([^}]+)\}")
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----")


def npmrc(text: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of an .npmrc, ``${NAME}`` expanded; arrays and sections are left out."""
    settings: dict[str, str] = {}
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("["):
            break
        if not stripped or stripped[0] in "#;" or "=" not in stripped:
            continue
        key, _, value = (part.strip() for part in stripped.partition("="))
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        # npm leaves a variable that is not set as it is.
        value = _VARIABLE.sub(lambda match: environ.get(match[1], match[0]), value)
        if not key.endswith("[]"):
            settings[key] = value
    return settings


def pip_config(text: str) -> dict[str, str]:
    """Return the settings of a pip.conf for ``pip install``: section global, then install on top."""
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(text)
    except configparser.Error:
        return {}
    settings: dict[str, str] = {}
    for section in ("global", "install"):
        if parser.has_section(section):
            settings |= {key.replace("_", "-"): value.strip() for key, value in parser.items(section)}
    return settings


def docker_proxies(text: str) -> dict[str, str]:
    """Return ``proxies.default`` of Docker's config.json as {"http", "https", "no_proxy"}."""
    try:
        config: Any = json.loads(text)
    except ValueError:
        return {}
    for key in ("proxies", "default"):
        config = config.get(key) if isinstance(config, dict) else None
    if not isinstance(config, dict):
        return {}
    names = {"httpProxy": "http", "httpsProxy": "https", "noProxy": "no_proxy"}
    return {names[key]: value for key, value in config.items() if key in names and isinstance(value, str)}


_SECTION = re.compile(r"""\[\s*([A-Za-z0-9.-]+)(?:\s+"((?:[^"\\]|\\.)*)")?\s*\]""")


def git_urls(text: str) -> list[str]:
    """Return the URLs that sections of a git configuration are for: url, http and credential."""
    found = []
    for line in text.splitlines():
        match = _SECTION.match(line.strip())
        if match and match[2] and match[1].lower() in {"url", "http", "credential"}:
            found.append(re.sub(r"\\(.)", r"\1", match[2]))
    return found


def certificates(text: str) -> tuple[str, ...]:
    """Return the PEM certificates in ``text`` without what stands around them (private keys above all)."""
    found = (match[0].replace("\r\n", "\n") for match in _CERTIFICATE.finditer(text))
    return tuple(dict.fromkeys(found))
