"""The policy that `corral init` writes."""

from __future__ import annotations

from policy import profiles
from policy.profiles import Profile

_TEMPLATE = """\
{editor}# What the agent in this project may touch. Everything that is not listed here is denied.
# Allowing more than was approved asks you first, because the agent can write this file: corral policy diff.
# After a change: corral verify, corral run.

profile: {profile}
{name}
mode: run                  # an interactive or one-shot session in a container of its own

# Host paths, under the same path inside. The project directory itself is mounted read-write; don't list it.
# mounts:
#   project: rw            # ro: the agent reads the project and writes in /workspace
#   rw:
#     - ~/Projects/shared
#   ro:
#     - ~/Documents/notes

egress:
  # Names the profile needs for its model providers:
  #   {defaults}
  # Set this to false when the agent uses none of them, such as with a model on this machine.
  profile_defaults: true
  # Domain names, port 443. The long form has other ports, and optional names that may fail to resolve.
  # A zone, all names below one, and a regular expression go through a proxy that reads the name in TLS.
  # allow:
  #   - api.example.com
  #   - {{host: git.example.com, ports: [443, 22], optional: true}}
  #   - '*.example.com'
  #   - '^(api|preview)-[a-z0-9]+\\.example\\.com$'
  # What these clients are configured with on this machine: registries, mirrors, hosts.
  # from_host: [npm, pip, apt, git]

# Services on 127.0.0.1 of this machine, inside reachable as corral-host:<port>.
# host_services:
#   - name: llama
#     port: 8081

# KEY=VALUE lines that become environment inside; the file is never mounted. It must be yours, mode 600.
{keys}# secrets:
#   env_file: ~/.config/corral/{file}.env
{carried}
# What one session may use of this machine. Without it: 4096 processes, three quarters of the memory.
# limits:
#   memory: 8g
#   cpus: 4
#   pids: 2048
#   best_effort: true      # start even where this machine cannot keep one of them

# A program of this host that runs before each session, such as a backup; not one that the agent can write.
# hooks:
#   pre_launch: [/usr/bin/restic, backup, /home/me/Projects]

# The harness's own questions to you: ask, auto or off. They add no isolation.
# approvals: auto

# Keep each session's container after its end, to look at it, until corral down.
# keep: true

# The image is built with the proxy, certificates and mirrors this machine uses, unless they are set here.
# build:
#   base_image: debian:bookworm-slim
#   proxy:
#     http: http://proxy.example.com:3128
#     https: http://proxy.example.com:3128
#     no_proxy: .example.com
#   ca_certificates:
#     - /usr/local/share/ca-certificates/example.crt
"""


def starter(profile: str, project_name: str, schema: str = "") -> str:
    """Return a commented corral.yaml that loads without error.

    Args:
        profile: name of a profile.
        project_name: name of the project directory; becomes the sandbox's name when it can be one.
        schema: path of the JSON Schema, for editors; empty: no line about it.

    Raises:
        PolicyError: no such profile, or not available yet.
    """
    chosen: Profile = profiles.get(profile)
    usable = (
        bool(project_name.strip()) and project_name.strip() == project_name and project_name.isprintable()
    )
    if usable and len(project_name) <= 512:
        name = f"name: {_quoted(project_name)}"
    else:
        name = "# name: myproject        # default: the name of the project directory"
    simple = project_name if project_name.isascii() and project_name.isalnum() else "myproject"
    return _TEMPLATE.format(
        editor=f"# yaml-language-server: $schema={schema}\n" if schema.isprintable() and schema else "",
        profile=chosen.name,
        name=name,
        defaults=", ".join(chosen.default_egress) or "none",
        file=simple,
        carried=_carried(chosen),
        keys=f"# One of: {', '.join(chosen.keys)}\n" if chosen.keys else "",
    )


def _carried(profile: Profile) -> str:
    places = profile.carried(profile.parse_options({}))
    if not places:
        return ""
    shown = ", ".join(f"~/{place}" for place in places)
    return (
        f"\n# The agent can read a copy of what is in {shown}, unless:\n"
        f"# profile_options: {{{profile.name}: {{from_host: []}}}}\n"
    )


def _quoted(text: str) -> str:
    """Return ``text`` as a double-quoted YAML scalar on one line."""
    escaped = "".join(
        f"\\{char}" if char in '"\\' else char if char.isascii() else _escape(char) for char in text
    )
    return f'"{escaped}"'


def _escape(char: str) -> str:
    return char if char.isalnum() else f"\\U{ord(char):08X}"
