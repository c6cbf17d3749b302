"""Weights in the compute dtype: the same bits as a plain cast."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from maxlite.model.matmul import cast_weight


@given(arrays(np.uint32, 64, elements=st.integers(0, 2**32 - 1)))
def test_a_weight_is_cast_bit_for_bit(bits):
    weights = bits.view(np.float32)  # every float32: subnormal, infinite, NaN
    cast, plain = cast_weight(jnp.asarray(weights), jnp.bfloat16), jnp.asarray(weights).astype(jnp.bfloat16)
    assert cast.dtype == jnp.bfloat16
    same = np.asarray(cast).view(np.uint16) == np.asarray(plain).view(np.uint16)
    # Which NaN comes of a NaN is not said anywhere.
    assert (same | (np.isnan(weights) & np.isnan(np.asarray(cast, np.float32)))).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_are_cast_plainly(dtype):
    weights = jnp.asarray([1.0, 1e-7, 70_000.0, -3.14159])
    assert jnp.array_equal(cast_weight(weights, jnp.dtype(dtype)), weights.astype(dtype))
