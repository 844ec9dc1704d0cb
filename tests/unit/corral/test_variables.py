from __future__ import annotations

from collections.abc import Sequence

import pytest

from corral.variables import MOST, chosen
from policy.errors import ArgumentError
from policy.secrets import MAX_VALUE

HOST = {"TOKEN": "from-the-host", "ODD": "a\udcffb"}


def test_values_are_the_option_s_or_the_environment_s_and_the_last_one_counts() -> None:
    given = ["A=1", "B=two words = three", "TOKEN", "EMPTY=", "A=2"]
    assert chosen(given, HOST, ()) == {
        "A": "2",
        "B": "two words = three",
        "TOKEN": "from-the-host",
        "EMPTY": "",
    }


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("s3cr3t-part=x", "number 2 begins with no variable name"),
        ("=x", "number 2 begins with no variable name"),
        ("", "number 2 begins with no variable name"),
        ("1A=s3cr3t", "no variable name"),
        ("LD_PRELOAD=/s3cr3t.so", "LD_PRELOAD: sets what code every program loads"),
        ("path=/s3cr3t", "path: sets where programs are found"),
        ("CORRAL_GATE=s3cr3t", "sets how corral works"),
        ("https_proxy=http://s3cr3t.example", "sets where traffic goes"),
        ("FIXED=s3cr3t", "FIXED: is set by the profile"),
        ("MISSING", "MISSING: not set in your environment"),
        ("ODD", "ODD: its value is not UTF-8"),
        ("A=s3cr3t\0x", "a zero byte"),
        ("A=" + "s3cr3t" * MAX_VALUE, "longer than"),
    ],
)
def test_what_is_refused_is_told_without_its_value(given: str, told: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        chosen(["FINE=1", given], HOST, {"FIXED"})
    assert told in caught.value.message
    assert caught.value.exit_code == 2
    assert "s3cr3t" not in caught.value.render()


def test_all_together_have_a_limit() -> None:
    many: Sequence[str] = [f"A{number}={'x' * MAX_VALUE}" for number in range(MOST // MAX_VALUE + 1)]
    assert len(chosen(many[:2], {}, ())) == 2
    with pytest.raises(ArgumentError, match="in all"):
        chosen(many, {}, ())
