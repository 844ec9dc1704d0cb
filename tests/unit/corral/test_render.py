"""What a policy becomes, as a golden file, and how it is compared with what is built.

UPDATE_GOLDEN=1 pytest tests/unit/corral/test_render.py     write it anew
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from docker.errors import ImageNotFound

from agent_image import dockerfile
from agent_image.context import LABEL_INPUTS, digest, write_sealed
from corral import build, render
from corral.context import Invocation
from policy.container import resolver_rows
from policy.hostclient import BuildEnvironment, Proxies
from policy.loader import LoadedPolicy
from tests.unit.corral.conftest import POLICY
from tests.unit.corral.test_protect import repository

GOLDEN = Path(__file__).parent / "golden" / "render.txt"
RESOLVER = [
    f"corral-host {source},{proto}:{port},{target}"
    for source, proto, port, target in sorted(resolver_rows("<address>", "<gateway>"))
]
FULL = POLICY + "host_services:\n  - {name: llama, port: 8081}\nmounts:\n  ro: [{home}/notes]\n"


@pytest.fixture
def sandbox(
    invocation: Invocation,
    loaded_of: Callable[[str], LoadedPolicy],
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Invocation:
    (home / "notes").mkdir()
    loaded = loaded_of(FULL.replace("{home}", str(home)))
    repository(loaded.project)
    monkeypatch.setattr(invocation.api, "version", lambda: {"Arch": "amd64"}, raising=False)
    monkeypatch.setattr(build, "gather", lambda *_: BuildEnvironment(Proxies()))
    invocation.__dict__.update(loaded=loaded, user=replace(invocation.user, uid=1000, gid=1000))
    return invocation


def plain(text: str, sandbox: Invocation) -> str:
    """Return the text without what differs from machine to machine."""
    text = text.replace(str(sandbox.user.home), "/home/me")
    text = text.replace(sandbox.loaded.sandbox.token, "0123abcd")
    return re.sub(r"(?<=policy )[0-9a-f]{64}|(?<=sha256:)[0-9a-f]{64}", "<hash>", text)


def steady(body: dict[str, Any]) -> dict[str, Any]:
    """Leave out what has golden files of its own, and the hashes that change with it."""
    rows = [{**row, "sha256": "<hash>"} for row in body["files"]]
    return {**body, "dockerfile": "<dockerfile>", "files": rows}


def test_what_a_policy_becomes_is_the_golden_file(sandbox: Invocation) -> None:
    before = sorted(sandbox.user.home.rglob("*"))
    body = render.rendered(sandbox)
    spec, _ = build.inputs(sandbox, sandbox.loaded)
    assert body["dockerfile"] == dockerfile.render(spec)
    found = plain(render.text(steady(body)), sandbox) + "\n"
    assert sorted(sandbox.user.home.rglob("*")) == before
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(found)
    assert found == GOLDEN.read_text()


def test_programs_get_the_same_and_no_secret(sandbox: Invocation) -> None:
    body = json.loads(json.dumps(render.rendered(sandbox)))
    assert body["labels"]["io.corral.egress"] == sandbox.loaded.declaration.to_label()
    assert {
        "source": str(sandbox.loaded.project / ".git/hooks"),
        "target": str(sandbox.loaded.project / ".git/hooks"),
        "read_only": True,
    } in body["mounts"]
    assert body["kernel"] == [
        "corral-pins <address>,tcp:443,<each address of api.example.com>",
        "corral-pins <address>,tcp:22,<each address of git.example.com>",
        "corral-pins <address>,tcp:443,<each address of git.example.com>",
        "corral-host <address>,tcp:8081,<gateway>",
    ]


def test_what_is_built_is_compared_with_the_policy(
    sandbox: Invocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    images: dict[str, Any] = {}

    def inspect(tag: str) -> Any:
        if tag not in images:
            raise ImageNotFound("no such image")
        return images[tag]

    monkeypatch.setattr(sandbox.api, "inspect_image", inspect, raising=False)
    tag, directory = sandbox.loaded.sandbox.image, sandbox.read_paths.build
    assert render.differences(sandbox) == [f"there is no {directory}", f"there is no image {tag}"]
    spec, _ = build.inputs(sandbox, sandbox.loaded)
    write_sealed(spec, directory)
    images[tag] = {"Config": {"Labels": {LABEL_INPUTS: digest(spec)}}}
    assert render.differences(sandbox) == []
    (directory / "Dockerfile").write_text("FROM evil\n")
    images[tag] = {"Config": {"Labels": {LABEL_INPUTS: "sha256:0"}}}
    assert render.differences(sandbox) == [
        "changed: Dockerfile",
        f"the image {tag} was made from other inputs",
    ]


@pytest.mark.parametrize(
    ("egress", "rows"),
    [
        (
            "{profile_defaults: false, mode: proxy, allow: [a.example.com]}",
            [
                "corral-pins <the proxy's address>,tcp:443,<each address of a.example.com, once it is asked for>",
                "corral-host <address>,tcp:8443,<gateway>",
            ],
        ),
        (
            "{profile_defaults: false, dns: answer, allow: ['*.example.com']}",
            [
                "corral-pins <the proxy's address>,tcp:443,<each address of *.example.com, once it is asked for>",
                "corral-pins <address>,tcp:443,<each address of *.example.com, once it is asked for>",
                "corral-host <address>,tcp:8443,<gateway>",
                *RESOLVER,
            ],
        ),
        (
            "{mode: open}",
            RESOLVER,
        ),
    ],
)
def test_what_is_asked_for_is_shown_with_who_gets_it(
    loaded_of: Callable[[str], LoadedPolicy], egress: str, rows: list[str]
) -> None:
    assert render.kernel(loaded_of(f"profile: opencode\negress: {egress}\n").declaration) == rows
