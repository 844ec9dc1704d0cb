"""How a running container differs from what ``corral run`` would start now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from corral.context import Invocation
from corral.names import changed_since
from corral.policyedit import reach
from corral.runtimes import RUNC
from corral.session import mounts
from policy.connection import OWN
from policy.container import HOSTS_TARGET, RUNTIMES, Limits
from policy.declaration import LABEL_CONNECTION, LABEL_EGRESS, LABEL_SESSION, Declaration
from policy.errors import PolicyError
from policy.loader import LoadedPolicy
from policy.mounts import is_within


def started_differently(
    invocation: Invocation, inspect: Mapping[str, Any], limits: Limits, row: Mapping[str, Any]
) -> str:
    """Return how a running container differs from what ``run`` would start now, or nothing.

    What its user allowed it since (``row``, its part of the status) and then saved is no difference.
    """
    loaded, config = invocation.loaded, inspect.get("Config") or {}
    labels, actual = config.get("Labels") or {}, inspect.get("HostConfig") or {}
    session = str(labels.get(LABEL_SESSION, ""))
    differs = []
    if (labels.get(LABEL_CONNECTION) or OWN) != loaded.connection:
        differs.append("egress.mode")
    runtime = str(actual.get("Runtime") or RUNC)
    if (runtime if runtime in RUNTIMES else RUNC) != loaded.policy.runtime:
        differs.append("runtime")
    if _egress_differs(str(labels.get(LABEL_EGRESS)), loaded.declaration, row):
        differs.append("egress")
    mounted = {
        (str(row.get("Source")), str(row.get("Target")), bool(row.get("ReadOnly")))
        for row in actual.get("Mounts") or ()
        if row.get("Target") != HOSTS_TARGET and not _protects(loaded, row)
    }
    wanted = {(row.source, row.target, row.read_only) for row in mounts(loaded, invocation.paths, session)}
    if mounted != wanted:
        differs.append("mounts: " + ", ".join(sorted({target for _, target, _ in mounted ^ wanted})))
    # A limit that Docker discarded is reported as none; whether that is excused is for ``limits`` to say.
    kept = [(name, value, actual.get(name)) for name, value in limits.host_config().items()]
    other = [name for name, value, found in kept if (found or 0) != value and (found or 0) > 0]
    if other:
        differs.append("limits: " + ", ".join(other))
    if not differs:
        return ""
    told = "; ".join(differs)
    return f"it was started under another version of the policy ({told} differ); end it and run it again"


def _egress_differs(label: str, wanted: Declaration, row: Mapping[str, Any]) -> bool:
    if label == wanted.to_label():
        return False
    try:
        declared = Declaration.from_label(label)
    except PolicyError:
        return True
    now = changed_since(declared, row)
    same = (now.mode, now.dns, now.host_services) == (wanted.mode, wanted.dns, wanted.host_services)
    return not same or reach(now) != reach(wanted) or _askable(now) != _askable(wanted)


def _askable(declaration: Declaration) -> set[tuple[str, int, str, bool]]:
    return {(one.host, port, one.protocol, one.sni) for one in declaration.patterns for port in one.ports}


def _protects(loaded: LoadedPolicy, row: Mapping[str, Any]) -> bool:
    """Say whether a mount only closes a part of one that is writable; which parts depends on the moment."""
    source = str(row.get("Source"))
    inside = any(
        not mount.read_only and source != mount.source and is_within(source, mount.source)
        for mount in loaded.mounts
    )
    return inside and bool(row.get("ReadOnly")) and row.get("Target") == source
