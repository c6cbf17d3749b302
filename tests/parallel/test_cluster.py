"""Which process this is, from the variables that real platforms set.

Slurm: captured from Slurm 22.05 (srun and sbatch), and https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT
VARIABLES". Open MPI: captured from mpirun 4.1.8 and 5.0.11 on one machine, and
https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html; the URI of several addresses is jax's example
(jax/_src/clusters/ompi_cluster.py). JobSet: what xpk writes into pods
(https://github.com/AI-Hypercomputer/xpk, src/xpk/core/docker_resources.py). TPUs on GKE: what its webhook adds to pods
(https://cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice).
"""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxlite.config import InputError, ParallelConfig
from maxlite.parallel.cluster import Place, find_place, of_environment

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}
# Of the batch script itself, and of a shell in the allocation: SLURM_NTASKS and SLURM_PROCID are the job's.
SBATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NODELIST": "node[01-02]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
INTERACTIVE = SBATCH | {"SLURM_STEP_NODELIST": "node01", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
MPIRUN_4 = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1,10.108.0.1:34911",
    "PMIX_NAMESPACE": "1531576321",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
MPIRUN_5 = {name: value for name, value in MPIRUN_4.items() if name != "OMPI_MCA_orte_hnp_uri"} | {
    "OMPI_VERSION": "5.0.11",
    "PMIX_NAMESPACE": "prterun-vm-18459@1",
    "PMIX_SERVER_URI4": "prterun-vm-18459@0.0;tcp4://127.0.0.1:42139",  # of the daemon on this machine
}
XPK_GPU = {
    "JOBSET_NAME": "llama",
    "REPLICATED_JOB_NAME": "slice-job",
    "NNODES": "8",
    "NODE_RANK": "5",
    "JAX_COORDINATOR_PORT": "6002",
    "JAX_COORDINATOR_ADDRESS": "llama-slice-job-0-0.llama",
    "JOB_COMPLETION_INDEX": "5",
}
XPK_CPU = {
    "REPLICATED_JOB_NAME": "slice-job",
    "JOBSET_NAME": "llama",
    "JOB_INDEX": "1",
    "JOB_COMPLETION_INDEX": "2",
    "PROCESSES_IN_JOB": "4",
    "JAX_PROCESS_COUNT": "8",
    "JAX_COORDINATOR_ADDRESS": "llama-slice-job-0-0.llama",
}
GKE_TPU = {
    "TPU_WORKER_HOSTNAMES": "llama-slice-1-0.llama,llama-slice-1-1.llama",
    "TPU_WORKER_ID": "1",
    "TPU_TOPOLOGY": "2x4",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "localhost:8080",
    "JOB_COMPLETION_INDEX": "1",
}


def own(environ):
    return of_environment(environ).local_device_ids


def port(environ):
    return of_environment(environ).port


@pytest.mark.parametrize("environ", [{}, SBATCH, INTERACTIVE, {"JOB_COMPLETION_INDEX": "3"}, {"NNODES": "2"}])
def test_alone(environ):
    assert find_place(ParallelConfig(), environ) is None


def test_slurm():
    place = of_environment(SRUN)
    assert (place.host, place.count, place.index, place.source) == ("node01", 4, 3, "Slurm step 4711.0")
    everyone = [SRUN | {"SLURM_PROCID": str(i), "SLURM_NODEID": str(i // 2)} for i in range(4)]
    assert [of_environment(environ).index for environ in everyone] == [0, 1, 2, 3]
    assert {of_environment(environ).address for environ in everyone} == {place.address}
    assert 61440 <= place.port < 65536
    assert port(SRUN | {"SLURM_STEP_ID": "1"}) != place.port, "two steps of a job may run at once"
    assert of_environment(SRUN | {"JAX_COORDINATOR_PORT": "1234"}).address == "node01:1234"
    assert of_environment(SRUN | {"JAX_COORDINATOR_ADDRESS": "ib01:99"}).address == "ib01:99"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("vm", "vm"),
        ("node001,host2", "node001"),
        ("node[001-0015],host2", "node001"),
        ("node[001,007-015],host2", "node001"),
        ("node[7]", "node7"),
        ("n[1-2]-ib,m", "n1-ib"),
        ("rack[1-2]node[01-04]", "rack1node01"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes, first):
    assert of_environment(SRUN | {"SLURM_STEP_NODELIST": nodes}).host == first


def test_gpus_are_shared_by_the_tasks_of_a_node():
    assert own(SRUN) == [1], "not known how many there are: one each, as jax has it"
    eight = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    assert own(SRUN | eight) == [4, 5, 6, 7]
    assert own(SRUN | eight | {"SLURM_GPUS_ON_NODE": "8", "SLURM_LOCALID": "0"}) == [0, 1, 2, 3]
    alone_there = {"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"}
    assert own(SRUN | alone_there | eight) is None
    of_task = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_ON_NODE": "8"}
    assert own(SRUN | of_task) is None, "--gpus-per-task has shared them already"
    assert own(SRUN | {"CUDA_VISIBLE_DEVICES": "1"}) is None
    assert own(SRUN | eight | {"JAX_LOCAL_DEVICE_IDS": "3"}) is None, "the user's choice, which jax reads"
    with pytest.raises(InputError, match="7 GPUs cannot be shared evenly by the 2 processes"):
        own(SRUN | {"SLURM_GPUS_ON_NODE": "7"})
    last = {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_NODEID": "2", "SLURM_LOCALID": "0"}
    assert own(SRUN | last | eight) is None


def test_open_mpi():
    place = of_environment(MPIRUN_4)
    assert (place.host, place.count, place.index, place.source) == ("10.96.0.1", 4, 2, "Open MPI")
    assert place.local_device_ids == [0]
    ipv6 = "1314521088.0;tcp6://[fe80::b9b:ac5d:9cf0:b858,2620:10d:c083:150e::3000:2]:43370"
    assert of_environment(MPIRUN_4 | {"OMPI_MCA_orte_hnp_uri": ipv6}).host == "fe80::b9b:ac5d:9cf0:b858"
    both = "618004480.0;tcp://192.0.2.2:38837;tcp6://[fd00::2]:54577"
    assert of_environment(MPIRUN_4 | {"OMPI_MCA_orte_hnp_uri": both}).host == "192.0.2.2"
    assert of_environment(SRUN | MPIRUN_4) == place, "mpirun's daemons are started by srun"


def test_open_mpi_5_tells_no_host():
    here = MPIRUN_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert of_environment(here).host == "127.0.0.1"
    assert port(here) != port(here | {"PMIX_NAMESPACE": "prterun-vm-18460@1"}), "two runs on one machine"
    with pytest.raises(InputError, match="-x JAX_COORDINATOR_ADDRESS=HOST:PORT to mpirun"):
        of_environment(MPIRUN_5)
    place = of_environment(MPIRUN_5 | {"JAX_COORDINATOR_ADDRESS": "node1:1234"})
    assert (place.address, place.count, place.index) == ("node1:1234", 4, 2)


def test_jobset_as_xpk_sets_it():
    assert of_environment(XPK_GPU) == Place("llama-slice-job-0-0.llama:6002", 8, 5, "JAX_COORDINATOR_ADDRESS")
    cpu = Place("llama-slice-job-0-0.llama:1234", 8, 6, "JobSet")
    assert of_environment(XPK_CPU) == cpu
    unnamed = {name: value for name, value in XPK_CPU.items() if name != "JAX_COORDINATOR_ADDRESS"}
    assert of_environment(unnamed) == cpu
    with pytest.raises(InputError, match="JobSet: JAX_COORDINATOR_ADDRESS, or JOBSET_NAME"):
        of_environment({name: value for name, value in unnamed.items() if name != "JOBSET_NAME"})


@pytest.mark.parametrize(
    ("given", "host", "port"),
    [("a", "a", 1234), ("a:7", "a", 7), ("[::1]:7", "::1", 7), ("[::1]", "::1", 1234), ("fe80::1", "fe80::1", 1234)],
)
def test_jax_variables(given, host, port):
    environ = {"JAX_COORDINATOR_ADDRESS": given, "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}
    place = of_environment(SRUN | environ)
    assert (place.host, place.port, place.count, place.index) == (host, port, 3, 2)


def test_keys_win_and_detection_can_be_turned_off():
    keys = ParallelConfig(coordinator_address="a:1", num_processes=2, process_id=1)
    for config in (keys, keys.model_copy(update={"skip_jax_distributed_system": True})):
        assert find_place(config, SRUN) == Place("a:1", 2, 1, "coordinator_address")
    assert find_place(ParallelConfig(skip_jax_distributed_system=True), SRUN) is None
    assert find_place(ParallelConfig(), SRUN).count == 4


NAMES = sorted({*SRUN, *MPIRUN_4, *XPK_GPU, *XPK_CPU})
VALUES = st.one_of(st.text(max_size=12), st.sampled_from(["", "0", "1", "4", "-1", "1e3", "²", "0,1", "[", "a[1-"]))


@given(st.dictionaries(st.sampled_from(NAMES), VALUES), st.sampled_from([{}, SRUN, MPIRUN_4, XPK_GPU, XPK_CPU]))
def test_whatever_the_environment_says_is_a_place_or_one_line(changes, environ):
    try:
        place = find_place(ParallelConfig(), environ | changes)
    except InputError as error:
        assert len(error.problems) == 1
        assert "\n" not in str(error)
    else:
        assert place is None or 0 <= place.index < place.count


def test_tpu_slices_are_left_to_jax():
    program = (
        "from maxlite.config import ParallelConfig\nfrom maxlite.parallel.cluster import find_place\n"
        "print(find_place(ParallelConfig(jax_distributed_initialization_timeout=20)))"
    )
    # So jax takes the machine for one with TPUs, of which nothing is used here.
    environ = os.environ | GKE_TPU | {"JAX_FORCE_TPU_INIT": "1", "JAX_PLATFORMS": "tpu,cpu"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, check=True)
    assert done.stdout == f"{Place('localhost:8482', 4, 3, 'TPU pod')}\n"
