"""Programs for root as one text, for the stdin of the system's Python.

Nothing of it is written to a path that a user could change between the writing and the running.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policy.errors import InstallError

PACKAGES = ("policy", "corral", "corral.installer")
# In the order of their imports.
MODULES = (
    "policy.errors",
    "policy.savedfile",
    "policy.versions",
    "corral.installer.common",
    "corral.installer.legacy",
    "corral.installer.netfilter",
)
# The first lines are all that an older Python has to understand.
LOADER = """\
import json, sys, types
if sys.version_info < (3, 11):
    print(json.dumps({"message": sys.executable + ", the system's Python, is " + sys.version.split()[0]
        + "; the netfilter writer runs on it and needs 3.11 or newer", "hint": "upgrade the system "
        "(Debian 12, Ubuntu 24.04); the Python of corral itself does not count"}), file=sys.stderr)
    sys.exit(1)
def _load(packages, sources):
    for name in packages:
        made = sys.modules[name] = types.ModuleType(name)
        made.__path__ = []
    for name, text in sources:
        made = sys.modules[name] = types.ModuleType(name)
        made.__package__ = name.rpartition(".")[0]
        setattr(sys.modules[made.__package__], name.rpartition(".")[2], made)
        exec(compile(text, "<corral: " + name + ">", "exec", 0, True), made.__dict__)
"""
END = "\nsys.exit(sys.modules[{module!r}].main(json.loads({payload!r})))\n"


def source(module: str) -> str:
    """Return the text of a module, which need not be importable here."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise InstallError(f"the module {module} is missing", "install corral again")
    return Path(spec.origin).read_text(encoding="utf-8")


def program(module: str, payload: Mapping[str, Any]) -> str:
    """Return a program that calls ``main(payload)`` of a module and exits with its result."""
    sources = [(name, source(name)) for name in (*MODULES, module)]
    loading = f"_load(json.loads({json.dumps(PACKAGES)!r}), json.loads({json.dumps(sources)!r}))\n"
    return LOADER + loading + END.format(module=module, payload=json.dumps(payload))
