"""Percentiles by nearest rank, and what the kernel's messages are read as."""

from __future__ import annotations

import struct

import pytest

from tests.bench.healwatch import chain_of, messages
from tests.bench.images import megabytes
from tests.bench.statistics import percentile, summary


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert [percentile(values, part) for part in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([7.0], 0.99) == 7.0
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 0.5)
    assert summary([0.001, 0.0021]) == {"p50_ms": 1.0, "p99_ms": 2.1, "max_ms": 2.1}


def attribute(kind: int, text: str) -> bytes:
    value = text.encode() + b"\0"
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def message(kind: int, payload: bytes) -> bytes:
    return struct.pack("=IHHII", 20 + len(payload), kind, 0, 0, 0) + b"\2\0\0\0" + payload


def test_rules_are_told_by_their_chain_and_other_messages_are_left_out() -> None:
    rule = attribute(1, "filter") + attribute(2, "DOCKER-USER")
    data = message(10 << 8 | 8, rule) + message(1 << 8 | 8, rule) + message(10 << 8 | 15, b"")
    assert [(kind, chain_of(payload)) for kind, payload in messages(data)] == [(8, "DOCKER-USER"), (15, "")]
    assert messages(b"\0" * 40) == []


def test_sizes_are_read_as_docker_prints_them() -> None:
    assert [megabytes(text) for text in ("1.234GB", "305.6MB", "12kB")] == [1234.0, 305.6, 0.0]
    with pytest.raises(ValueError, match="12B"):
        megabytes("12B")
