"""Time to save and to restore one state: maxlite with its checks, plain Orbax, PyTorch, and the disk itself.

    python benchmarks/checkpoint.py                          maxlite, Orbax, raw files; about 400 MB and 1 GB
    python benchmarks/checkpoint.py --peers PYTHON           and PyTorch's distributed.checkpoint, async
    python benchmarks/checkpoint.py --directory DIR          on another disk than the working directory's

Programs take turns, one save, one warm and one cold restore per round; the first round, which compiles, does not
count; medians are printed. "blocked" is how long the call that saves holds training, "committed" when the state is
durable under its name. raw is one file per array by numpy, written and synced one after the other, or by two threads;
its committed time and its cold read are the limits that the others are compared with. Cold: every file's pages are
dropped from the page cache before. maxlite's committed time includes fingerprints, digests and syncing everything;
its restore includes all checks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

SIZES_MB = (400, 1000)
COLUMNS = ("blocked", "committed", "restore_warm", "restore_cold")


def shapes(megabytes: int) -> dict[str, tuple[int, ...]]:
    """Five matrices of a model, stacked by layer, and their two Adam moments: float32, `megabytes` in all."""
    width = math.isqrt(megabytes * 10**6 // (4 * 3 * (8 * 4 + 2 * 16))) // 16 * 16
    layers = dict.fromkeys(("query", "key", "value", "out"), (8, width, width))
    parts = {**layers, "embedding": (16 * width, width), "head": (16 * width, width)}
    return {f"{group}.{name}": shape for group in ("params", "mu", "nu") for name, shape in parts.items()}


def drop_from_cache(directory: Path) -> None:
    """Makes the next read of every file come from the disk."""
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class Raw:
    """The limit: numpy arrays to files, synced; `threads` at a time."""

    def __init__(self, state: dict[str, np.ndarray], threads: int) -> None:
        self.name = "raw" if threads == 1 else f"raw, {threads} threads"
        self.state = state
        self.threads = threads

    def save(self, directory: Path) -> tuple[float, float]:
        directory.mkdir()
        start = time.perf_counter()
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(lambda item: self._write(directory, *item), self.state.items()))
        descriptor = os.open(directory, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        seconds = time.perf_counter() - start
        return seconds, seconds

    @staticmethod
    def _write(directory: Path, name: str, array: np.ndarray) -> None:
        with (directory / name).open("wb") as file:
            array.tofile(file)
            os.fsync(file.fileno())

    def restore(self, directory: Path) -> dict[str, Any]:
        with ThreadPoolExecutor(self.threads) as pool:
            arrays = pool.map(lambda name: np.fromfile(directory / name, np.float32), self.state)
            return dict(zip(self.state, arrays, strict=True))


class Maxlite:
    """The Checkpointer with its defaults."""

    name = "maxlite"

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self.records: list[Any] = []

    def _checkpointer(self, directory: Path) -> Any:
        from maxlite.checkpoint import Checkpointer
        from maxlite.config import CheckpointConfig

        return Checkpointer(directory, CheckpointConfig(), report=lambda line: None)

    def save(self, directory: Path) -> tuple[float, float]:
        with self._checkpointer(directory) as checkpointer:
            checkpointer.restore_or_init(self.state, lambda: self.state)
            start = time.perf_counter()
            checkpointer.save(1, self.state)
            blocked = time.perf_counter() - start
            checkpointer.wait()
            committed = time.perf_counter() - start
            self.records.append(next(iter(checkpointer.stats.commits)))
        return blocked, committed

    def restore(self, directory: Path) -> dict[str, Any]:
        import jax

        abstract = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for n, x in self.state.items()}
        with self._checkpointer(directory) as checkpointer:
            state, step = checkpointer.restore_or_init(abstract, lambda: self.state)
            assert step == 1
            return jax.block_until_ready(state)


class Orbax:
    """A CheckpointManager with its defaults, asynchronous; no checks."""

    name = "orbax"

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def save(self, directory: Path) -> tuple[float, float]:
        import orbax.checkpoint as ocp

        with ocp.CheckpointManager(directory.absolute()) as manager:
            start = time.perf_counter()
            manager.save(1, args=ocp.args.StandardSave(self.state))
            blocked = time.perf_counter() - start
            manager.wait_until_finished()
            return blocked, time.perf_counter() - start

    def restore(self, directory: Path) -> dict[str, Any]:
        import jax
        import orbax.checkpoint as ocp

        abstract = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for n, x in self.state.items()}
        with ocp.CheckpointManager(directory.absolute()) as manager:
            return jax.block_until_ready(manager.restore(1, args=ocp.args.StandardRestore(abstract)))


class Peer:
    """A program in a process of its own, which answers a JSON line for a JSON line."""

    def __init__(self, name: str, command: list[str], state: dict[str, list[int]]) -> None:
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._ask(shapes=state)

    def _ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} failed, see above")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def save(self, directory: Path) -> tuple[float, float]:
        blocked, committed = self._ask(save=str(directory.absolute()))
        return blocked, committed

    def restore(self, directory: Path) -> float:
        return self._ask(restore=str(directory.absolute()))


def timed(restore: Callable[[Path], Any], directory: Path) -> float:
    start = time.perf_counter()
    answer = restore(directory)
    return answer if isinstance(answer, float) else time.perf_counter() - start


def measure(program: Any, directory: Path) -> dict[str, float]:
    """One save and two restores, in a directory that is removed again."""
    os.sync()
    blocked, committed = program.save(directory)
    warm = timed(program.restore, directory)
    drop_from_cache(directory)
    cold = timed(program.restore, directory)
    shutil.rmtree(directory)
    return dict(zip(COLUMNS, (blocked, committed, warm, cold), strict=True))


def run(megabytes: int, arguments: argparse.Namespace) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    random = np.random.default_rng(0)
    host = {name: random.standard_normal(shape, np.float32) for name, shape in shapes(megabytes).items()}
    state = {name: jnp.asarray(array) for name, array in host.items()}
    jax.block_until_ready(state)
    size = sum(array.nbytes for array in host.values())
    programs: list[Any] = [Raw(host, 1), Raw(host, 2), Maxlite(state), Orbax(state)]
    if arguments.peers:
        script = str(Path(__file__).parent / "peers" / "torch_dcp.py")
        programs.append(Peer("torch async", [arguments.peers, script], {n: list(x.shape) for n, x in host.items()}))
    results: dict[str, list[dict[str, float]]] = {program.name: [] for program in programs}
    for number in range(arguments.rounds + 1):
        for program in programs:
            figures = measure(program, arguments.directory / f"bench-{os.getpid()}")
            if number > 0:
                results[program.name].append(figures)
    for program in programs[4:]:
        program.close()
    medians = {
        name: {column: statistics.median(figures[column] for figures in rounds) for column in COLUMNS}
        for name, rounds in results.items()
    }
    show(size, len(host), medians, arguments.rounds)
    parts = {
        part: statistics.median(getattr(record, part) for record in programs[2].records[1:])
        for part in ("device_to_host_seconds", "write_seconds", "digest_seconds", "commit_seconds")
    }
    print("of maxlite's committed time: " + ", ".join(f"{name[:-8]} {value:.3f} s" for name, value in parts.items()))
    return {"bytes": size, "arrays": len(host), "medians": medians, "rounds": results, "parts": parts}


def show(size: int, arrays: int, medians: dict[str, dict[str, float]], rounds: int) -> None:
    raw = medians["raw"]
    print(f"\n{size / 1e6:.0f} MB in {arrays} float32 arrays; seconds, medians of {rounds}; in brackets: times raw")
    print(f"{'':16}{'blocked':>9}{'committed':>18}{'restore, warm':>18}{'restore, cold':>18}")
    for name, row in medians.items():
        cells = "".join(f"{row[c]:10.3f} ({row[c] / raw[c]:4.2f})" for c in COLUMNS[1:])
        print(f"{name:16}{row['blocked']:9.3f} {cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", metavar="PYTHON", help="also time PyTorch, with this Python")
    parser.add_argument("--directory", type=Path, default=Path(), help="where to write; a new folder, removed again")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES_MB), metavar="MB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    arguments = parser.parse_args()
    results = [run(megabytes, arguments) for megabytes in arguments.sizes]
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
