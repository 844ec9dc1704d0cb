"""What programs are answered: the one printer, reading descriptions, and that no command is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest
import typer

from corral import answers
from corral.answers import page
from corral.answers.shapes import Row, problems, rows
from corral.answers.table import ACTING, ANSWERS, FORMATS, STREAMS
from corral.clireference import commands
from corral.output import print_text
from corral.sessioncommands import app

CORRAL = Path(answers.__file__).parents[1]


class Inner(TypedDict):
    """Inside."""

    text: Annotated[str, "a text"]


class Outer(TypedDict):
    """Outside."""

    number: Annotated[float, "a number"]
    whole: Annotated[int | None, "perhaps a number"]
    word: Annotated[Literal["a", "b"], "one of two"]
    some: Annotated[list[Inner], "some"]
    by_name: Annotated[dict[str, Inner | str], "by name"]
    more: NotRequired[Annotated[bool, "seldom"]]


class Silent(TypedDict):
    """Not said."""

    text: str


GOOD: dict[str, Any] = {
    "number": 1,
    "whole": None,
    "word": "a",
    "some": [{"text": "x"}],
    "by_name": {"k": {"text": "x"}, "l": "x"},
}


def test_the_schema_comes_first_and_once() -> None:
    for made in (answers.text({"b": 1, "a": [1]}), answers.line({"b": 1, "a": [1]})):
        assert list(json.loads(made)) == ["schema", "b", "a"]
        assert json.loads(made)["schema"] == answers.SCHEMA == 1
    assert "\n" not in answers.line({"a": "x\ny", "b": {"c": [1, 2]}})


@pytest.mark.parametrize("encode", [answers.text, answers.line])
def test_what_is_printed_is_json_whatever_is_in_it(encode: Any, capsys: pytest.CaptureFixture[str]) -> None:
    odd = "".join(map(chr, range(0x300))) + "\u2028\u202e\U000e0001\udce9"
    print_text(encode({"odd": odd, odd: 1}))
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"schema": 1, "odd": odd, odd: 1}
    assert printed.isascii()


def test_a_value_is_compared_with_its_description() -> None:
    seen: set[str] = set()
    assert problems(GOOD, Outer, seen=seen) == []
    places = [row.place for row in rows(Outer)]
    assert places == ["number", "whole", "word", "some", "some[].text", "by_name", "by_name.*.text", "more"]
    assert seen == {*places} - {"more"}
    assert problems({**GOOD, "more": True}, Outer) == []
    assert next(rows(Outer)) == Row("number", "number", "a number", optional=False)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"extra": 1}, "extra: is not documented"),
        ({"some": [{"text": "x", "odd": 1}]}, "some[].odd: is not documented"),
        ({"some": [{}]}, "some[].text: is missing"),
        ({"by_name": {"k": {}}}, "by_name.*.text: is missing"),
        ({"number": True}, "number: is True, and not number"),
        ({"number": None}, "number: is None, and not number"),
        ({"whole": 1.5}, "whole: is 1.5, and not whole number"),
        ({"word": "c"}, "word: is 'c', and not `a` or `b`"),
        ({"some": {"text": "x"}}, "some: is {'text': 'x'}, and not list of object"),
        ({"more": None}, "more: is None, and not true or false"),
    ],
)
def test_what_differs_from_its_description_is_named(changes: dict[str, Any], told: str) -> None:
    assert problems({**GOOD, **changes}, Outer) == [told]


def test_a_field_without_a_meaning_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Silent\.text says not what it means"):
        list(rows(Silent))


def tree() -> dict[str, bool]:
    """Every command that is shown -> whether it has --json."""
    found = {one.path: one for one in commands(typer.main.get_command(app))}
    groups = {path for path in found if any(other.startswith(path + " ") for other in found)}
    return {
        path: any("--json" in name for name, _ in one.rows)
        for path, one in found.items()
        if path not in groups
    }


def described() -> set[str]:
    return {name.partition(" --")[0] for name in ANSWERS}


def test_every_command_with_json_is_on_the_page_and_no_other() -> None:
    assert described() == {path for path, has in tree().items() if has}


def test_a_command_without_json_is_known_to_change_something_or_to_have_a_format_of_its_own() -> None:
    assert {path for path, has in tree().items() if not has} == {*FORMATS, *ACTING}


def test_each_variant_on_the_page_is_an_option_of_its_command() -> None:
    found = {one.path: one for one in commands(typer.main.get_command(app))}
    for name in ANSWERS:
        path, sign, option = name.partition(" --")
        assert not sign or any(f"--{option}" in row.replace(",", "").split() for row, _ in found[path].rows)
    assert set(ANSWERS) >= STREAMS


def test_the_page_is_that_of_today() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run: python -m corral.answers.page"
    for name, shapes in ANSWERS.items():
        section = page.page().split(f"\n## {name}\n")[1].split("\n## ")[0]
        for shape in shapes:
            for row in rows(shape):
                assert f"| `{row.place}` | {row.type} | {row.meaning}" in section


def test_no_field_has_the_name_of_the_first_one() -> None:
    for shapes in ANSWERS.values():
        for shape in shapes:
            assert "schema" not in {row.place for row in rows(shape)}


def test_no_command_makes_its_own_json() -> None:
    modules = [*CORRAL.glob("*commands.py"), CORRAL / "quick.py", CORRAL / "denied.py", CORRAL / "logs.py"]
    assert len(modules) > 7
    for module in (*modules, CORRAL / "uninstall.py"):
        assert "json.dump" not in module.read_text(), module.name
