"""Which devices the commands compute on."""

from __future__ import annotations

import os


def compute_on_cpu() -> None:
    """Leaves accelerators to the runs that train on them, unless the person set JAX_PLATFORMS."""
    if "JAX_PLATFORMS" not in os.environ:
        import jax

        jax.config.update("jax_platforms", "cpu")
