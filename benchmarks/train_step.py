"""Speed of one training step on this machine's CPU: tokens/s, share of the matrix-product peak, peak memory.

    python benchmarks/train_step.py                          maxlite, float32 and bfloat16
    python benchmarks/train_step.py --peers PYTHON           and PyTorch, with a Python that has torch 2.13
    python benchmarks/train_step.py remat_policy=full        with other config keys
    python benchmarks/train_step.py --huge-pages             with memory from huge pages (see NOTES.md)

What is measured is the step that `maxlite.train` runs, on one fixed batch of random tokens that is already in memory.
Every program is a process of its own and they take turns, one block of steps per round; the medians over rounds are
printed. A block during which other processes took more than a tenth of the machine does not count and is run again,
for --patience seconds in all; what could not be kept clear of others is said. Each round also times a 2048^3 matrix
product in every process: the peak of a dtype is the median of the best product of each round, whoever ran it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SHAPE = {"width": 256, "layers": 4, "heads": 8, "mlp": 1024, "vocab": 32_000, "batch": 4, "length": 512}
TOKENS = SHAPE["batch"] * SHAPE["length"]
DTYPES = ("float32", "bfloat16")
KEYS = {
    "base_emb_dim": SHAPE["width"],
    "base_num_decoder_layers": SHAPE["layers"],
    "base_num_query_heads": SHAPE["heads"],
    "base_num_kv_heads": SHAPE["heads"],
    "head_dim": SHAPE["width"] // SHAPE["heads"],
    "base_mlp_dim": SHAPE["mlp"],
    "vocab_size": SHAPE["vocab"],
    "per_device_batch_size": SHAPE["batch"],
    "max_target_length": SHAPE["length"],
    "dataset_type": "synthetic",
    "run_name": "benchmark",
    # Everything fits in memory, so nothing is recomputed, as in PyTorch.
    "remat_policy": "none",
    # What a CPU is fastest with: layers compiled one by one, logits that fit its cache.
    "scan_layers": False,
    "loss_chunk_size": 256,
}


def busy_seconds() -> float:
    """CPU seconds that all processes, and other virtual machines, have taken since the start of the machine."""
    user, nice, system, _idle, _wait, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


class Worker:
    """One program in its own process; answers a JSON line for a JSON line."""

    def __init__(self, name: str, dtype: str, command: list[str], env: dict[str, str]) -> None:
        self.name, self.dtype = name, dtype
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.seconds: list[float] = []  # per step, one number a round
        self.gflops: list[float] = []
        self.peak_bytes = 0
        self.disturbed = 0  # rounds that had to be taken though others were busy

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} {self.dtype} failed, see above")
        return json.loads(line)

    def own_seconds(self) -> float:
        """CPU seconds that the process has taken."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def measure(self, steps: int, deadline: float) -> None:
        """One round, again and again until it ran undisturbed or the deadline has passed."""
        while True:
            start, before = time.monotonic(), busy_seconds() - self.own_seconds()
            product, block = self.ask(matmul=True), self.ask(steps=steps)
            others = busy_seconds() - self.own_seconds() - before
            disturbed = others > 0.1 * (time.monotonic() - start) * (os.cpu_count() or 1)
            if not disturbed or time.monotonic() > deadline:
                break
            time.sleep(1)
        self.disturbed += disturbed
        self.gflops.append(product["gflops"])
        self.seconds.append(block["seconds"] / steps)
        self.peak_bytes = block["peak_bytes"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve(dtype: str, overrides: list[str]) -> None:
    """The maxlite process: answers requests on stdin until it is closed."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from maxlite.config import Config, resolve
    from maxlite.program import BATCH_KEYS, build_program

    keys = [f"{key}={value}" for key, value in (KEYS | {"dtype": dtype}).items()]
    program = build_program(resolve(Config, None, [*keys, *overrides]).config)
    shape = (program.rows, program.config.data.max_target_length)
    tokens = np.random.default_rng(0).integers(program.config.model.vocab_size, size=(2, *shape), dtype=np.int32)
    batch = dict.fromkeys(BATCH_KEYS, np.ones(shape, np.int32)) | {"inputs": tokens[0], "targets": tokens[1]}
    batch["inputs_position"] = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    batch = program.to_device(batch)
    state, step, flags = program.init_state(), program.train_step, program.agreement.to_device({})

    matrix = jax.random.normal(jax.random.key(0), (2048, 2048)).astype(dtype)
    # A float32 result is what the matrix units give, and the faster form in XLA on CPU.
    product = jax.jit(lambda a: jnp.dot(a, a, preferred_element_type=jnp.float32))
    product(matrix).block_until_ready()

    for line in sys.stdin:
        request = json.loads(line)
        if "steps" in request:
            losses = []
            start = time.perf_counter()
            for _ in range(request["steps"]):
                state, metrics = step(state, batch, flags)
                losses.append(float(metrics["loss"]))
            answer = {"seconds": time.perf_counter() - start, "loss": losses[-1]}
        else:
            best = float("inf")
            for _ in range(3):
                start = time.perf_counter()
                product(matrix).block_until_ready()
                best = min(best, time.perf_counter() - start)
            answer = {"gflops": 2 * 2048**3 / best / 1e9}
        answer["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(answer), flush=True)


def step_gflop() -> float:
    """Arithmetic of one step, nothing recomputed (formula in `maxlite.model.flops`)."""
    from maxlite.config import ModelConfig
    from maxlite.model import train_step_flops

    config = ModelConfig.model_validate({key: KEYS[key] for key in KEYS.keys() & ModelConfig.model_fields.keys()})
    return train_step_flops(config, TOKENS, SHAPE["length"]) / 1e9


def start_workers(peers: str | None, dtypes: list[str], huge_pages: bool, overrides: list[str]) -> list[Worker]:
    workers = []
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if huge_pages:
        env["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    torch_script = str(Path(__file__).parent / "peers" / "torch_llama.py")
    shape = [f"--{name}={size}" for name, size in SHAPE.items()]
    for dtype in dtypes:
        workers.append(Worker("maxlite", dtype, [sys.executable, __file__, "--serve", dtype, *overrides], env))
        if peers:
            command = [peers, torch_script, *shape, f"--dtype={dtype}"]
            workers.append(Worker("torch eager", dtype, command, env))
            workers.append(Worker("torch compiled", dtype, [*command, "--compile"], env))
    return workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", metavar="PYTHON", help="also time PyTorch, with this Python")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps per round")
    parser.add_argument("--patience", type=float, default=120, help="seconds to spend on repeating disturbed rounds")
    parser.add_argument(
        "--huge-pages", action="store_true", help="every program with GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    parser.add_argument("--serve", choices=DTYPES, help=argparse.SUPPRESS)
    arguments, overrides = parser.parse_known_args()
    if arguments.serve:
        serve(arguments.serve, overrides)
        return

    workers = start_workers(arguments.peers, arguments.dtypes, arguments.huge_pages, overrides)
    for worker in workers:
        worker.ask(steps=2)  # compiles
    deadline = time.monotonic() + arguments.patience
    for _ in range(arguments.rounds):
        for worker in workers:
            worker.measure(arguments.steps, deadline)
    for worker in workers:
        worker.close()

    gflop = step_gflop()
    peaks = {
        dtype: statistics.median(
            max(rates) for rates in zip(*(w.gflops for w in workers if w.dtype == dtype), strict=True)
        )
        for dtype in arguments.dtypes
    }
    print(f"{TOKENS} tokens and {gflop:.1f} GFLOP a step; medians of {arguments.rounds} rounds of {arguments.steps}")
    for dtype, peak in peaks.items():
        print(
            f"matrix product 2048^3 in {dtype}: {peak:.0f} GFLOP/s, the limit is {TOKENS * peak / gflop:.0f} tokens/s"
        )
    print(f"{'program':16}{'dtype':10}{'s/step':>8}{'(range)':>16}{'tokens/s':>10}{'of peak':>9}{'memory':>10}")
    results = []
    for worker in workers:
        seconds = statistics.median(worker.seconds)
        share = gflop / seconds / peaks[worker.dtype]
        disturbed = f"  {worker.disturbed} rounds disturbed" if worker.disturbed else ""
        span = f"({min(worker.seconds):.3f}-{max(worker.seconds):.3f})"
        print(
            f"{worker.name:16}{worker.dtype:10}{seconds:8.3f}{span:>16}{TOKENS / seconds:10.0f}{share:9.0%}"
            f"{worker.peak_bytes / 2**20:6.0f} MiB{disturbed}"
        )
        results.append(
            {
                "program": worker.name,
                "dtype": worker.dtype,
                "seconds_per_step": worker.seconds,
                "disturbed_rounds": worker.disturbed,
                "tokens_per_second": TOKENS / seconds,
                "share_of_peak": share,
                "peak_gflops": peaks[worker.dtype],
                "peak_memory_bytes": worker.peak_bytes,
            }
        )
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"shape": SHAPE, "keys": KEYS, "overrides": overrides, "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
