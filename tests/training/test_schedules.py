"""Schedules against their closed forms."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.config import OptimizerConfig
from maxlite.training import make_schedule

PEAK = 2e-3


def expected(config: OptimizerConfig, total: int, n: int) -> float:
    """The docstring of make_schedule, for update n."""
    n = min(n, total)
    warmup = round(total * config.warmup_steps_fraction)
    f = config.learning_rate_final_fraction
    if n <= warmup:
        return PEAK * n / warmup
    t = (n - warmup) / (total - warmup)
    decay = round(total * config.wsd_decay_steps_fraction)
    past = max(0, n - (total - decay))
    return (
        PEAK
        * {
            "constant": lambda: 1.0,
            "linear": lambda: 1 - (1 - f) * t,
            "cosine": lambda: f + (1 - f) * (1 + math.cos(math.pi * t)) / 2,
            "wsd": lambda: 1 - (1 - f) * past / decay if past else 1.0,
        }[config.lr_schedule_type]()
    )


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(["cosine", "wsd", "linear", "constant"]),
    total=st.integers(1, 60),
    warmup=st.floats(0, 0.5),
    decay=st.floats(0, 0.5),
    final=st.floats(0, 1),
)
def test_closed_form(kind, total, warmup, decay, final):
    config = OptimizerConfig(
        lr_schedule_type=kind,
        learning_rate=PEAK,
        warmup_steps_fraction=warmup,
        wsd_decay_steps_fraction=decay,
        learning_rate_final_fraction=final,
    )
    if round(total * warmup) + round(total * decay) > total:
        return  # both shares rounded up by half a step
    schedule = make_schedule(config, total)
    got = [float(schedule(n - 1)) for n in range(1, total + 4)]
    np.testing.assert_allclose(got, [expected(config, total, n) for n in range(1, total + 4)], rtol=1e-5, atol=1e-9)


def test_first_update_moves_and_the_warm_up_ends_at_the_peak():
    schedule = make_schedule(OptimizerConfig(learning_rate=PEAK, warmup_steps_fraction=0.1), 100)
    assert float(schedule(0)) == pytest.approx(PEAK / 10)
    assert float(schedule(9)) == pytest.approx(PEAK)
    assert float(schedule(99)) == float(schedule(500)) == pytest.approx(PEAK / 10)


def test_warm_up_share_is_rounded_to_the_nearest_step():
    """0.29 * 100 is 28.999999999999996 in floating point: the peak is at update 29."""
    rates = [float(make_schedule(OptimizerConfig(warmup_steps_fraction=0.29), 100)(n)) for n in (27, 28, 29)]
    assert rates[0] < rates[1] > rates[2]


def test_own_length_overrides_steps():
    config = OptimizerConfig(lr_schedule_type="linear", learning_rate=PEAK, learning_rate_schedule_steps=20)
    ours, twenty = make_schedule(config, 1000), make_schedule(config, 20)
    assert [float(ours(n)) for n in range(30)] == [float(twenty(n)) for n in range(30)]


def test_whole_schedule_may_be_warm_up():
    schedule = make_schedule(OptimizerConfig(learning_rate=PEAK, warmup_steps_fraction=1), 4)
    assert [float(schedule(n)) for n in range(6)] == pytest.approx([PEAK * n / 4 for n in (1, 2, 3, 4, 4, 4)])


def test_same_value_inside_jit():
    schedule = make_schedule(OptimizerConfig(), 50)
    assert float(jax.jit(schedule)(np.int32(30))) == pytest.approx(float(schedule(30)), rel=1e-6)


@pytest.mark.parametrize("kind", ["cosine", "wsd", "linear"])
@given(steps=st.integers(2, 2000), peak=st.floats(1e-6, 1.0))
@settings(max_examples=20, deadline=None)
def test_a_rate_is_never_below_zero(kind, steps, peak):
    config = OptimizerConfig(
        lr_schedule_type=kind, learning_rate=peak, learning_rate_final_fraction=0, wsd_decay_steps_fraction=0.4
    )
    rates = jax.vmap(make_schedule(config, steps))(jnp.arange(steps + 3))
    assert float(rates.min()) >= 0
