"""What a run computes: model, optimizer and shardings put together into jitted functions on one mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from maxlite.checkpoint.stats import in_bytes
from maxlite.chips import peak_tflops
from maxlite.config import Config, InputError, ModelConfig
from maxlite.data import Batch, Dataset, open_dataset
from maxlite.model import (
    AttentionChoice,
    Llama,
    LossSums,
    Placement,
    activation_bytes,
    choose_attention,
    loss_sums,
    num_parameters,
    train_step_flops,
)
from maxlite.parallel import (
    DEFAULT_RULES,
    Agreement,
    MeshPlan,
    Rules,
    batch_sharding,
    batch_shards,
    bytes_per_device,
    constrain,
    global_batch_size,
    length_shards,
    logical_rules,
    param_shardings,
    per_shard,
    plan_mesh,
    process_rows,
    share,
    summed_once,
    to_device,
)
from maxlite.telemetry.run_log import StepCost
from maxlite.training import (
    TrainState,
    abstract_state,
    create_state,
    jit_train_step,
    make_optimizer,
    make_schedule,
    make_train_step,
    state_shardings,
)

Params = dict[str, Any]  # a nested dict of arrays, whose keys are the parameter paths of the checkpoint format

BATCH_KEYS = ("inputs", "inputs_position", "inputs_segmentation", "targets", "targets_segmentation")

# What processes tell each other with every step: a signal asks for the end; a save is being written, is due, failed.
FLAGS = ("stop", "save_busy", "save_due", "save_failed")


@dataclass(frozen=True)
class Network:
    """The model on a mesh, without values.

    graphdef: `nnx.merge(graphdef, params)` is the model.
    abstract_params: `jax.ShapeDtypeStruct`s with shardings.
    init_params: the initial parameters; to be traced with their shardings, so that every array is born sharded.
    axes: the logical axes of each parameter.
    """

    graphdef: nnx.GraphDef[Llama]
    abstract_params: Params
    init_params: Callable[[], Params]
    axes: Any


def build_network(config: ModelConfig, mesh: Mesh, seed: int = 0, rules: Rules = DEFAULT_RULES) -> Network:
    """The model that `config` describes, its initial weights those of `seed`; computes nothing yet."""
    platform = mesh.devices.flat[0].platform
    placement = Placement(
        constrain(mesh, rules),
        per_shard(mesh, rules),
        length_shards(mesh, rules),
        split=mesh.size > 1,
    )
    make = partial(Llama, config, placement=placement, platform=platform)
    graphdef, variables = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
    abstract, axes = nnx.to_pure_dict(variables), nnx.to_pure_dict(nnx.get_partition_spec(variables))
    return Network(
        graphdef=graphdef,
        abstract_params=_with_shardings(abstract, param_shardings(mesh, abstract, axes, rules)),
        init_params=lambda: nnx.to_pure_dict(nnx.state(make(rngs=nnx.Rngs(seed)))),
        axes=axes,
    )


def _with_shardings(abstract: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, shardings
    )


@dataclass(frozen=True)
class Program:
    """A run's functions and the shapes they take.

    attention: the kernel, and why it was chosen.
    abstract_state: a TrainState of `jax.ShapeDtypeStruct`s with shardings.
    init_state: makes the state of step 0, born sharded.
    agreement: on `FLAGS`, which ride on every step.
    jitted_train_step: `(state, batch, flags) -> (state, metrics)`, where the metrics hold the flags, reduced; the
        state is donated.
    eval_step: `(params, batch, flags) -> (LossSums, reduced flags)`, jitted.
    rows, eval_rows: sequences in a global batch.
    """

    config: Config
    mesh_plan: MeshPlan
    mesh: Mesh
    rules: Rules
    attention: AttentionChoice
    abstract_state: TrainState
    init_state: Callable[[], TrainState]
    agreement: Agreement
    jitted_train_step: Any
    eval_step: Any
    batch_sharding: NamedSharding
    rows: int
    eval_rows: int

    def compile(self) -> None:
        """Compiles what the steps will call, so that no step's time has it in."""
        _ = self.train_step
        if self.config.telemetry.eval_steps != 0:
            _ = self.compiled_eval_step

    @property
    def lowered_train_step(self) -> Any:
        """The train step, lowered for the devices of the mesh."""
        inputs = self._abstract_batch(self.rows), self.agreement.abstract
        return self.jitted_train_step.lower(self.abstract_state, *inputs)

    @cached_property
    def train_step(self) -> Any:
        """The compiled train step."""
        return self.lowered_train_step.compile()

    @cached_property
    def compiled_eval_step(self) -> Any:
        """The compiled eval step."""
        inputs = self._abstract_batch(self.eval_rows), self.agreement.abstract
        return self.eval_step.lower(self.abstract_state.params, *inputs).compile()

    def _abstract_batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (rows, self.config.data.max_target_length)
        return dict.fromkeys(BATCH_KEYS, jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding))

    @property
    def cost(self) -> StepCost:
        """What a step processes."""
        config, length = self.config, self.config.data.max_target_length
        tokens = self.rows * length
        flops = train_step_flops(config.model, tokens, length)
        peak = peak_tflops(self.mesh.devices.flat[0].device_kind, config.model.dtype)
        return StepCost(tokens, flops / self.mesh.size, peak)

    def to_device(self, batch: Batch) -> dict[str, jax.Array]:
        """Global arrays of a batch, from this process's rows."""
        return to_device(batch, self.batch_sharding)

    def evaluate(
        self, state: TrainState, batches: Iterable[Batch], flags: Callable[[], Mapping[str, bool]]
    ) -> float | None:
        """Mean loss in nats over every valid target of the batches.

        None if a signal asks to stop meanwhile: on every process at the same batch. `flags` gives this process's.
        """
        losses, targets = [], []
        for batch in batches:
            own = self.agreement.to_device(flags())
            sums, reduced = jax.device_get(self.compiled_eval_step(state.params, self.to_device(batch), own))
            losses.append(float(sums.loss_sum))
            targets.append(float(sums.num_targets))
            if self.agreement.agreed(flags(), reduced)["stop"]:
                return None
        return math.fsum(losses) / math.fsum(targets)

    @property
    def state_bytes(self) -> int:
        """Of parameters, optimizer and step, on all devices together, each array once: what a checkpoint holds."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.abstract_state))

    @property
    def bytes_per_device(self) -> dict[str, int]:
        """What each device holds: `parameters` and `optimizer` exactly, `activations` as estimated."""
        config, state = self.config, self.abstract_state
        rows = self.rows // config.optimizer.gradient_accumulation_steps
        elements = share(self.mesh, self.rules)
        return {
            "parameters": bytes_per_device(state.params),
            "optimizer": bytes_per_device(state.opt_state),
            "activations": activation_bytes(config.model, rows, config.data.max_target_length, elements),
        }

    def describe(self) -> list[str]:
        """What will be computed where, a few lines for people."""
        model, (kernel, reason) = self.config.model, self.attention
        held = {name: in_bytes(count) for name, count in self.bytes_per_device.items()}
        return [
            f"maxlite {version('maxlite')}, jax {jax.__version__}, {self.mesh_plan.describe()}",
            f"model: {num_parameters(model):,} parameters in {model.weight_dtype}, computed in {model.dtype}; "
            f"attention {kernel} ({reason})",
            f"each device holds: parameters {held['parameters']}, optimizer {held['optimizer']}, "
            f"activations about {held['activations']}",
        ]


def build_program(config: Config, devices: Sequence[jax.Device] | None = None) -> Program:
    """Builds the functions of a run over all devices; computes nothing yet.

    Args:
        config: the config.
        devices: others than every process's; those of a `jax.experimental.topologies` description will do, on which
            nothing can run: what the program holds can then be lowered and compiled only.

    Raises:
        InputError: batch, devices and model do not fit each other.
    """
    if config.run.jax_cache_dir is not None:
        jax.config.update("jax_compilation_cache_dir", str(Path(config.run.jax_cache_dir).expanduser()))
    plan = plan_mesh(config.parallel, devices)
    mesh = plan.mesh()
    rules = logical_rules(config.parallel)
    data, parts, length_parts = config.data, batch_shards(mesh, rules), length_shards(mesh, rules)
    if data.max_target_length % length_parts:
        raise InputError(
            f"max_target_length={data.max_target_length} does not split into {length_parts} equal parts, one for each "
            f"device that shares a sequence (context parallelism); make it a multiple of {length_parts}"
        )
    accumulation = config.optimizer.gradient_accumulation_steps
    rows = global_batch_size(data.per_device_batch_size, mesh.size, accumulation, parts)
    eval_rows = global_batch_size(data.eval_per_device_batch_size or data.per_device_batch_size, mesh.size, 1, parts)

    attention = choose_attention(
        config.model,
        platform=mesh.devices.flat[0].platform,
        sequence_length=data.max_target_length,
        length_shards=length_parts,
    )
    network = build_network(config.model, mesh, config.run.init_weights_seed, rules)

    def loss_fn(params: Params, batch: dict[str, jax.Array]) -> LossSums:
        return loss_sums(nnx.merge(network.graphdef, params), batch, config.model)

    schedule = make_schedule(config.optimizer, config.run.steps)
    optimizer = make_optimizer(config.optimizer, schedule, network.axes)
    abstract = abstract_state(network.init_params, optimizer)
    shardings = state_shardings(abstract, jax.tree.map(lambda leaf: leaf.sharding, network.abstract_params))
    update = make_train_step(loss_fn, optimizer, schedule, config.optimizer, summed_once(mesh, rules))
    agreement = Agreement(mesh, FLAGS)

    def train_step(state: TrainState, batch: Any, flags: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        state, metrics = update(state, batch)
        return state, metrics | agreement.reduce(flags)

    def eval_step(params: Params, batch: Any, flags: jax.Array) -> tuple[LossSums, dict[str, jax.Array]]:
        return loss_fn(params, batch), agreement.reduce(flags)

    inputs = (batch_sharding(mesh, rules), agreement.sharding)
    return Program(
        config=config,
        mesh_plan=plan,
        mesh=mesh,
        rules=rules,
        attention=attention,
        abstract_state=_with_shardings(abstract, shardings),
        init_state=lambda: create_state(network.init_params, optimizer, shardings),
        agreement=agreement,
        jitted_train_step=jit_train_step(train_step, shardings, *inputs),
        eval_step=jax.jit(eval_step, in_shardings=(shardings.params, *inputs), out_shardings=shardings.step),
        batch_sharding=batch_sharding(mesh, rules),
        rows=rows,
        eval_rows=eval_rows,
    )


def open_data(program: Program) -> Dataset:
    """The data set of the run, for the rows that this process supplies. A context manager."""
    config, sharding = program.config, program.batch_sharding
    return open_dataset(
        config.data,
        vocab_size=config.model.vocab_size,
        global_batch_size=program.rows,
        eval_batch_size=program.eval_rows,
        rows=process_rows(sharding, program.rows),
        eval_rows=process_rows(sharding, program.eval_rows),
    )


def run_metadata(program: Program, data: Dataset) -> dict[str, Any]:
    """What every checkpoint says about the run that made it."""
    return {
        "config": program.config.flat(),
        "data_fingerprint": data.fingerprint,
        "global_batch_size": program.rows,
        "mesh": {**program.mesh.shape, "processes": jax.process_count()},
        "versions": {name: version(name) for name in ("maxlite", "jax", "flax", "optax", "orbax-checkpoint", "grain")},
    }
