"""``python3 -m probe GIVEN``: make every probe, each in a child, and print what they say as JSON.

GIVEN is a JSON object; ``only`` in it names the probes to make. With ``prepare`` in it there is first put what the searches would have to find: a control.
"""

from __future__ import annotations

import json
import os
import sys

from . import calls, network, surroundings
from .tools import Given, apart


def prepare() -> None:
    """As root of a container that is not a sandbox: one of each kind of file that is searched for."""
    os.makedirs("/srv/found/.ssh", exist_ok=True)
    for name in (".ssh/id_ed25519", "set-id", "capable"):
        with open(f"/srv/found/{name}", "w"):
            os.chmod(f"/srv/found/{name}", 0o755)
    os.chmod("/srv/found/set-id", 0o4755)
    surroundings.set_capability("/srv/found/capable")
    with open("/srv/found/secret", "w") as file:
        file.write(os.environ["API_KEY"])
    # Inherited by the probes, as a descriptor that a runtime forgot would be.
    os.set_inheritable(os.open("/srv/found", os.O_RDONLY), True)


def main(given: Given) -> None:
    if given.get("prepare"):
        prepare()
    made = {**calls.PROBES, **surroundings.PROBES, **network.PROBES}
    if "only" in given:
        made = {name: made[name] for name in given["only"]}
    else:
        # Once for all of them: they are children.
        surroundings.all_files()
    print(json.dumps({name: apart(lambda probe=probe: probe(given)) for name, probe in made.items()}))  # type: ignore[misc]


main(json.loads(sys.argv[1]))
