"""Answers about the policy, the proof of it, and this host, from ``policy diff`` to ``uninstall``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from corral.answers.sessions import Mount


class Change(TypedDict):
    """One difference."""

    sign: Annotated[Literal["+", "-", "~"], "`+` is new, `-` is gone, `~` is different"]
    text: Annotated[str, "what, for people"]
    widens: Annotated[bool, "whether it allows more than was approved"]


class Diff(TypedDict):
    """What of the policy is not approved."""

    approved: Annotated[str | None, "the hash of what was approved; null when nothing was"]
    policy: Annotated[str, "the hash of the policy as it is"]
    widens: Annotated[bool, "whether somebody has to agree; exit code 1 when true"]
    changes: Annotated[list[Change], "differences between the two"]


class Hash(TypedDict):
    """The hash of what the policy allows."""

    policy: Annotated[str, "SHA-256, in hexadecimal"]


class ImageInputs(TypedDict):
    """The image."""

    tag: Annotated[str, "its name"]
    inputs: Annotated[str, "the hash of all that goes into it"]


class BuildFile(TypedDict):
    """A file of the build."""

    path: Annotated[str, "its path in the build directory"]
    mode: Annotated[str, "its mode, four octal digits"]
    sha256: Annotated[str, "the hash of its content"]


class Rendered(TypedDict):
    """What the policy becomes; words in angle brackets are decided when a session starts."""

    sandbox: Annotated[str, "the id of the sandbox"]
    policy: Annotated[str, "the hash of the policy"]
    image: Annotated[ImageInputs, "its image"]
    files: Annotated[list[BuildFile], "files that it is built from"]
    dockerfile: Annotated[str, "the Dockerfile"]
    labels: Annotated[dict[str, str], "labels of a session's container"]
    mounts: Annotated[list[Mount], "mounts of a session"]
    network: Annotated[
        dict[str, Any],
        "what Docker is asked to make, in the words of its API; of a policy without a network `NetworkMode` "
        "alone",
    ]
    kernel: Annotated[list[str], "elements that the kernel's sets get, `SET SOURCE,PROTOCOL:PORT,TARGET`"]


class Differences(TypedDict):
    """How what is built differs from the policy."""

    differences: Annotated[list[str], "a line each, for people; exit code 1 when there is one"]


class Check(TypedDict):
    """One check."""

    check: Annotated[str, "its name; what differs within a family follows a colon"]
    status: Annotated[Literal["ok", "fail", "skip"], "what came of it"]
    detail: Annotated[str, "what was seen, or why it was not made; for people"]
    session: Annotated[str | None, "the running session it was made in; null: the throw-away container"]


class Proof(TypedDict):
    """What was proven. Exit code 1 when a check failed or none passed."""

    sandbox: Annotated[str, "the id of the sandbox"]
    checks: Annotated[list[Check], "each check that was made"]
    passed: Annotated[int, "how many are `ok`"]
    skipped: Annotated[int, "how many are `skip`"]
    failed: Annotated[int, "how many are `fail`"]


class Explanation(TypedDict):
    """What one check is; texts are for people."""

    name: Annotated[str, "its name"]
    proves: Annotated[str, "what is true when it passes"]
    measured: Annotated[str, "how that is found out"]
    means: Annotated[str, "what it means when it fails"]
    fix: Annotated[str, "what to do then"]
    side: Annotated[Literal["inside", "host"], "where it is seen from"]
    beyond: Annotated[str, "what it does not prove; empty when nothing is to be said"]


class Finding(TypedDict):
    """One check of this host; texts are for people."""

    id: Annotated[str, "its id, `COR-NUMBER`, which never changes its meaning"]
    title: Annotated[str, "what is wrong when it is found"]
    severity: Annotated[
        Literal["broken", "advice"], "`broken`: sandboxes cannot start, or would not be protected"
    ]
    state: Annotated[
        Literal["ok", "found", "unknown"], "`found`: it is wrong. `unknown`: it could not be looked at"
    ]
    found: Annotated[str | None, "what was found; null in other states"]
    unknown: Annotated[str | None, "why it could not be looked at; null in other states"]
    probe: Annotated[str, "what is looked at"]
    cause: Annotated[str, "how it comes about, and what it does"]
    fix: Annotated[str, "what to do"]


class Diagnosis(TypedDict):
    """What is wrong with this host. Exit code 1 when something is broken."""

    version: Annotated[str, "the version of this program"]
    ok: Annotated[int, "checks that found nothing"]
    broken: Annotated[int, "things found that are broken"]
    advice: Annotated[int, "things found that are advice"]
    unknown: Annotated[int, "checks that could not be made"]
    checks: Annotated[list[Finding], "each check"]


class Image(TypedDict):
    """The images of a sandbox, all together."""

    size: Annotated[int, "bytes, as the engine says it; layers that images share count in each"]
    own: Annotated[int, "bytes that no other image shares"]
    names: Annotated[list[str], "their names, or ids of those without one"]


class Usage(TypedDict):
    """What one sandbox takes on the disk, in bytes."""

    sandbox: Annotated[str, "its id"]
    project: Annotated[str, "the directory of its policy; empty when that is not known"]
    image: Annotated[Image | None, "null when Docker does not answer"]
    state: Annotated[int, "what the agent keeps from one session to the next"]
    workspace: Annotated[int, "its workspace"]
    sessions: Annotated[int, "files of its sessions"]
    build: Annotated[int, "files that its image is built from"]
    logs: Annotated[int, "the log of the last build"]
    partly: Annotated[bool, "true: not all could be counted; it is at least this"]
    files: Annotated[int, "all of it but the image"]


class Free(TypedDict):
    """Room on a file system, for those who are not root."""

    path: Annotated[str, "a path on it"]
    free: Annotated[int, "bytes that are free"]
    size: Annotated[int, "bytes in all"]


class Total(TypedDict):
    """The sums over all sandboxes, in bytes."""

    state: Annotated[int, "of `state`"]
    workspace: Annotated[int, "of `workspace`"]
    sessions: Annotated[int, "of `sessions`"]
    build: Annotated[int, "of `build`"]
    logs: Annotated[int, "of `logs`"]
    files: Annotated[int, "of `files`"]
    images_own: Annotated[int, "of `image.own`"]


class DiskUsage(TypedDict):
    """What your sandboxes take on the disk."""

    sandboxes: Annotated[list[Usage], "each sandbox"]
    other: Annotated[int, "bytes of corral's own records beside sandboxes"]
    layers: Annotated[int | None, "bytes of all images of the engine, others' too; null without Docker"]
    places: Annotated[
        list[Free], "room where sandboxes and the engine have their files, as far as it is known"
    ]
    docker: Annotated[str | None, "why Docker did not answer; null when it did"]
    total: Annotated[Total, "sums"]


class Thing(TypedDict):
    """Something that was removed, or would be."""

    kind: Annotated[
        Literal["container", "relay", "network", "session", "image"],
        "`session`: the files of one that has ended",
    ]
    name: Annotated[str, "its name, or the path"]
    sandbox: Annotated[str, "the id of its sandbox; empty when it has none"]


class Stuck(Thing):
    """Something that could not be removed."""

    why: Annotated[str, "why"]


class Kept(TypedDict):
    """Something that stays."""

    what: Annotated[str, "what, for people"]
    why: Annotated[str, "why"]


class Pruned(TypedDict):
    """What was removed. Exit code 1 when something could not be."""

    dry_run: Annotated[bool, "true: nothing was removed; `removed` says what would be"]
    docker: Annotated[str | None, "why Docker did not answer, and nothing was done; null when it did"]
    removed: Annotated[list[Thing], "what was removed"]
    left: Annotated[list[Stuck], "what could not be removed"]
    kept: Annotated[list[Kept], "what stays, and why"]


class Going(TypedDict):
    """Something that goes."""

    kind: Annotated[
        Literal["container", "relay", "network", "image", "user", "rules", "system", "state"],
        "`user`: a file of yours. `system`: one of the system. `state`: what `--purge` takes too",
    ]
    name: Annotated[str, "its name, the path, or a description"]


class Uninstalled(TypedDict):
    """What goes, and what stays."""

    done: Annotated[bool, "false with `--dry-run`: nothing was removed"]
    remove: Annotated[list[Going], "what goes, in this order"]
    keep: Annotated[list[Kept], "what stays, and why"]
    running: Annotated[list[str], "containers that run; without `--force` they stand in the way"]
    removed: Annotated[list[str], "what was taken from the system, as the part that ran as root says"]
