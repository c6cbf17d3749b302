"""A process that trains the toy run with continuous saves and dies where it is told. Run by test_processes.py.

Usage: child.py DIRECTORY STAGE COUNT: SIGKILL to itself when STAGE is reached for the COUNTth time.
"""

import importlib.util
import os
import signal
import sys
from pathlib import Path

from maxlite.checkpoint import Checkpointer, orbax_io, storage
from maxlite.config import CheckpointConfig

spec = importlib.util.spec_from_file_location("checkpoint_conftest", Path(__file__).with_name("conftest.py"))
conftest = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = conftest
spec.loader.exec_module(conftest)


def die_at(stage, count):
    """Wraps the functions that a save passes through; the chosen one is cut short."""
    seen = 0

    def reached(here):
        nonlocal seen
        seen += here == stage
        if here == stage and seen == count:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(owner, name, before, after):
        original = getattr(owner, name)

        def wrapped(*args, **kwargs):
            reached(before)
            result = original(*args, **kwargs)
            reached(after)
            return result

        setattr(owner, name, wrapped)

    around(orbax_io.Writer, "start", "before write", "write started")
    around(orbax_io.Writer, "finish", "waiting", "written")
    around(storage, "commit", "before commit", "durable")
    rmtree = type(storage.absolute("/")).rmtree

    def half_rmtree(path, **kwargs):
        if path.name.endswith(".deleting"):
            (path / "state" / "_METADATA").unlink()
            reached("half deleted")
        rmtree(path, **kwargs)

    type(storage.absolute("/")).rmtree = half_rmtree


def main(directory, stage, count):
    die_at(stage, int(count))
    config = CheckpointConfig(enable_continuous_checkpointing=True, max_num_checkpoints_to_keep=2)
    toy = conftest.Toy
    with Checkpointer(directory, config) as checkpointer:
        state, step = checkpointer.restore_or_init(toy.abstract(), toy.init)
        known = None
        while True:
            state, step = toy.step(state), step + 1
            checkpointer.maybe_save(step, state)
            if checkpointer.stats.last_committed_step != known:
                known = checkpointer.stats.last_committed_step
                print("committed", known, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
