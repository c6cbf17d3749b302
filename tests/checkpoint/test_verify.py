"""What the final save finds when storage does not hold what was written."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from maxlite.checkpoint import SaveError, arrays, orbax_io, storage


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "emptied": lambda file: file.write_bytes(b""),
    "deleted": lambda file: file.unlink(),
    "one bit flipped": flip,
}


def damage_data(step, how):
    """Damages the file that holds the largest array's values."""
    how(Path(step) / "state" / "params.b" / "c" / "0")


def damage_after_commit(monkeypatch, how, times):
    """The next saves are damaged as soon as they are durable."""
    commit, left = storage.commit, [how] * times

    def damaging(temporary, step_dir):
        commit(temporary, step_dir)
        if left:
            damage_data(step_dir, left.pop())

    monkeypatch.setattr(storage, "commit", damaging)


@pytest.mark.parametrize("how", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("verb", ["save", "save_final"])
def test_damage_to_the_data_is_found_and_the_step_saved_again(make, toy, same, monkeypatch, how, verb):
    damage_after_commit(monkeypatch, how, times=1)
    with make() as checkpointer:
        if verb == "save":
            checkpointer.save(3, toy.after(3))
            checkpointer.wait()
        checkpointer.save_final(3, toy.after(3))
    assert f"{make.directory / '3'} is damaged: " in make.lines[0]
    assert sorted(path.name for path in make.directory.iterdir()) == ["3", "3.set-aside-1"]
    with make() as checkpointer:
        state, step = checkpointer.restore_or_init(toy.abstract(), toy.init)
    assert step == 3
    same(state, toy.after(3))


@pytest.mark.parametrize("how", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_every_time_is_an_error_and_the_older_step_stays_the_newest(make, toy, same, monkeypatch, how):
    with make() as checkpointer:
        checkpointer.save(2, toy.after(2))
        checkpointer.wait()
        damage_after_commit(monkeypatch, how, times=2)
        with pytest.raises(SaveError, match="the final state, step 3, is not saved"):
            checkpointer.save_final(3, toy.after(3))
    with make() as checkpointer:
        state, step = checkpointer.restore_or_init(toy.abstract(), toy.init)
    assert step == 2
    same(state, toy.after(2))


def test_nan_and_every_kind_of_number_equal_themselves(make):
    values = jnp.array([jnp.nan, -0.0, jnp.inf, 1.5])
    kinds = ("float32", "bfloat16", "float16", "float8_e4m3fn", "complex64", "int32", "uint8", "bool")
    with make() as checkpointer:
        checkpointer.save_final(1, {kind: jnp.nan_to_num(values).astype(kind) for kind in kinds} | {"nan": values})
    assert not make.lines


def test_arrays_are_read_back_a_few_at_a_time_to_the_live_sharding(make, toy, monkeypatch):
    read_arrays, seen = orbax_io.read_arrays, []

    def recorded(path, abstract, config):
        seen.append(list(abstract))
        assert all(leaf.sharding is not None for leaf in abstract.values())
        return read_arrays(path, abstract, config)

    monkeypatch.setattr(orbax_io, "read_arrays", recorded)
    monkeypatch.setattr(arrays, "GROUP_BYTES", 0)
    with make() as checkpointer:
        checkpointer.save_final(1, toy.after(1))
    assert len(seen) == 6
    assert all(len(names) == 1 for names in seen)
