"""The part of ``corral uninstall`` that needs root. Stdlib only: it travels over stdin to the system's
Python.

Whatever is half there or missing already is fine. Nothing opens on the way: it begins only when no sandbox
can have a container, ends the writer before the rules (it would mend them), and takes the dropping table
last.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import pwd
import re
import shutil
import time
from collections.abc import Callable, Iterable
from typing import Any

from corral.installer import common, netfilter
from corral.installer.common import Places, Run, StopError, fail

BRIDGE = re.compile(r"corral-[0-9a-f]{8}")
# The socket first: while it listens, a request starts the writer again.
STOPPING = ("corral-netfilter.socket", "corral-netfilter.service", "corral-skeleton.service")
LINKS = ("ip", "-j", "link", "show")
SYSCTL = "/usr/lib/systemd/systemd-sysctl"


def others(places: Places, uid: int, seen: list[int], links: Iterable[str]) -> dict[int, str]:
    """Return who else uses the system part, by uid: who installed it, who owns bridges, whom Docker knows."""
    found = common.users(places)
    for other in {*seen, *_claimants(places, links)}:
        with contextlib.suppress(KeyError):
            found[other] = pwd.getpwuid(other).pw_name
    return {other: name for other, name in found.items() if other != uid}


def _claimants(places: Places, links: Iterable[str]) -> set[int]:
    try:
        rows = json.loads((places.private_claims / "claims.json").read_text())
        return {int(row["uid"]) for row in rows if str(row["bridge"]) in links}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def bridges(listing: str) -> dict[str, list[str]]:
    """Return the bridges of sandboxes that exist, each with the ports on it, from what ``LINKS`` prints.

    The kernel is asked and not /sys, which may show another network namespace than the one that packets and
    rules are in.
    """
    rows = json.loads(listing or "[]")
    found: dict[str, list[str]] = {
        str(row["ifname"]): [] for row in rows if BRIDGE.fullmatch(str(row.get("ifname")))
    }
    for row in rows:
        if row.get("master") in found:
            found[row["master"]].append(str(row["ifname"]))
    return found


def _before(places: Places) -> list[str] | None:
    try:
        return [str(text) for text in json.loads(places.before.read_text())]
    except (OSError, ValueError, TypeError):
        return None


def stop_units(run: Run) -> None:
    for unit in STOPPING:
        for verb in ("stop", "disable"):
            # Of a unit that is not there both fail.
            with contextlib.suppress(StopError):
                run(["systemctl", verb, unit], None)
    for unit in STOPPING:
        state = run(["systemctl", "show", "-P", "ActiveState", unit], None).strip()
        if state not in ("inactive", "failed"):
            fail(f"{unit} does not stop, it is {state}", f"systemctl status {unit}")


def _remove_bridges(run: Run, links: dict[str, list[str]]) -> list[str]:
    for name, ports in links.items():
        if ports:
            fail(
                f"a container is still on the bridge {name}; without the rules nothing would hold it",
                "start Docker (systemctl start docker), then: corral uninstall --force",
            )
    for name in links:
        # Docker is not running, or forgot it. Nothing can be started on it in this moment.
        run(["ip", "link", "delete", name], None)
    return [f"bridge {name}" for name in links]


def uninstall_inside(
    _payload: dict[str, Any], run: Run = common.run, sleep: Callable[[float], None] = time.sleep
) -> dict[str, Any]:
    """Take the rules out of the namespace this runs in: a user's own engine's, where its owner is root."""
    removed = _remove_bridges(run, bridges(run(LINKS, None)))
    return {"removed": removed + netfilter.remove(run, None, sleep), "others": {}}


def _delete(path: pathlib.Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _restore_bridge_filter(run: Run) -> None:
    """Let the system's own configuration say what it says about bridge-nf-call-*; else they stay.

    Docker sets them too, and Kubernetes: without a word in sysctl.d nobody knows whose 1 it is.
    """
    with contextlib.suppress(StopError):
        run([SYSCTL, "--prefix=net/bridge"], None)


def uninstall(
    payload: dict[str, Any],
    places: Places | None = None,
    run: Run = common.run,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    places = Places() if places is None else places
    uid = int(payload["uid"])
    with common.locked(places):
        links = bridges(run(LINKS, None))
        using = others(places, uid, [int(other) for other in payload["others"]], links)
        if using:
            (places.users / str(uid)).unlink(missing_ok=True)
            return {"removed": [], "others": {str(other): name for other, name in using.items()}}
        removed = _remove_bridges(run, links)
        stop_units(run)
        removed += netfilter.remove(run, _before(places), sleep)
        for path in common.traces(places):
            _delete(path)
            removed.append(str(path))
        if payload["purge"] and places.settings.exists():
            _delete(places.settings)
            removed.append(str(places.settings))
        run(["systemctl", "daemon-reload"], None)
        with contextlib.suppress(StopError):
            run(["systemctl", "reset-failed", "corral-*"], None)
        _restore_bridge_filter(run)
    return {"removed": removed, "others": {}}


def main(payload: dict[str, Any]) -> int:
    return common.main(uninstall_inside if payload.get("inside") else uninstall, payload)
