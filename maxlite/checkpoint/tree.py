"""A state as named arrays, so that what is on storage does not depend on the program's own node types.

On storage a state is a nested dict of arrays. The path of an array in the state (dict keys, field names,
positions) is its name, `params/decoder/mlp/wi` for example, and names are part of the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SHOWN_DIFFERENCES = 5


class ArrayInfo(NamedTuple):
    """What an array is, without its values."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def named_leaves(tree: Any) -> dict[str, Any]:
    """Maps the name of every leaf to the leaf, in the order of `jax.tree.leaves`.

    Raises ValueError if a leaf has no name (the tree is one array) or two leaves would share one.
    """
    leaves: dict[str, Any] = {}
    seen: set[str] = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        parts = [jax.tree_util.keystr((entry,), simple=True) for entry in path]
        name = "/".join(parts)
        # Storage joins the parts with dots, so `a.b` and `a/b` would be one array there.
        if not name or ".".join(parts) in seen or any("/" in part for part in parts):
            raise ValueError(f"state leaf {jax.tree_util.keystr(path)!r} cannot be saved under the name {name!r}")
        seen.add(".".join(parts))
        leaves[name] = leaf
    return leaves


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict that is stored, from leaves by name."""
    root: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = root
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return root


def array_infos(leaves: Mapping[str, Any]) -> dict[str, ArrayInfo]:
    """Shape and dtype of every named leaf: an array, a `jax.ShapeDtypeStruct`, or Orbax's description of one."""
    return {name: ArrayInfo(tuple(leaf.shape), str(np.dtype(leaf.dtype))) for name, leaf in leaves.items()}


def differences(
    saved: Mapping[str, ArrayInfo], wanted: Mapping[str, ArrayInfo], *, ignore_casts: bool = False
) -> list[str]:
    """Where two structures differ, one line per array, the first few and a count; empty if they are equal.

    With `ignore_casts`, floating-point arrays may differ in their dtype.
    """
    lines = []
    for name in sorted(saved.keys() | wanted.keys()):
        has, wants = saved.get(name), wanted.get(name)
        if has != wants and not (ignore_casts and has and wants and _can_cast(has, wants)):
            lines.append(f"{name}: checkpoint {has or 'has none'}, this run {wants or 'has none'}")
    more = len(lines) - SHOWN_DIFFERENCES
    return lines if more <= 0 else [*lines[:SHOWN_DIFFERENCES], f"... and {more} more"]


def _can_cast(saved: ArrayInfo, wanted: ArrayInfo) -> bool:
    floating = all(jnp.issubdtype(info.dtype, jnp.floating) for info in (saved, wanted))
    return floating and saved.shape == wanted.shape
