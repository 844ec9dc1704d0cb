from __future__ import annotations

import difflib

import pytest

from policy.declaration import Name
from policy.edit import EditError, add_entry, entry, remove_entries

from .conftest import Workspace

NEW = "new.example.com"
HEAD = "# top\nprofile: opencode   # harness\n"
FORMS = {
    "block": HEAD + "egress:\n  # names\n  allow:\n    - a.example.com   # one\n    # before b\n    - b.example.com # two\n  # end\n",
    "block at the key's column": HEAD + "egress:\n  allow:\n  - a.example.com\n\n# tail\nname: x\n",
    "long form last": HEAD + "egress:\n  allow:\n    - host: a.example.com\n      ports: [443, 22]  # why\n      optional: true\nname: x\n",
    "flow entry last": HEAD + "egress:\n  allow:\n    - {host: a.example.com, ports: [443]}  # c\n",
    "flow list": HEAD + "egress: # e\n  allow: [a.example.com, 'b.example.com']  # c\n",
    "flow list over lines": HEAD + "egress:\n  allow: [\n    a.example.com,  # one\n    b.example.com   # two\n  ]\n",
    "empty flow list": HEAD + "egress:\n  allow: []\n",
    "flow egress": HEAD + "egress: {profile_defaults: false}\n",
    "empty flow egress": HEAD + "egress: {}\n",
    "no allow": HEAD + "egress:\n    profile_defaults: false   # ours\n\n# tail\nname: x\n",
    "allow with commented entries": HEAD + "egress:\n  allow:\n  #  - a.example.com\nname: x\n",
    "egress with commented keys": HEAD + "egress:\n#  allow:\n#    - a.example.com\nname: x\n",
    "no egress": HEAD + "name: x  # last\n",
    "no final newline": HEAD + "name: x",
    "no final newline in the list": HEAD + "egress:\n  allow:\n    - a.example.com",
    "flow document": "{profile: opencode}\n",
    "windows lines": HEAD.replace("\n", "\r\n") + "egress:\r\n  allow:\r\n    - a.example.com\r\nname: x\r\n",
    "quoted keys": HEAD + "'egress':\n  \"allow\":\n    - a.example.com\n",
}  # fmt: skip


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS.keys())
def test_one_name_is_added_and_every_line_that_was_there_stays(workspace: Workspace, text: str) -> None:
    before = workspace.load(text)
    edited = add_entry(text, NEW)
    after = workspace.load(edited)
    assert [one.host for one in after.policy.egress.allow] == [
        *[one.host for one in before.policy.egress.allow],
        NEW,
    ]
    assert after.policy.egress.model_copy(update={"allow": ()}) == before.policy.egress.model_copy(
        update={"allow": ()}
    )
    same = {"egress": None}
    assert after.policy.model_copy(update=same) == before.policy.model_copy(update=same)
    # Only insertions: what was written is still written, in its order.
    steps = difflib.SequenceMatcher(None, text, edited, autojunk=False).get_opcodes()
    assert {step[0] for step in steps} <= {"equal", "insert"}
    assert len(edited) - len(text) < 60
    if "\r" in text:
        assert edited.count("\n") == edited.count("\r\n")


@pytest.mark.parametrize(
    "text",
    [
        "", "- a\n", "egress: [\n", "egress: no\n", "egress:\n  allow: a.example.com\n", "egress:\n  allow: {a: b}\n",
        "egress: {allow: }\n", "egress:\n  allow:\n    -\n      host: a.example.com\n",
    ],
)  # fmt: skip
def test_what_is_not_understood_is_not_edited(text: str) -> None:
    with pytest.raises(EditError):
        add_entry(text, NEW)


