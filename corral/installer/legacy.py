"""What an installation needs on a host whose Docker uses the legacy tables. Stdlib only, runs as root."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterable

from corral.installer.common import SEARCH, Run, StopError

TOOL = "iptables-legacy"
FAMILIES = {"ip": (TOOL, "ip_tables_names"), "ip6": ("ip6tables-legacy", "ip6_tables_names")}
FIX = (
    "pipx inject corral python-iptables (it is compiled: sudo apt install gcc python3-dev), "
    "then: corral install"
)
DROP_INS = {
    # The writer may not make the lock file of iptables, nor open it: the service manager opens it for it.
    # Neither of the two lines before the rules may keep the unit from loading them.
    "corral-skeleton.service": (
        "[Service]\nExecStartPre=-+{tool} -w -S OUTPUT 1\nExecStartPre=-+/bin/touch /run/xtables.lock\n"
    ),
    "corral-netfilter.service": "[Service]\nStandardInput=file:/run/xtables.lock\n",
}
DROP_IN = "10-legacy.conf"


def tables(family: str, proc: pathlib.Path = pathlib.Path("/proc")) -> list[str]:
    """Return the legacy tables that exist; looking with iptables would make them."""
    with contextlib.suppress(OSError):
        return (proc / "net" / FAMILIES[family][1]).read_text().split()
    return []


def program(search: Iterable[str] = SEARCH) -> str:
    """Return the path of iptables-legacy, empty when it is not here."""
    found = (f"{directory}/{TOOL}" for directory in search)
    return next((path for path in found if os.access(path, os.X_OK)), "")


def alternative(search: Iterable[str] = SEARCH) -> bool:
    """Tell whether the host's iptables is the legacy one."""
    for directory in search:
        path = f"{directory}/iptables"
        if os.path.lexists(path):
            return "legacy" in pathlib.Path(os.path.realpath(path)).name
    return False


def hooked(run: Run) -> bool:
    """Tell whether Docker's chain is hooked in the legacy tables."""
    if not program() or "filter" not in tables("ip"):
        return False
    with contextlib.suppress(StopError):
        return any("-j DOCKER-USER" in line for line in run([TOOL, "-w", "-S", "FORWARD"], None).splitlines())
    return False


def drop_ins(search: Iterable[str] = SEARCH) -> dict[str, str | None]:
    """Return the files that make the units fit, by their paths below the directory of units.

    None where there is to be no such file: without the program this host has no use for them.
    """
    tool = program(search)
    return {
        f"{unit}.d/{DROP_IN}": text.replace("{tool}", tool) if tool else None
        for unit, text in DROP_INS.items()
    }
