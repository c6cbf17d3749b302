"""What `python -m maxlite.compile` says about a compiled train step, as a table and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from maxlite.chips import Chip, chip_of
from maxlite.config import Config
from maxlite.model import num_parameters, train_step_flops
from maxlite.model.flops import attention_product_flops
from maxlite.parallel import bytes_per_device, slice_of_devices
from maxlite.parallel.collectives import Collective, read_collectives
from maxlite.parallel.hlo import HloProgram
from maxlite.parallel.hlo_cost import matmul_flops, memory_traffic

if TYPE_CHECKING:
    from maxlite.compile import Compiled
    from maxlite.program import Program
    from maxlite.topology import Topology

# Products of queries and keys in each of splash attention's kernels, by how their names start.
ATTENTION_KERNELS = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}
ATTENTION_FUSED_BACKWARD = 5


@dataclass(frozen=True)
class Report:
    """What a step needs of each device, in bytes, FLOPs and seconds; the keys of `--json`.

    hbm: `parameters`, `optimizer` (both in `arguments`), `gradients`, `activations` (both in `temporaries`; what is
        no gradient is called activation), `arguments`, `temporaries`, `total`, `capacity`.
    flops: of the compiled step: matrix products, and attention kernels by formula.
    model_flops: what the mathematics asks for (`train_step_flops`).
    recompute_share: of `flops`, what is not in `model_flops`.
    bytes_accessed: by the compiler's cost analysis, which counts a loop's body once.
    hbm_traffic: by the instructions of the program, each as often as it runs.
    roofline: `seconds` of each resource alone at its peak, the largest as `step`, and what that bounds `mfu` to.
    checkpoint: bytes in all and of each host, and the seconds of a save at the given bandwidth.
    fix: the change that makes it fit, where it does not.
    """

    fits: bool
    hbm: dict[str, int]
    flops: float | None
    model_flops: float
    recompute_share: float | None
    bytes_accessed: float | None
    hbm_traffic: float | None
    collectives: list[Collective] | None
    roofline: dict[str, float] | None
    checkpoint: dict[str, float]
    compile_seconds: float
    topology: dict[str, Any]
    model: dict[str, Any]
    versions: dict[str, str]
    uncounted_loops: list[str]
    fix: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        listed = None if self.collectives is None else [each._asdict() for each in self.collectives]
        return {**asdict(self), "collectives": listed}

    def text(self) -> str:
        """A page for people."""
        from maxlite.compile_text import page

        return page(self)


def make_report(config: Config, topology: Topology, program: Program, compiled: Compiled) -> Report:
    """Puts together what the program and the compiler say."""
    device = program.mesh.devices.flat[0]
    chip = chip_of(device.device_kind)
    if chip is None:
        raise ValueError(f"no figures of a {device.device_kind} in maxlite/chips.py")
    state, slices = program.abstract_state, config.compile.compile_topology_num_slices
    tokens = program.rows * config.data.max_target_length
    model_flops = train_step_flops(config.model, tokens, config.data.max_target_length) / program.mesh.size

    capacity = int(chip.hbm_bytes / chip.devices)
    parameters, optimizer = bytes_per_device(state.params), bytes_per_device(state.opt_state)
    arguments, temporaries, extra = parameters + optimizer, compiled.refused_bytes, 0
    if compiled.executable is not None:
        memory = compiled.executable.memory_analysis()
        arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        extra = memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.generated_code_size_in_bytes
    total = arguments + temporaries + extra
    gradients = min(temporaries, parameters)
    hbm = {
        "parameters": parameters,
        "optimizer": optimizer,
        "arguments": arguments,
        "gradients": gradients,
        "activations": temporaries - gradients,
        "temporaries": temporaries,
        "program_and_outputs": extra,
        "total": total,
        "capacity": capacity,
    }

    flops = accessed = traffic = share = roofline = collectives = None
    loops: list[str] = []
    if compiled.executable is not None:
        hlo = HloProgram(compiled.text)
        collectives = read_collectives(hlo, program.mesh, slice_of_devices(program.mesh_plan))
        per_product = attention_product_flops(config.model, tokens, config.data.max_target_length) / program.mesh.size
        flops = matmul_flops(hlo) + per_product * attention_products(hlo, config.model.sa_use_fused_bwd_kernel)
        share = 1 - model_flops / flops
        cost = compiled.executable.cost_analysis()
        accessed = (cost[0] if isinstance(cost, list) else cost)["bytes accessed"]
        traffic = memory_traffic(hlo)
        roofline = roofline_of(chip, flops, model_flops, traffic, collectives)
        loops = hlo.unknown_loops

    hosts = len({d.process_index for d in program.mesh.devices.flat})
    saved = program.state_bytes
    seconds = saved / hosts / (config.compile.compile_storage_gb_per_second * 1e9)
    checkpoint: dict[str, float] = {"bytes": saved, "hosts": hosts, "bytes_per_host": saved / hosts}
    checkpoint |= {"gb_per_second_per_host": config.compile.compile_storage_gb_per_second, "save_seconds": seconds}
    if roofline is not None:
        checkpoint["shortest_interval_steps"] = max(1, math.ceil(seconds / roofline["step"]))
    return Report(
        fits=compiled.executable is not None and total <= capacity,
        hbm=hbm,
        flops=flops,
        model_flops=model_flops,
        recompute_share=share,
        bytes_accessed=accessed,
        hbm_traffic=traffic,
        collectives=collectives,
        roofline=roofline,
        checkpoint=checkpoint,
        compile_seconds=compiled.seconds,
        topology={
            "name": topology.name,
            "shape": topology.shape,
            "slices": slices,
            "devices": program.mesh.size,
            "mesh": program.mesh_plan.describe(),
            "chip": asdict(chip),
        },
        model={
            "parameters": num_parameters(config.model),
            "global_batch_size": program.rows,
            "max_target_length": config.data.max_target_length,
            "tokens": tokens,
        },
        versions={name: version(name) for name in ("maxlite", "jax", "jaxlib", "libtpu")},
        uncounted_loops=loops,
    )


def attention_products(hlo: HloProgram, fused_backward: bool) -> int:
    """Products of a layer's queries and keys, or the like, that splash attention's kernels do in one step."""
    kernels = ATTENTION_KERNELS | ({"splash_mha_dkv": ATTENTION_FUSED_BACKWARD} if fused_backward else {})
    return sum(
        done.times * products
        for done in hlo.executed
        if done.instruction.opcode == "custom-call"
        for start, products in kernels.items()
        if done.instruction.name.startswith(start)
    )


def roofline_of(
    chip: Chip, flops: float, model_flops: float, traffic: float, collectives: list[Collective]
) -> dict[str, float]:
    """Seconds that a device would take for a step if one resource were all, each at its peak.

    Exchanges are taken for perfect ones, over all links at once: of n bytes between k devices each sends
    n (k - 1) / k, twice that in an all-reduce.
    """
    share = 1 / chip.devices
    seconds = {
        "compute": flops / (chip.bf16_tflops * 1e12 * share),
        "hbm": traffic / (chip.hbm_gb_per_second * 1e9 * share),
    }
    for network, speed in (("ICI", chip.ici_gb_per_second), ("DCN", chip.dcn_gb_per_second)):
        if speed is not None:
            sent = sum(
                c.bytes * (c.devices - 1) / c.devices * (2 if c.kind == "all-reduce" else 1)
                for c in collectives
                if c.network == network
            )
            seconds[network.lower()] = sent / (speed * 1e9 * share)
    step = max(seconds.values())
    return {**seconds, "step": step, "mfu": model_flops / (chip.bf16_tflops * 1e12 * share) / step}
