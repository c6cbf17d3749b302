"""Schedules, optimizers, the train state, and the jitted train step."""

from maxlite.training.finite import FiniteGuard, NonFiniteError
from maxlite.training.optimizers import make_optimizer
from maxlite.training.schedules import make_schedule
from maxlite.training.state import TrainState, abstract_state, create_state, init_state, state_shardings
from maxlite.training.step import Metrics, jit_train_step, make_train_step

__all__ = [
    "FiniteGuard",
    "Metrics",
    "NonFiniteError",
    "TrainState",
    "abstract_state",
    "create_state",
    "init_state",
    "jit_train_step",
    "make_optimizer",
    "make_schedule",
    "make_train_step",
    "state_shardings",
]
