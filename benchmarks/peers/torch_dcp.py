"""PyTorch's distributed.checkpoint, asynchronous, for benchmarks/checkpoint.py: JSON lines in, JSON lines out.

{"shapes": {name: shape}}   makes the state
{"save": DIRECTORY}         [seconds that the call took, seconds until the state was durable]
{"restore": DIRECTORY}      seconds until the state is loaded into tensors that exist already
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch  # type: ignore[missing-import]
import torch.distributed as dist  # type: ignore[missing-import]
import torch.distributed.checkpoint as dcp  # type: ignore[missing-import]


def main() -> None:
    warnings.filterwarnings("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29512"))
    dist.init_process_group("gloo", rank=0, world_size=1)
    state: dict[str, torch.Tensor] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "shapes" in request:
            state = {name: torch.randn(shape) for name, shape in request["shapes"].items()}
            answer: object = len(state)
        elif "save" in request:
            start = time.perf_counter()
            writer = dcp.FileSystemWriter(request["save"], thread_count=2)  # syncs its files: sync_files=True
            future = dcp.async_save(state, storage_writer=writer)
            blocked = time.perf_counter() - start
            future.result()
            descriptor = os.open(Path(request["save"]), os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
            answer = [blocked, time.perf_counter() - start]
        else:
            start = time.perf_counter()
            dcp.load(state, checkpoint_id=request["restore"])
            answer = time.perf_counter() - start
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
