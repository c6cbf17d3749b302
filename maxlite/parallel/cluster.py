"""Which process of a run this one is, as the environment tells: a launcher's variables, or a TPU pod's metadata."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from maxlite.config import InputError, ParallelConfig

Environment = Mapping[str, str]

DEFAULT_PORT = 1234  # of JAX_COORDINATOR_ADDRESS without a port; MaxText's too
IGNORE = "skip_jax_distributed_system=true does not look there"
# Pairs that tell how many processes there are and which this is: jax's words, as many launchers set them, and those
# that xpk gives to GPU nodes (src/xpk/core/docker_resources.py).
COUNT_AND_INDEX = (("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"), ("NNODES", "NODE_RANK"))


@dataclass(frozen=True)
class Place:
    """Which of several processes this one is.

    address: host:port where process 0 is met.
    count, index: how many there are, and which this is.
    source: who told so, in words.
    local_device_ids: which of the GPUs that this process sees are its own; None: all of them.
    """

    address: str
    count: int
    index: int
    source: str
    local_device_ids: list[int] | None = None

    @property
    def port(self) -> int:
        """Of the address."""
        return int(self.address.rpartition(":")[2])

    @property
    def host(self) -> str:
        """Of the address, an IPv6 one without its brackets."""
        return self.address.rpartition(":")[0].strip("[]")


def find_place(config: ParallelConfig, environ: Environment = os.environ) -> Place | None:
    """The place that the keys give, or the launcher, or the TPU pod; None: this process is alone.

    Raises:
        InputError: the environment's values make no sense.
    """
    if config.coordinator_address is not None:
        return Place(config.coordinator_address, config.num_processes, config.process_id, "coordinator_address")
    if config.skip_jax_distributed_system:
        return None
    place = of_environment(environ) or of_tpu_pod(environ, config.jax_distributed_initialization_timeout)
    if place is not None and place.index >= place.count:
        raise InputError(
            f"{place.source}: this is process {place.index} of {place.count}, which count from 0; {IGNORE}"
        )
    return None if place is None or place.count == 1 else place


def of_environment(environ: Environment) -> Place | None:
    """The place that a launcher's variables give. An `mpirun` inside a Slurm job counts, not the job."""
    return _of_jax(environ) or _of_jobset(environ) or _of_open_mpi(environ) or _of_slurm(environ)


def of_tpu_pod(environ: Environment, timeout_seconds: int) -> Place | None:
    """The place in a TPU slice, or several, by jax's own knowledge of GKE's and GCE's variables and metadata.

    Raises:
        InputError: they cannot be read, or the host of process 0 is not known in time.
    """
    from jax._src.clusters import GceTpuCluster, GkeTpuCluster  # jax.distributed uses them, but tells only afterwards

    if "tpu" not in (environ.get("JAX_PLATFORMS") or "tpu"):
        return None
    try:
        pod = next((kind for kind in (GkeTpuCluster, GceTpuCluster) if kind.is_env_present()), None)
        if pod is None or pod.get_process_count() == 1:
            return None
        address = pod.get_coordinator_address(timeout_seconds, environ.get("JAX_COORDINATOR_PORT"))
        return Place(address, pod.get_process_count(), pod.get_process_id(), "TPU pod")
    except (OSError, RuntimeError, ValueError) as error:  # requests' errors are OSErrors
        raise InputError(f"TPU pod: who else is there cannot be found out ({error}); {IGNORE}") from error


def _of_jax(environ: Environment) -> Place | None:
    address = _given_address(environ)
    for count, index in COUNT_AND_INDEX:
        if address and count in environ and index in environ:
            return Place(address, _number(environ, count), _number(environ, index), "JAX_COORDINATOR_ADDRESS")
    return None


def _of_jobset(environ: Environment) -> Place | None:
    """As xpk sets the variables for CPU nodes. (On GKE's TPU nodes jax knows its way; see `of_tpu_pod`.)"""
    if not {"JAX_PROCESS_COUNT", "PROCESSES_IN_JOB", "JOB_COMPLETION_INDEX"} <= set(environ):
        return None
    address = _given_address(environ)
    if address is None and {"JOBSET_NAME", "REPLICATED_JOB_NAME"} <= set(environ):
        # The stable name that a JobSet gives to the first pod of its first job.
        name = environ["JOBSET_NAME"]
        address = f"{name}-{environ['REPLICATED_JOB_NAME']}-0-0.{name}:{_port(environ, '', DEFAULT_PORT)}"
    if address is None:
        raise InputError(f"JobSet: JAX_COORDINATOR_ADDRESS, or JOBSET_NAME and REPLICATED_JOB_NAME, not set; {IGNORE}")
    job = _number(environ, "JOB_INDEX") if "JOB_INDEX" in environ else 0
    index = job * _number(environ, "PROCESSES_IN_JOB") + _number(environ, "JOB_COMPLETION_INDEX")
    return Place(address, _number(environ, "JAX_PROCESS_COUNT"), index, "JobSet")


