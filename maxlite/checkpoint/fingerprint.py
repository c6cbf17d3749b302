"""A fingerprint of every array, computed on its devices: what is restored is compared with what was saved.

Two independent sums modulo 2^32 of each element's bits times an odd weight. The weight of element (i, j, ...) is the
product of one odd pseudo-random number per coordinate of its *global* index, so the result does not depend on
how the array is sharded, and covers device, network and disk alike.

A change of one element by d changes a sum by d times an odd number, which is never 0 modulo 2^32: it is always
noticed. Any other change (elements swapped, blocks lost or shifted) escapes both sums with a chance of about 2^-62.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

ALGORITHM = "weighted-sums-2x32"  # part of the format: another way to compute them needs another name
_SEEDS = (0x1B56C4E9, 0x6C8E9CF5)  # one for each sum

Fingerprint = tuple[int, int]


def fingerprint(x: jax.Array) -> jax.Array:
    """The two sums of one array of any shape and dtype, uint32[2]. To be traced."""
    bits = jnp.atleast_1d(_words(x))
    return jnp.stack([_weighted_sum(bits, seed) for seed in _SEEDS])


def compile_fingerprints(arrays: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> jax.stages.Compiled:
    """The function `tuple of arrays -> uint32[number of arrays, 2]`, every device having the whole result."""
    abstract = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in arrays.values())

    def of_all(arrays: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.stack([fingerprint(x) for x in arrays])

    return jax.jit(of_all, out_shardings=replicated(abstract[0].sharding)).lower(abstract).compile()


def named(names: Iterable[str], rows: jax.Array) -> dict[str, Fingerprint]:
    """Fingerprints by name, from uint32[number of names, 2]; waits until they are computed."""
    return {name: of_one(sums) for name, sums in zip(names, np.asarray(rows), strict=True)}


def of_one(sums: jax.Array | np.ndarray) -> Fingerprint:
    """The result of `fingerprint` on the host; waits until it is computed."""
    first, second = np.asarray(sums)
    return int(first), int(second)


def replicated(sharding: Sharding) -> Sharding:
    """The sharding of a small array that every device of `sharding` holds whole."""
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


def _weighted_sum(bits: jax.Array, seed: int) -> jax.Array:
    *outer, inner = (_weights(size, seed + dimension) for dimension, size in enumerate(bits.shape))
    weighted = bits * functools.reduce(jnp.multiply.outer, outer, jnp.uint32(1))[..., None]
    if outer:
        # A few rows into one first, whole rows at a time: the speed of memory on a processor, where XLA is several
        # times as slow at adding up long columns, and at one sum over everything.
        *lead, rows, row = weighted.shape
        few = next(size for size in range(8, 0, -1) if rows % size == 0)
        weighted = jnp.sum(weighted.reshape(*lead, rows // few, few, row), axis=-2, dtype=jnp.uint32)
    return jnp.sum(weighted * inner, dtype=jnp.uint32)


def _weights(size: int, seed: int) -> jax.Array:
    """Odd pseudo-random numbers, uint32[size]: a multiply-and-shift hash of the index."""
    x = (jax.lax.iota(jnp.uint32, size) + jnp.uint32(seed & 0xFFFFFFFF)) * jnp.uint32(0x9E3779B1)
    x = (x ^ (x >> 15)) * jnp.uint32(0x85EBCA77)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE3D)
    return (x ^ (x >> 16)) | jnp.uint32(1)


def _words(x: jax.Array) -> jax.Array:
    """The bits of every element as uint32; elements of 64 bits as two, in one more dimension."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if x.dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jax.lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")
    return x.astype(jnp.uint32)