def test_an_entry_is_as_short_as_it_can_be(workspace: Workspace) -> None:
    assert entry(Name(host=NEW)) == NEW
    assert (
        entry(Name(host=NEW, ports=(443, 22)), force=True)
        == f"{{host: {NEW}, ports: [443, 22], force: true}}"
    )
    name = Name(host=NEW, ports=(22,), optional=True, liveness=False)
    loaded = workspace.load(add_entry("profile: opencode\negress: {profile_defaults: false}\n", entry(name)))
    assert loaded.declaration.names == (name,)


GONE = "a.example.com"
LISTS = {
    "block": HEAD + "egress:\n  # names\n  allow:\n    - a.example.com   # one\n    # before b\n    - b.example.com # two\n  # end\n",
    "last": HEAD + "egress:\n  allow:\n    - b.example.com  # two\n    # before a\n    - a.example.com\nname: x # y\n",
    "only one": HEAD + "egress:\n  allow:   # list\n    # before a\n    - a.example.com\n# tail\nname: x\n",
    "long form": HEAD + "egress:\n  allow:\n    - host: a.example.com\n      ports: [443, 22]  # why\n      optional: true\n    - b.example.com\n",
    "twice": HEAD + "egress:\n  allow:\n    - a.example.com\n    - b.example.com\n    - {host: a.example.com, ports: [22]}  # c\n",
    "flow": HEAD + "egress: # e\n  allow: [a.example.com, 'b.example.com']  # c\n",
    "flow, last": HEAD + "egress: # e\n  allow: ['b.example.com', a.example.com]  # c\n",
    "flow, the two last": HEAD + "egress:\n  allow: [b.example.com, a.example.com, {host: a.example.com, ports: [22]}]\n",
    "flow, only one": HEAD + "egress:\n  allow: [ a.example.com ]  # c\n",
    "flow document": "{profile: opencode, egress: {allow: [a.example.com, b.example.com]}}\n",
    "no final newline": HEAD + "egress:\n  allow:\n    - b.example.com\n    - a.example.com",
    "no final newline, the two last": HEAD + "egress:\n  allow:\n    - b.example.com\n    - a.example.com\n    - {host: a.example.com, ports: [22]}",
    "windows lines": HEAD.replace("\n", "\r\n") + "egress:\r\n  allow:\r\n    - b.example.com\r\n    - a.example.com\r\nname: x\r\n",
    "written otherwise": HEAD + "egress:\n  allow:\n    - A.Example.com.\n    - b.example.com\n",
}  # fmt: skip


@pytest.mark.parametrize("text", LISTS.values(), ids=LISTS.keys())
def test_one_name_is_taken_out_and_every_other_line_stays(workspace: Workspace, text: str) -> None:
    before, edited = workspace.load(text), remove_entries(text, GONE)
    after = workspace.load(edited)
    assert [one.host for one in after.policy.egress.allow] == [
        one.host for one in before.policy.egress.allow if one.host != GONE
    ]
    same = {"egress": None}
    assert after.policy.model_copy(update=same) == before.policy.model_copy(update=same)
    left = edited.replace(" []", "").splitlines()
    for line in text.splitlines():
        # Comments of their own, and all that is not about it.
        if "[" not in line and (line.strip().startswith("#") or ("b.example" in line or ":" not in line)):
            assert line in left or GONE in line.lower()
    assert GONE not in edited.lower()
    if "\r" in text:
        assert edited.count("\n") == edited.count("\r\n")


@pytest.mark.parametrize(
    "text",
    [
        "", "profile: opencode\n", "egress: no\n", "egress:\n  allow: a.example.com\n", "egress:\n  allow: [b.example.com]\n",
        "egress:\n  allow: [\n    a.example.com,  # one\n    b.example.com\n  ]\n", "egress:\n  allow:\n    -\n      host: a.example.com\n",
        "egress:\n  allow: [\n    a.example.com # only\n  ]\n",
    ],
)  # fmt: skip
def test_a_name_that_cannot_be_taken_out_cleanly_is_not(text: str) -> None:
    with pytest.raises(EditError):
        remove_entries(text, GONE)
