"""Every file of a step damaged in every way, and bits flipped anywhere: never a silently wrong restore.

After each damage a restore gives the bits that were saved (nothing reads the damaged bytes), or an older good step
with a line that names the damaged one.
"""

import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.checkpoint import Checkpointer, restore_newest
from maxlite.config import CheckpointConfig

DTYPES = ("float32", "bfloat16", "int32", "uint8", "bool")
FLAGS = {
    "default": {},
    "ocdbt": {"checkpoint_storage_use_ocdbt": True},
    "zarr2, compressed": {"checkpoint_storage_use_zarr3": False, "checkpoint_storage_compression": True},
}
RANDOM_BITS = 70  # for each set of flags, 210 in all


def state_after(step):
    """Arrays of several kinds; every step's differ from every other's in every element that a dtype can tell."""
    rng = np.random.default_rng(step)
    params = {
        dtype: jnp.asarray(rng.integers(0, 256, (3, 8)) % (2 if dtype == "bool" else 256), dtype) for dtype in DTYPES
    }
    return {"params": params, "step": jnp.int32(step)}


ABSTRACT = jax.eval_shape(lambda: state_after(1))


def bits(state):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def flip(data, bit):
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def damages(data, rng):
    """What becomes of a file, by the name of the damage; None: it is gone."""
    yield "removed", None
    yield "emptied", b""
    yield "cut in half", data[: len(data) // 2]
    yield "its last byte lost", data[:-1]
    for place in ("first", "middle", "last"):
        bit = {"first": 0, "middle": 4 * len(data), "last": 8 * len(data) - 1}[place]
        yield f"{place} bit flipped", flip(data, bit)
    yield "a bit flipped", flip(data, rng.randrange(8 * len(data)))


@pytest.fixture(params=FLAGS.values(), ids=FLAGS.keys())
def checkpoints(request, tmp_path):
    """Steps 1 and 2, saved with the storage flags of a run."""
    with Checkpointer(tmp_path / "checkpoints", CheckpointConfig(**request.param), report=print) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_after(step))
            checkpointer.wait()
        assert checkpointer.stats.committed == 2
    return tmp_path / "checkpoints"


def check(checkpoints, what):
    """Restores after a damage to step 2; whether the damage was noticed."""
    lines = []
    restored = restore_newest(checkpoints, ABSTRACT, lines.append)
    step = restored.metadata.step
    assert bits(restored.state) == bits(state_after(step)), what
    assert restored.metadata.run == {}, what
    if step == 1:
        assert lines[0].startswith(f"checkpoint {checkpoints / '2'} is damaged: "), what
        assert lines[1:] == ["falling back to step 1: 1 steps are lost to the damage"], what
        assert restored.damaged == (2,)
    else:
        assert (step, lines) == (2, []), what
    return step == 1


def test_every_file_damaged_in_every_way(checkpoints):
    rng, noticed, total = random.Random(1), 0, 0
    files = sorted(path for path in (checkpoints / "2").rglob("*") if path.is_file())
    assert len(files) > 5
    for file in files:
        data = file.read_bytes()
        for how, damaged in damages(data, rng):
            if damaged is None:
                file.unlink()
            else:
                file.write_bytes(damaged)
            found = check(checkpoints, f"{file.relative_to(checkpoints)} {how}")
            # Nobody reads what is in the commit marker.
            assert found == (file.name != "commit_success.txt" or how == "removed"), (file, how)
            noticed, total = noticed + found, total + 1
            file.write_bytes(data)
    assert not check(checkpoints, "nothing")
    assert noticed > total - 10


def test_random_bits_of_the_whole_step(checkpoints):
    rng = random.Random(2)
    files = [(path, path.read_bytes()) for path in sorted((checkpoints / "2").rglob("*")) if path.is_file()]
    sizes = [len(data) for _, data in files]
    for _ in range(RANDOM_BITS):
        file, data = rng.choices(files, sizes)[0]
        bit = rng.randrange(8 * len(data))
        file.write_bytes(flip(data, bit))
        check(checkpoints, f"bit {bit} of {file.relative_to(checkpoints)} flipped")
        file.write_bytes(data)


def test_every_folder_removed(checkpoints, tmp_path):
    for folder in sorted(path for path in (checkpoints / "2").rglob("*") if path.is_dir()):
        aside = tmp_path / "aside"
        shutil.move(folder, aside)
        assert check(checkpoints, f"{folder} removed")
        shutil.move(aside, folder)
