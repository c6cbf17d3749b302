"""Products of activations and weights, with their gradients in the forms that every backend runs fast.

Shapes: T tokens, D and F the two sides of a weight matrix; M and N any dimensions.

On CPU, XLA multiplies bfloat16 matrices at full speed only if the result is float32 and the left one is stored by
rows of what is summed over; else it converts both to float32 first, at well under half the speed. The gradient that
autodiff writes, x^T @ dy with a bfloat16 result, is neither. On other backends these forms cost nothing: there too
products accumulate in float32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from maxlite.model.placement import Placement


def product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """einsum with a float32 result."""
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def transposed(x_MN: jax.Array, split: bool) -> jax.Array:
    """The last two dimensions swapped, on CPU in memory too: the compiler would fold a mere view into the product.

    split: whether the array is split over devices; then it is a mere view, as the compiler would gather the array to
        lay it out.
    """

    def by_rows(x_MN: jax.Array) -> jax.Array:
        return with_layout_constraint(x_MN.mT, Layout(tuple(range(x_MN.ndim))))

    if split:
        return x_MN.mT
    return jax.lax.platform_dependent(x_MN, cpu=by_rows, default=lambda x_MN: x_MN.mT)


def cast_weight(w: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """A weight in the compute dtype: `w.astype(dtype)`, bit for bit.

    Where it is only ever cast, XLA's TPU compiler casts the weights of all layers before the loop over them and holds
    that copy as long as the loop runs: 2.2 GB on each of 64 devices for 70 B parameters. Rounding it first hides that.
    """
    if w.dtype == jnp.float32 and dtype == jnp.bfloat16:
        w = jax.lax.reduce_precision(w, exponent_bits=8, mantissa_bits=7)
    return w.astype(dtype)


def weight_gradient(x_TD: jax.Array, dy_TF: jax.Array, placement: Placement) -> jax.Array:
    """x^T @ dy, summed over all tokens: float32 [D, F]. Tokens as one dimension, or as batch and sequence."""
    if placement.length_shards > 1:
        return product("BSD,BSF->DF", x_TD, dy_TF)
    # Summed over two dimensions XLA is slow, on TPU as on CPU.
    x_TD, dy_TF = (x.reshape(-1, x.shape[-1]) for x in (x_TD, dy_TF))
    return product("DT,TF->DF", transposed(x_TD, placement.split), dy_TF)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x_TD: jax.Array, w_DF: jax.Array, placement: Placement) -> jax.Array:
    """x @ w in the dtype of x, accumulated in float32. Tokens as in `weight_gradient`.

    The gradient of w is not rounded to the dtype of x on its way to that of w, the master weights'.
    """
    return product("...D,DF->...F", x_TD, cast_weight(w_DF, x_TD.dtype)).astype(x_TD.dtype)


def _forward(x_TD: jax.Array, w_DF: jax.Array, placement: Placement) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return matmul(x_TD, w_DF, placement), (x_TD, w_DF)


def _backward(
    placement: Placement, operands: tuple[jax.Array, jax.Array], dy_TF: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x_TD, w_DF = operands
    dx_TD = product("...F,DF->...D", dy_TF, cast_weight(w_DF, x_TD.dtype))
    return dx_TD.astype(x_TD.dtype), weight_gradient(x_TD, dy_TF, placement).astype(w_DF.dtype)


matmul.defvjp(_forward, _backward)
