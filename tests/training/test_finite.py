"""What is said and done about refused updates."""

import re

import pytest

from maxlite.config import OptimizerConfig
from maxlite.training import FiniteGuard, NonFiniteError
from maxlite.training.finite import MAX_REFUSED_IN_A_ROW

GOOD = {"finite": 1.0, "loss": 2.0, "grad_norm": 3.0}
BAD = {"finite": 0.0, "loss": float("nan"), "grad_norm": 3.0}


def guard(on_nonfinite):
    return FiniteGuard(OptimizerConfig(on_nonfinite=on_nonfinite))


def test_stop_is_at_the_first():
    stop = guard("stop")
    stop.check(1, GOOD)
    with pytest.raises(NonFiniteError, match=r"^step 2 is not finite: loss nan, gradient norm 3\.0, on batch 2; "):
        stop.check(2, BAD)


def test_skip_stops_when_no_update_is_taken_any_more():
    skip = guard("skip")
    few = MAX_REFUSED_IN_A_ROW - 1
    steps = [BAD] * few + [GOOD] + [BAD] * few + [GOOD]
    for step, metrics in enumerate(steps, 1):
        skip.check(step, metrics)
    assert skip.refused == 2 * few
    for step in range(few):
        skip.check(step, BAD)
    with pytest.raises(NonFiniteError, match=r"10th update in a row"):
        skip.check(99, BAD)


def test_an_update_that_overflows_is_told_from_a_loss_that_does():
    overflow = GOOD | {"finite": 0.0}
    with pytest.raises(NonFiniteError, match=r"^step 7 is not finite: its updated state, after loss 2\.0, "):
        guard("stop").check(7, overflow)


def test_the_key_names_the_bound():
    description = OptimizerConfig.model_fields["on_nonfinite"].description
    assert re.search(rf"\b{MAX_REFUSED_IN_A_ROW} in a row", description)
