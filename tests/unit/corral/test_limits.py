from __future__ import annotations

import pytest

from corral.limits import judge_warnings, possible
from policy.container import Limits
from policy.errors import EngineError, PolicyError
from policy.schema import Limits as Wanted

GIB = 1 << 30
ABLE = {"CpuCfsPeriod": True, "CpuCfsQuota": True, "NCPU": 2}
PIDS = (
    "Your kernel does not support PIDs limit capabilities or the cgroup is not mounted. PIDs limit discarded."
)
MEMORY = "Your kernel does not support memory limit capabilities or the cgroup is not mounted. Limitation discarded."
SWAP = "Your kernel does not support swap limit capabilities or the cgroup is not mounted. Memory limited without swap."


def test_a_policy_without_limits_gets_a_bound_for_processes_and_three_quarters_of_the_memory() -> None:
    assert possible(Wanted(), 16 * GIB, None) == (Limits(4096, 12 * GIB, 0), [])


def test_what_the_policy_says_is_asked_for() -> None:
    found, told = possible(Wanted(pids=64, memory="1.5g", cpus=1.5), 16 * GIB, ABLE)
    assert (found, told) == (Limits(64, 3 * GIB // 2, 1_500_000_000), [])
    assert found.host_config() == {
        "PidsLimit": 64,
        "Memory": 3 * GIB // 2,
        "MemorySwap": 3 * GIB // 2,
        "NanoCpus": 1_500_000_000,
    }


def test_more_processors_than_the_host_has_is_an_error_of_the_policy() -> None:
    with pytest.raises(PolicyError, match="3 processors, and this host has 2"):
        possible(Wanted(cpus=3), GIB, ABLE)


@pytest.mark.parametrize("missing", ["CpuCfsPeriod", "CpuCfsQuota"])
def test_processors_that_cannot_be_limited_name_the_controller(missing: str) -> None:
    info = {**ABLE, missing: False}
    with pytest.raises(EngineError, match="controller cpu is missing") as caught:
        possible(Wanted(cpus=1), GIB, info)
    assert "best_effort: true" in str(caught.value.hint)
    found, told = possible(Wanted(cpus=1, best_effort=True), GIB, info)
    assert found.nano_cpus == 0
    assert "controller cpu is missing" in told[0]


@pytest.mark.parametrize(("warning", "controller"), [(PIDS, "pids"), (MEMORY, "memory")])
def test_a_discarded_limit_is_an_error_that_names_the_controller_unless_accepted(
    warning: str, controller: str
) -> None:
    with pytest.raises(EngineError, match=f"controllers are missing: {controller} ") as caught:
        judge_warnings("x", [warning, SWAP], best_effort=False)
    assert "best_effort: true" in str(caught.value.hint)
    (told,) = judge_warnings("x", [warning, SWAP], best_effort=True)
    assert controller in told and warning in told


def test_memory_limited_without_swap_is_no_news() -> None:
    assert judge_warnings("x", [SWAP], best_effort=False) == []
    assert judge_warnings("x", None, best_effort=False) == []


def test_anything_else_that_docker_left_out_is_an_error_even_with_best_effort() -> None:
    with pytest.raises(EngineError, match="something new"):
        judge_warnings("x", ["something new", PIDS], best_effort=True)
