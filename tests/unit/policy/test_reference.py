"""The reference of keys: complete, the same in the page and in the JSON Schema, and true of both."""

from __future__ import annotations

import json
from pathlib import Path

from policy import reference
from policy.init import starter
from policy.yamltree import parse

ROOT = Path(__file__).parents[3]


def test_every_key_has_a_meaning_and_no_other_has() -> None:
    assert [key for key, _ in reference.keys_and_fields()] == list(
        dict.fromkeys(key for key, _ in reference.keys_and_fields())
    )
    assert {key for key, _ in reference.keys_and_fields()} == set(reference.MEANING)


def test_the_page_is_made_from_the_schema() -> None:
    text = (ROOT / reference.PAGE).read_text()
    assert reference.page(text) == text, "python -m policy.reference"


def test_the_json_schema_describes_every_key_and_allows_no_other() -> None:
    schema = json.loads(reference.schema_text())
    for key in reference.MEANING:
        node = schema
        for part in key.split("."):
            assert node["additionalProperties"] is False, key
            node = node["properties"][part.removesuffix("[]")]
            if part.endswith("[]"):
                node = node["items"]
                node = node["anyOf"][1] if "anyOf" in node else node
        assert node["description"], key
    assert "$ref" not in json.dumps(schema)
    assert schema["required"] == ["profile"]


def test_what_init_writes_points_editors_to_the_schema() -> None:
    first, *_ = starter("opencode", "demo", "/home/me/corral.schema.json").splitlines()
    assert first == "# yaml-language-server: $schema=/home/me/corral.schema.json"
    assert not starter("opencode", "demo").startswith("# yaml")
    assert "\nevil" not in starter("opencode", "demo", "/home/\nevil")
    assert set(parse(starter("opencode", "demo")).value) <= set(
        json.loads(reference.schema_text())["properties"]
    )
