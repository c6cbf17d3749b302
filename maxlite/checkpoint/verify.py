"""Whether a committed step holds, bit for bit, the state that was saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from etils import epath

from maxlite.checkpoint import layout, orbax_io
from maxlite.checkpoint.errors import RestoreError
from maxlite.checkpoint.faults import patiently, why
from maxlite.checkpoint.tree import array_infos, differences


def damage(path: epath.Path, live: Mapping[str, jax.Array], report: Callable[[str], None]) -> str:
    """What is wrong with a committed step, in words; empty if reading it back gives the arrays of `live`.

    Every array is read by a reader of its own to the sharding of the live one and compared on the devices, one
    after the other, so that this takes memory for one array. Raises RestoreError if the step cannot be read now
    for a reason that says nothing about it.
    """
    try:
        return patiently(f"checkpoint {path}", lambda: _difference(path, live), report)
    except RestoreError:
        raise
    except Exception as error:  # damage, of all kinds
        return why(error)


def _difference(path: epath.Path, live: Mapping[str, jax.Array]) -> str:
    if not layout.is_committed(path):
        return "no commit marker"
    metadata = layout.read_metadata(path)
    if str(metadata.step) != path.name:
        return f"it says that it is step {metadata.step}"
    if different := differences(metadata.arrays, array_infos(live)):
        return "; ".join(different)
    for name, array in live.items():
        wanted = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        if not _same_bits(orbax_io.read_arrays(path, {name: wanted})[name], array):
            return f"{name} differs from the state that was saved"
    return ""


@jax.jit
def _same_bits(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.array_equal(_bits(left), _bits(right))


def _bits(x: jax.Array) -> jax.Array:
    """The array as integers, or NaN would differ from itself and -0 would equal 0."""
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    return jax.lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}") if jnp.issubdtype(x, jnp.floating) else x
