"""The state of training: the step, the parameters, and the optimizer's state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that an update reads and writes; a pytree.

    step: int32 scalar, updates done (refused ones count: the step is also the position in the data).
    params: the tree of parameters.
    opt_state: what the optimizer's `init` returned for them.
    """

    step: Any
    params: Any
    opt_state: Any


def init_state(init_params: Callable[[], Any], optimizer: optax.GradientTransformation) -> TrainState:
    """Step 0. To be traced, by `abstract_state` or `create_state`: outside jit it would build whole arrays."""
    params = init_params()
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def abstract_state(init_params: Callable[[], Any], optimizer: optax.GradientTransformation) -> TrainState:
    """Shapes and dtypes of the state; nothing is computed."""
    return jax.eval_shape(lambda: init_state(init_params, optimizer))


def create_state(
    init_params: Callable[[], Any], optimizer: optax.GradientTransformation, shardings: TrainState
) -> TrainState:
    """Step 0 with every array born in its sharding: no device and no host holds a whole one."""
    return jax.jit(lambda: init_state(init_params, optimizer), out_shardings=shardings)()


def state_shardings(abstract: TrainState, param_shardings: Any) -> TrainState:
    """The sharding of every leaf of the state, derived from the parameters'.

    An optimizer leaf belongs to the parameter whose path its own path ends with. With the same shape it takes the
    same sharding; with one dimension less (adafactor's factors) the sharding of the dimensions that are left;
    anything else (counters) is held whole by every device.

    Args:
        abstract: from `abstract_state`.
        param_shardings: a `NamedSharding` for each parameter, in the tree of the parameters.
    """
    shardings = jax.tree.leaves(param_shardings)
    replicated = NamedSharding(shardings[0].mesh, PartitionSpec())
    paths_and_params = jax.tree_util.tree_flatten_with_path(abstract.params)[0]
    by_path = {
        path: (param.shape, sharding) for (path, param), sharding in zip(paths_and_params, shardings, strict=True)
    }

    def of_leaf(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        # The longest tail that is a parameter's path: one parameter's path may end another's.
        for start in range(len(path)):
            if path[start:] in by_path:
                shape, sharding = by_path[path[start:]]
                return _sharding_like(leaf.shape, shape, sharding) or replicated
        return replicated

    opt_state = jax.tree_util.tree_map_with_path(of_leaf, abstract.opt_state)
    return TrainState(step=replicated, params=param_shardings, opt_state=opt_state)


def _sharding_like(
    shape: tuple[int, ...], param_shape: tuple[int, ...], sharding: NamedSharding
) -> NamedSharding | None:
    if shape == param_shape:
        return sharding
    spec = (*sharding.spec, *(None,) * (len(param_shape) - len(sharding.spec)))
    for gone in range(len(param_shape)):
        if shape == param_shape[:gone] + param_shape[gone + 1 :]:
            return NamedSharding(sharding.mesh, PartitionSpec(*spec[:gone], *spec[gone + 1 :]))
    return None
