"""What every key of corral.yaml means, once: for editors (JSON Schema) and for people (docs/policy.md). Pure.

python -m policy.reference      write the table of keys into docs/policy.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from policy import profiles
from policy.schema import EGRESS_MODES, Policy

SCHEMA_ID = "https://json-schema.org/draft/2020-12/schema"
PAGE = Path("docs/policy.md")
BEGIN, END = "<!-- keys: made by python -m policy.reference -->", "<!-- end of keys -->"

# key -> what it means. A list's entries are at [].
MEANING: Mapping[str, str] = {
    "profile": "the harness ([profiles.md](profiles.md))",
    "name": "default: the project directory's name. A sandbox is (user, directory, name)",
    "mode": "`run`: sessions; `daemon`: an agent that is always on ([sessions.md](sessions.md)), refused by "
    "profiles that cannot",
    "mounts": "paths of this host, the same path inside",
    "mounts.rw": "read-write: absolute, `~/…` or `$HOME/…`; symbolic links are resolved first; no overlaps",
    "mounts.ro": "the same, read-only",
    "mounts.project": "`ro`: the project is read-only, and the agent writes in `/workspace`, which stays",
    "egress": "what may be reached beyond the sandbox",
    "egress.mode": (
        "`allowlist`; `open`: all public addresses; `none`: no network at all; `host`: this host's network, "
        "NOT ENFORCED; `proxy`: names through a proxy alone; see below"
    ),
    "egress.allow": (
        "names, zones and regular expressions, see below. No addresses, ranges, URLs, ports in the name, "
        "single labels"
    ),
    "egress.allow[].host": (
        "a domain name, a zone `*.example.com` or a regular expression `^…$`; the short form of an entry is "
        "this alone"
    ),
    "egress.allow[].ports": "default 443",
    "egress.allow[].optional": "`true`: a name that does not resolve stops no start",
    "egress.allow[].liveness": "`false`: a name that answers nothing on its ports stops no start",
    "egress.allow[].force": "`true`: accept a public DNS-over-HTTPS endpoint, or a zone with one in it",
    "egress.allow[].protocol": (
        "what the proxy lets through: `tls`, which begins with a ClientHello for this name; `tcp`: anything"
    ),
    "egress.allow[].sni": "`false`: the proxy accepts a ClientHello that has no name in it, too",
    "egress.dns": (
        "`dead`: programs have the names of the list in a file, and no resolver; `answer`: names of the "
        "list, zones' too, are answered and opened as they are asked for, see below"
    ),
    "egress.from_host": (
        "of `npm`, `pip`, `apt`, `git`: adds the hosts these clients are configured with on this machine, "
        "see below"
    ),
    "egress.allow_stale": (
        "`true`: a session may start on the last good addresses (at most a day old) of names that cannot be "
        "resolved now, with a warning; default: it is refused, with the names"
    ),
    "egress.profile_defaults": "`true` adds the profile's own model providers",
    "host_services": "services on this host's 127.0.0.1",
    "host_services[].name": "for messages",
    "host_services[].port": "127.0.0.1:port of the host is `corral-host:port` inside",
    "secrets": "what becomes environment inside",
    "secrets.env_file": "strict KEY=VALUE file, yours, mode 600, outside every mount",
    "limits": "what one session may use of this host",
    "limits.pids": "processes and threads; default 4096",
    "limits.memory": "with its unit, as 8g; default: three quarters of the host's",
    "limits.cpus": "processors; default: all",
    "limits.best_effort": "`true`: start, with a warning, where the host lacks the cgroup controller for one",
    "build": "how the image is made; a build is not fenced by the sandbox's rules",
    "build.base_image": "a Debian; default `debian:bookworm-slim`",
    "build.proxy": "default: what this machine's clients use; empty text: none",
    "build.proxy.http": "a URL",
    "build.proxy.https": "a URL",
    "build.proxy.no_proxy": "hosts, separated by commas",
    "build.ca_certificates": "PEM files; default: `/usr/local/share/ca-certificates/*.crt`",
    "build.npm_registry": "default: what this machine's npm uses, never `file://`",
    "build.pip_index": "default: what this machine's pip uses",
    "build.apt_mirror": "default: what this machine's apt uses",
    "profile_options": (
        "by profile ([profiles.md](profiles.md)); `config` is the harness's own configuration. It is "
        "baked root-owned and outranks the project's files"
    ),
    "background": "background services of the profile",
    "image": (
        "an existing image, NAME:TAG or NAME@sha256:DIGEST, to which corral adds its layer, see below; "
        "`CORRAL_SANDBOX_IMAGE` in the environment names one, too"
    ),
    "runtime": "`runc`; `runsc` or `kata`, when Docker has it: untested, see below",
    "keep": "`true`: a session's container stays after its end, to be looked at, until `corral down`",
    "hooks": "programs of this host, run as you",
    "hooks.pre_launch": (
        "program (its whole path, not where an agent can write) and arguments, run before each session in "
        "your home with `CORRAL_PROJECT`, `CORRAL_SANDBOX` and `CORRAL_SESSION_ID`; when it fails or takes "
        "longer than ten minutes, nothing starts"
    ),
    "approvals": (
        "`ask`, `auto` or `off`: the harness's own questions to you; no isolation, each start says so"
    ),
    "protect": "`false`: files in writable mounts that this host executes are neither protected nor reported",
}

# (how an entry of egress.allow is written, what it stands for), for the manual page.
ENTRIES = (
    ("api.example.com", "this name, on port 443, pinned to the addresses it resolves to"),
    ("{host: git.example.com, ports: [443, 22]}", "other ports"),
    (
        "'*.example.com'",
        "a zone: every name below it, at any depth, and never example.com itself; asked for through the "
        "sandbox's proxy",
    ),
    (
        r"'^(api|preview)\.x\.example$', 'regex:(api|preview)\.x\.example'",
        "a regular expression, which has to match the whole name; the same way",
    ),
)


def keys_and_fields(model: type[BaseModel] = Policy, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key of a policy, ``egress.allow[].host`` for example, with its field."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        below, listed = _below(field.annotation)
        if below is not None:
            yield from keys_and_fields(below, f"{prefix}{name}{'[]' if listed else ''}.")


def _below(annotation: Any, listed: bool = False) -> tuple[type[BaseModel] | None, bool]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, listed
    for part in get_args(annotation):
        found = _below(part, listed or getattr(annotation, "__origin__", None) is tuple)
        if found[0] is not None:
            return found
    return None, False


def json_schema() -> dict[str, Any]:
    """Return a JSON Schema of corral.yaml for editors.

    It is wider than the validation: what needs the file system or a look at two keys is left to corral.
    """
    schema = Policy.model_json_schema()
    definitions = schema.pop("$defs", {})
    body: dict[str, Any] = _described(_inlined(schema, definitions), "")
    entry = body["properties"]["egress"]["properties"]["allow"]["items"]
    body["properties"]["egress"]["properties"]["allow"]["items"] = {
        "anyOf": [{"type": "string", "description": MEANING["egress.allow[].host"]}, entry]
    }
    body["properties"]["profile"]["enum"] = list(profiles.names())
    body["properties"]["egress"]["properties"]["mode"]["enum"] = list(EGRESS_MODES)
    return {"$schema": SCHEMA_ID, "title": "corral.yaml", **body}


def _inlined(value: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_inlined(item, definitions) for item in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        found = _inlined(definitions[value["$ref"].rpartition("/")[2]], definitions)
        return {**found, **{key: item for key, item in value.items() if key not in {"$ref", "default"}}}
    return {
        key: _inlined(item, definitions)
        for key, item in value.items()
        # A property may have one of these names; a keyword's value is no mapping.
        if key not in {"title", "default"} or isinstance(item, dict)
    }


def _described(schema: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the schema with our words instead of docstrings."""
    made = {name: value for name, value in schema.items() if name != "description"}
    if key in MEANING:
        made["description"] = MEANING[key]
    dot = f"{key}." if key else ""
    if "properties" in made:
        made["properties"] = {
            name: _described(below, f"{dot}{name}") for name, below in made["properties"].items()
        }
    if isinstance(made.get("items"), dict):
        made["items"] = _described(made["items"], f"{key}[]")
    if "anyOf" in made:
        # A key that is left empty counts as left out.
        made["anyOf"] = [_described(option, "") for option in made["anyOf"]]
    return made


def schema_text() -> str:
    """Return the JSON Schema as text."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def table() -> str:
    """Return the table of keys for docs/policy.md."""
    keys = [key for key, _ in keys_and_fields()]
    # What a section is for is said by its keys.
    told = [key for key in keys if not any(other.startswith(key + ".") for other in keys)]
    return "\n".join(["| key | meaning |", "|---|---|", *(f"| `{key}` | {MEANING[key]} |" for key in told)])


def page(text: str) -> str:
    """Return docs/policy.md with the table of today."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> None:
    """Write the page anew."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
