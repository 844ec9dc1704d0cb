from __future__ import annotations

import pytest

from policy.yamltree import Mark, parse


def test_plain_scalars_follow_the_core_schema() -> None:
    document = parse(
        "a: off\nb: yes\nc: true\nd: 010\ne: 1.5\nf: 0x10\ng:\nh: '12'\ni: 12:30\nj: ~\nk: .inf\n"
    )
    assert document.problems == []
    assert document.value == {
        "a": "off",
        "b": "yes",
        "c": True,
        "d": 10,
        "e": 1.5,
        "f": 16,
        "g": None,
        "h": "12",
        "i": "12:30",
        "j": "~",
        "k": float("inf"),
    }


def test_every_value_and_key_has_its_position() -> None:
    document = parse("# comment\nmounts:\n  rw:\n    - /a\n    - /b\n")
    assert document.marks[("mounts", "rw", 1)] == Mark(5, 7, "/b")
    assert document.keys[("mounts", "rw")] == Mark(3, 3, "rw")
    assert document.place(("mounts", "rw", 1, "nothing", "here"))[0] == ("mounts", "rw", 1)
    assert document.place(("nowhere",)) == ((), Mark(2, 1))


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("a: &x 1\nb: *x\n", "anchors", 1),
        ("a: 1\nb: *x\n", "aliases", 2),
        ("a: !!python/object:os.system x\n", "tags", 1),
        ("a: !!str 3\n", "tags", 1),
        ("a: 1\n---\nb: 2\n", "second YAML document", 2),
        ("%YAML 1.1\n---\na: off\n", "directives", 0),
        ("# c\n\n%TAG ! x\n---\na: 1\n", "directives", 0),
        ("a: 1\nb: 2\na: 3\n", "given twice, first in line 1", 3),
        ("a: {b: 1, b: 2}\n", "given twice", 1),
        ("<<: {a: 1}\n", "merge keys", 1),
        ("1: a\n", "key must be text", 1),
        ("? [a]\n: b\n", "key must be text", 1),
        ("a: [1\n", "not YAML", 2),
        ("a: b: c\n", "not YAML", 1),
        ("a:\n\t- b\n", "not YAML", 2),
        ("a: 'x\n", "not YAML", 2),
        ("a: \x07\n", "U+0007", 1),
        ("ok: 1\na: \x1b[31m\n", "U+001B", 2),
        ('a: "\\uD800"\n', "surrogate", 1),
        ('a: "\\0"\n', "NUL", 1),
        ('a: "\\UFFFFFFFF"\n', "not YAML", 0),
        ("[" * 5000, "nested deeper", 1),
        ("a: " + "{a: " * 300, "nested deeper", 1),
        ("- " * 5000 + "a", "nested deeper", 1),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_what_is_not_plain_yaml_is_a_problem_with_a_line(text: str, message: str, line: int) -> None:
    problems = parse(text).problems
    assert any(message in problem.what and problem.line == line for problem in problems), problems


def test_first_of_two_equal_keys_keeps_its_value_and_its_place() -> None:
    document = parse("a:\n  b: 1\na:\n  b: 2\n")
    assert document.value == {"a": {"b": 1}}
    assert document.marks[("a", "b")].line == 2


def test_alias_that_looks_like_a_zone_says_to_quote_it() -> None:
    (problem,) = parse("allow:\n  - *.example.com\n").problems
    assert problem.fix == "quote it: '*.example.com'"


def test_text_of_a_broken_value_is_not_repeated() -> None:
    document = parse('key: "sk-very-secret \\q"\n')
    assert document.problems
    assert all("sk-very-secret" not in problem.render("f") for problem in document.problems)


@pytest.mark.parametrize("digits", [65, 5000])
def test_number_too_long_to_be_one_stays_text(digits: int) -> None:
    assert parse(f"a: {'9' * digits}\n").value == {"a": "9" * digits}
