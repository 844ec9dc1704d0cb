"""What a library says of a value never reaches the user in its own words."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core.core_schema import ErrorType

from policy.explain import explain
from policy.yamltree import parse

DOCUMENT = parse("limits:\n  pids: abc\n")


class Lax(BaseModel):
    model_config = ConfigDict(strict=False)
    pids: int


def test_what_is_no_number_is_told_in_our_words() -> None:
    with pytest.raises(ValidationError) as caught:
        Lax.model_validate({"pids": "abc"})
    (error,) = caught.value.errors()
    assert error["type"] == "int_parsing"
    assert explain(DOCUMENT, error, ("limits",)).what == "must be a whole number"


@pytest.mark.parametrize("kind", get_args(ErrorType))
def test_no_kind_of_error_is_told_in_the_words_of_the_library(kind: str) -> None:
    context = dict.fromkeys(("ge", "gt", "le", "lt", "max_length", "min_length", "expected"), 3)
    error: dict[str, Any] = {"type": kind, "loc": ("pids",), "msg": "Input should be odd", "ctx": context}
    said = explain(DOCUMENT, error, ("limits",)).what
    assert "Input" not in said and "{" not in said
    assert said.startswith(("must", "is", "has", "unknown key"))


def test_there_are_kinds_of_errors_to_look_at() -> None:
    assert {"int_parsing", "string_type", "missing"} <= set(get_args(ErrorType))
