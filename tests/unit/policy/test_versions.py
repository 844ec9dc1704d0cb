"""Which versions work together: every combination of older and newer parts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from enforcer.netfilter import model, schemas
from policy import versions
from policy.errors import CorralError
from policy.versions import Part

ALL = tuple(versions.SCHEMAS)
NOW = dict(versions.SCHEMAS)
RELEASES = {"older": "1.1.0", "same": "1.2.0", "newer": "1.3.0"}


def part(name: str, release: str | None = "1.2.0", **schemas: int | None) -> Part:
    found = {**NOW, **schemas}
    return Part(name, release, {key: value for key, value in found.items() if value is not None})


def ask(cli: Part, enforcer: Part, writer: Part | None) -> tuple[str, str] | None:
    found = versions.mismatch(cli, enforcer, writer)
    if found is not None:
        message, fix = found
        assert "corral install" in fix
        assert " is version " in message
    return found


def test_equal_parts_work_together() -> None:
    assert ask(part("corral"), part("the enforcer"), part("the writer")) is None
    # A writer that cannot be asked is another problem than one of another version.
    assert ask(part("corral"), part("the enforcer"), None) is None


@pytest.mark.parametrize(("enforcer", "writer"), list(itertools.product(RELEASES, RELEASES)))
def test_releases(enforcer: str, writer: str) -> None:
    """The command line is ``same``."""
    found = ask(part("corral"), part("E", RELEASES[enforcer]), part("W", RELEASES[writer]))
    if enforcer != "same":
        assert found is not None
        assert found[0] == f"corral is version 1.2.0, but E is {RELEASES[enforcer]}"
        assert ("upgrade corral to 1.3.0" in found[1]) == (enforcer == "newer")
    elif writer == "older":
        assert found == ("E is version 1.2.0, but W is 1.1.0", "run: corral install")
    else:
        # Another user of this machine brought a later one, which understands the same.
        assert found is None


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("other", [-1, 1, None])
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("where", ["cli", "enforcer", "writer"])
def test_one_schema_that_differs_or_is_missing_is_enough(
    where: str, release: str, other: int | None, name: str
) -> None:
    parts = {"cli": part("corral"), "enforcer": part("E"), "writer": part("W")}
    value = None if other is None else NOW[name] + other
    parts[where] = part(parts[where].name, RELEASES[release], **{name: value})
    found = ask(parts["cli"], parts["enforcer"], parts["writer"])
    # The command line has no say in what enforcer and writer speak, nor the writer in what users keep.
    matters = (
        name
        in {
            "cli": versions.USER_SCHEMAS,
            "enforcer": ALL,
            "writer": versions.WRITER_SCHEMAS,
        }[where]
    )
    if matters:
        assert found is not None
        assert RELEASES[release] in found[0]
        shown = "unknown" if value is None else str(value)
        # Between releases that differ anyway, what comes after is not looked at.
        looked_at = release == "same" or where == "writer" or name in versions.USER_SCHEMAS
        assert not looked_at or f"{name} schema" in found[0]
        assert not looked_at or shown in found[0]
    elif where == "writer":
        assert (found is not None) == (release == "older")
    else:
        assert (found is not None) == (release != "same")


def test_that_neither_says_it_is_no_agreement() -> None:
    found = ask(part("corral"), part("E", protocol=None), part("W", protocol=None))
    assert found is not None
    assert "protocol schema unknown and unknown" in found[0]


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"version": None},
        {"version": 3, "schemas": 3},
        {"version": "1.2.0"},
        {"version": "1.2.0", "schemas": []},
        {"version": "1.2.0", "schemas": {"api": "1", "labels": None, "state": True}},
    ],
)
def test_an_answer_without_the_fields_is_a_mismatch_and_no_crash(answer: dict[str, object]) -> None:
    told = versions.parse("the enforcer", answer)
    found = ask(part("corral"), told, None)
    assert found is not None
    assert "1.2.0, but the enforcer is" in found[0]
    assert "unknown" in found[0]
    found = ask(part("corral"), part("the enforcer"), versions.parse("the writer", answer))
    assert found is not None


def test_what_a_part_says_of_itself_is_read_back() -> None:
    told = json.loads(json.dumps(versions.describe("1.2.0", versions.WRITER_SCHEMAS)))
    assert versions.parse("x", told) == Part("x", "1.2.0", {k: NOW[k] for k in versions.WRITER_SCHEMAS})


def test_the_writer_s_own_copy_of_the_numbers_is_the_same() -> None:
    assert {name: NOW[name] for name in versions.WRITER_SCHEMAS} == schemas.SCHEMAS
    assert NOW[versions.PROTOCOL] == model.PROTOCOL_VERSION


ORDER = (
    "0.1",
    "0.1.1.dev3",
    "0.1.1a1",
    "0.1.1b2",
    "0.1.1rc1",
    "0.1.1",
    "0.1.1.post1",
    "0.2.0",
    "0.10",
    "1.0.0",
)


def test_releases_are_ordered_as_people_read_them() -> None:
    mixed = list(ORDER[::-1])
    mixed.sort(key=versions.key)
    assert mixed == list(ORDER)
    assert versions.key("1.0") == versions.key("1.0.0") == versions.key("1.0+local")
    assert all(versions.older(unknown, "0.0.1") for unknown in (None, "", "unreleased", "1.x"))
    assert not versions.older("0.1", None)


def test_installing_goes_forward_only() -> None:
    own = part("corral")
    assert versions.downgrade(own, part("there", "1.2.0")) is None
    assert versions.downgrade(own, part("there", "1.1.0")) is None
    assert versions.downgrade(own, part("there", None)) is None
    for there in (
        part("there", "1.3.0"),
        part("there", "1.2.0", skeleton=3),
        part("there", "1.1.0", protocol=7),
    ):
        found = versions.downgrade(own, there)
        assert found is not None
        assert "1.2.0" in found[0]
        assert str(there.release) in found[0]
        assert "corral uninstall" in found[1]
    # What users keep is theirs, and looked at for each.
    assert versions.downgrade(own, part("there", "1.2.0", state=9, labels=9, api=9)) is None


def write_state(data: Path, text: str) -> None:
    data.mkdir(exist_ok=True)
    (data / versions.STATE_FILE).write_text(text)


def test_state_is_marked_by_who_opens_it_and_left_alone_by_who_looks(tmp_path: Path) -> None:
    data = tmp_path / "corral"
    assert versions.check_state(data, "1.2.0") is None
    assert not data.exists()
    versions.open_state(data, "1.2.0")
    assert data.stat().st_mode & 0o777 == 0o700
    assert versions.check_state(data, "1.1.0") == Part("the state", "1.2.0", {"state": NOW["state"]})
    before = (data / versions.STATE_FILE).stat().st_mtime_ns
    versions.open_state(data, "1.2.0")
    assert (data / versions.STATE_FILE).stat().st_mtime_ns == before
    versions.open_state(data, "1.3.0")
    assert "1.3.0" in (data / versions.STATE_FILE).read_text()
    assert [path.name for path in data.iterdir()] == [versions.STATE_FILE]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": "9.9", "schemas": {"state": 99}}', r"corral 9\.9 \(state schema 99\); this is 1\.2\.0"),
        ('{"schemas": {"state": 99}}', "state schema 99"),
        ("", "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "names no schema"),
        ('{"version": "1.2.0", "schemas": {"state": "1"}}', "names no schema"),
    ],
)
def test_state_that_may_be_newer_is_refused_and_stays_as_it_is(
    tmp_path: Path, text: str, message: str
) -> None:
    write_state(tmp_path, text)
    for look in (versions.check_state, versions.open_state):
        with pytest.raises(CorralError, match=message) as caught:
            look(tmp_path, "1.2.0")
        assert caught.value.hint
        assert caught.value.exit_code == 1
    assert (tmp_path / versions.STATE_FILE).read_text() == text
