"""What the backward pass recomputes: `remat_policy`, with MaxText's names and meanings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from maxlite.config import ModelConfig

_QKV = ("query_proj", "key_proj", "value_proj")

# The outputs a layer keeps for its backward pass beside its input; the rest is computed again.
SAVED: dict[str, tuple[str, ...]] = {
    "full": (),
    "save_qkv_proj": _QKV,
    "save_dot_except_mlp": (*_QKV, "out_proj"),
    "minimal": (*_QKV, "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo"),
}


def rematerialize(layer: Callable[..., Any], config: ModelConfig) -> Callable[..., Any]:
    """`layer`, wrapped so that its backward pass recomputes what `remat_policy` does not keep."""
    if config.remat_policy == "none":
        return layer
    policy = jax.checkpoint_policies.save_only_these_names(*SAVED[config.remat_policy])
    # A scanned body needs no barrier against common subexpressions: the loop is one.
    return jax.checkpoint(layer, policy=policy, prevent_cse=not config.scan_layers)
