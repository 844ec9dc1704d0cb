"""Each harness in a sandbox whose model is behind the proxy: real, unmodified, told of it by its environment alone."""

from __future__ import annotations

import json

import pytest

from policy import profiles
from tests.lab.layout import Layout
from tests.models.faraway import ADDRESS, PORT, faraway
from tests.models.host import FINAL

from .host import Host
from .proxied import WAITS
from .test_harnesses import ALL, COMMANDS, EDIT, KEY, Harness

ZONE = "models.corral.example"
NAME = f"one.{ZONE}"


def policy(harness: Harness) -> str:
    """Return a policy in which the model's zone is all there is."""
    options = harness.options.replace("http://corral-host:PORT", f"https://{NAME}:{PORT}")
    return f"""\
profile: {harness.name}
limits: {{best_effort: true}}
egress: {{profile_defaults: false, allow: [{{host: "*.{ZONE}", ports: [{PORT}]}}]}}
secrets: {{env_file: ~/.config/corral/{harness.name}.env}}
approvals: "off"
profile_options: {{{harness.name}: {options}}}
"""


@pytest.mark.engine(
    "trixie", reason="what a harness does with its environment has nothing to do with the engine"
)
@pytest.mark.parametrize("harness", ALL.values(), ids=lambda one: one.name)
def test_a_one_shot_reaches_its_model_through_the_proxy_and_asks_for_nothing_else(
    host: Host, harness: Harness
) -> None:
    host.internet.set_name(NAME, [ADDRESS])
    file = f"{host.box.home}/.config/corral/{harness.name}.env"
    host.box.write(file, f"{harness.key}='{KEY}'\n", mode=0o600)
    project = host.project(f"far-{harness.name}", policy(harness))
    project.corral("build", timeout=560)
    # The proxy stays, so that what it says can be read afterwards.
    project.start(*WAITS, marker="up")
    with faraway(Layout.of(), NAME, COMMANDS, KEY, EDIT) as model:
        done = project.inside(*harness.one_shot(), check=False, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
        assert FINAL in done.stdout
        assert project.read("made.txt") == "1000\n"
        assert {row["protocol"] for row in model.requests() if "protocol" in row} == {harness.protocol}
    log = project.corral("logs", "--proxy").stdout
    asked = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert any(row["event"] == "allowed" and (row["name"], row["port"]) == (NAME, PORT) for row in asked), log
    others = {str(row.get("name")) for row in asked if row["event"] in ("denied", "refused", "closed")}
    print(f"{harness.name}: beside the model {sorted(others) or 'nothing'}")
    assert others <= set(profiles.get(harness.name).contacts)
