"""Which command answers with what, and which has no answer: docs/json.md is made of this."""

from __future__ import annotations

from typing import Any

from corral.answers import host, refusals, service, sessions

# As it is typed -> the shapes of its answer; of a stream, of its lines, which may be of several kinds.
ANSWERS: dict[str, tuple[Any, ...]] = {
    "corral allow": (service.Allowed,),
    "corral denied": (refusals.Denied,),
    "corral denied --follow": (refusals.RefusedPackets, refusals.RefusedName),
    "corral deny": (service.DeniedName,),
    "corral df": (host.DiskUsage,),
    "corral disable": (sessions.Disabled,),
    "corral doctor": (host.Diagnosis,),
    "corral enable": (sessions.Enabled,),
    "corral inspect": (sessions.Inspection,),
    "corral logs": (sessions.LogLine,),
    "corral metrics": (service.Metrics,),
    "corral policy check": (service.Checked,),
    "corral policy diff": (host.Diff,),
    "corral policy hash": (host.Hash,),
    "corral prune": (host.Pruned,),
    "corral ps": (sessions.Ps,),
    "corral refresh": (service.Refreshed,),
    "corral render": (host.Rendered,),
    "corral render --check": (host.Differences,),
    "corral run --detach": (sessions.Session,),
    "corral status": (service.Status,),
    "corral uninstall": (host.Uninstalled,),
    "corral up": (sessions.Up,),
    "corral verify": (host.Proof,),
    "corral verify --explain": (host.Explanation,),
    "corral version": (service.Version,),
}

# Their answer is a line each.
STREAMS = frozenset({"corral denied --follow", "corral logs"})

# What they print is for one other program already, in its own format.
FORMATS: dict[str, str] = {
    "corral completion": "a script for your shell",
    "corral schema": "the JSON Schema of corral.yaml: it is JSON, of the version that its `$schema` names",
}

# They change something, or hand over the terminal; the exit code says what came of it.
ACTING = frozenset(
    {
        "corral attach",
        "corral build",
        "corral down",
        "corral init",
        "corral install",
        "corral policy accept",
        "corral revert",
        "corral shell",
    }
)