def _of_open_mpi(environ: Environment) -> Place | None:
    names = ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")
    if not all(f"OMPI_COMM_WORLD_{name}" in environ for name in names):
        return None
    count, index, here, local = (_number(environ, f"OMPI_COMM_WORLD_{name}") for name in names)
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")  # of mpirun, where process 0 is; before version 5
    port = _port(environ, uri or environ.get("PMIX_NAMESPACE", ""))
    # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911 or 1314521088.0;tcp6://[fe80::b9b:ac5d,2620:10d::2]:43370
    launcher = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
    if given := _given_address(environ):
        address = given
    elif here == count:
        address = f"127.0.0.1:{port}"
    elif launcher:
        address = f"{launcher[1] or f'[{launcher[2]}]'}:{port}"
    else:
        raise InputError(
            "Open MPI: it does not tell where process 0 runs (version 5 does not); add "
            "-x JAX_COORDINATOR_ADDRESS=HOST:PORT to mpirun, with the host of process 0"
        )
    return Place(address, count, index, "Open MPI", _own_gpus(environ, here, local))


def _of_slurm(environ: Environment) -> Place | None:
    """Of a task that srun started beside others. A batch script or an interactive shell is alone, whatever the job."""
    needed = {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"}
    if not needed <= set(environ) or _number(environ, "SLURM_STEP_NUM_TASKS") == 1:
        return None
    step = f"{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '0')}"
    address = _given_address(environ) or f"{_first_host(environ['SLURM_STEP_NODELIST'])}:{_port(environ, step)}"
    here = _tasks_here(environ)
    own = None if here == 1 else _own_gpus(environ, here, _number(environ, "SLURM_LOCALID"))
    count, index = _number(environ, "SLURM_STEP_NUM_TASKS"), _number(environ, "SLURM_PROCID")
    return Place(address, count, index, f"Slurm step {step}", own)


def _first_host(nodes: str) -> str:
    """`rack1node001` of `rack[1-2]node[001-003,007],login`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise InputError(f"SLURM_STEP_NODELIST={nodes!r} in the environment is not a list of hosts; {IGNORE}")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def _tasks_here(environ: Environment) -> int:
    """Tasks of the step on this node, from SLURM_STEP_TASKS_PER_NODE as in `2(x3),1`."""
    counts: list[int] = []
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "1")):
        counts += [int(tasks)] * int(nodes or 1)
    node = _number(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
    return counts[node] if node < len(counts) else 1


def _own_gpus(environ: Environment, here: int, local: int) -> list[int] | None:
    """This process's share of the GPUs, as it numbers them, being the `local`th of `here` on the machine.

    None where it has the machine to itself, sees only its own (srun's --gpus-per-task), or the user chose them.
    """
    if here == 1 or "JAX_LOCAL_DEVICE_IDS" in environ:  # which jax reads
        return None
    visible = len(environ["CUDA_VISIBLE_DEVICES"].split(",")) if environ.get("CUDA_VISIBLE_DEVICES") else None
    total = _number(environ, "SLURM_GPUS_ON_NODE") if "SLURM_GPUS_ON_NODE" in environ else visible
    if not total:  # not known: one each, as jax has it; where there are no GPUs it means nothing
        return [local]
    if visible is not None and visible < max(total, here):
        return None
    if total % here:
        raise InputError(f"{total} GPUs cannot be shared evenly by the {here} processes on this machine")
    share = total // here
    return list(range(local * share, (local + 1) * share))


def _given_address(environ: Environment) -> str | None:
    """JAX_COORDINATOR_ADDRESS, which may be a host alone."""
    address = environ.get("JAX_COORDINATOR_ADDRESS")
    if not address:
        return None
    if re.search(r"^[^:]+:\d+$|\]:\d+$", address):
        return address
    host = f"[{address}]" if ":" in address and not address.startswith("[") else address
    return f"{host}:{_port(environ, '', DEFAULT_PORT)}"


def _port(environ: Environment, seed: str, default: int | None = None) -> int:
    """JAX_COORDINATOR_PORT, or one that all who know `seed` find, above those that Linux gives to connections."""
    if "JAX_COORDINATOR_PORT" in environ:
        return _number(environ, "JAX_COORDINATOR_PORT")
    return default or 61440 + zlib.crc32(seed.encode()) % 4096


def _number(environ: Environment, name: str) -> int:
    value = environ[name]
    if not re.fullmatch(r"\d{1,9}", value):
        raise InputError(f"{name}={value!r} in the environment is not a whole number; {IGNORE}")
    return int(value)
