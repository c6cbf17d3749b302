"""Round trips through Orbax, and what happens when storage holds something else than good checkpoints."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.checkpoint import RestoreError, restore_newest
from maxlite.config import InputError


def save_steps(make, toy, *steps, **keys):
    with make(max_num_checkpoints_to_keep=10, **keys) as checkpointer:
        for step in steps:
            checkpointer.save(step, toy.after(step))
            checkpointer.wait()
        assert checkpointer.stats.committed == len(steps), make.lines


def restore(make, toy, **keys):
    with make(**keys) as checkpointer:
        state, step = checkpointer.restore_or_init(toy.abstract(), toy.init)
    return state, step


def listing(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def damage(directory, step):
    """Cuts the largest file of a step in half."""
    largest = max((directory / str(step)).rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else -1)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


def test_round_trip_is_bitwise_and_carries_metadata(make, toy, same):
    save_steps(make, toy, 3, metadata={"config": {"steps": 7}, "data": "abc"})
    with make(metadata={"data": "other"}) as checkpointer:
        state, step = checkpointer.restore_or_init(toy.abstract(), toy.init)
        assert step == 3
        same(state, toy.after(3))
        assert checkpointer.saved_metadata == {"config": {"steps": 7}, "data": "abc"}
        assert checkpointer.stats.last_committed_step == 3
        assert checkpointer.work_at_risk_seconds() == 0
        assert not checkpointer.maybe_save(3, state)
    assert not make.lines


def test_fresh_directory_gives_the_initial_state(make, toy, same):
    state, step = restore(make, toy)
    assert step == 0
    same(state, toy.init())


def test_restored_state_can_be_donated_and_continues_bitwise(make, toy, same):
    save_steps(make, toy, 2)
    state, _ = restore(make, toy)
    before = jax.tree.leaves(state)
    same(toy.step(state), toy.after(3))
    assert all(leaf.is_deleted() for leaf in before)


def test_donating_the_state_does_not_corrupt_the_save_being_written(make, toy, same):
    state = toy.init()
    with make(max_num_checkpoints_to_keep=10) as checkpointer:
        for step in range(1, 13):
            state = toy.step(state)
            if step % 3 == 1:
                checkpointer.save(step, state)
    for step in (10, 7, 4, 1):
        restored, found = restore(make, toy)
        assert found == step
        same(restored, toy.after(step))
        shutil.rmtree(make.directory / str(step))


def test_metadata_records_step_parent_and_arrays(make, toy):
    save_steps(make, toy, 1, 2)
    raw = json.loads((make.directory / "2" / "metadata" / "metadata.json").read_text())
    assert (raw["format"], raw["step"], raw["parent_step"]) == (2, 2, 1)
    assert raw["arrays"]["params/w"] == {"shape": [4, 6], "dtype": "bfloat16"}
    assert raw["arrays"]["opt/0/mu/b"] == {"shape": [40_000], "dtype": "float32"}


def test_what_is_not_a_checkpoint_is_ignored_and_left_alone(make, toy, same):
    save_steps(make, toy, 1, 2)
    root = make.directory
    (root / "9").mkdir()  # empty
    shutil.copytree(root / "2", root / "8")  # half-deleted
    (root / "8" / "commit_success.txt").unlink()
    for name in ("notes", "metadata", "0012", "12.deleting.bak", "best.orbax-checkpoint-tmp", "7.set-aside-1"):
        (root / name).mkdir()
        (root / name / "file").write_text("mine")
    (root / "10").write_text("a file")
    (root / "11.orbax-checkpoint-tmp").write_text("a file")
    before = listing(root)
    leftovers = [root / "3.orbax-checkpoint-tmp", root / "4.orbax-checkpoint-tmp-123", root / "0.deleting"]
    for leftover in leftovers:
        (leftover / "state").mkdir(parents=True)
    state, step = restore(make, toy)
    assert step == 2
    same(state, toy.after(2))
    assert listing(root) == before
    assert make.lines == [f"ignoring steps 9, 8 in {root}: no commit marker"]
    save_steps(make, toy, 8)
    assert (root / "8.set-aside-1" / "state").is_dir()
    same(restore(make, toy)[0], toy.after(8))


@pytest.mark.parametrize("what", ["data", "metadata", "all arrays", "copy"])
def test_damaged_newest_step_falls_back_and_says_so(make, toy, same, what):
    save_steps(make, toy, 4, 6)
    newest = make.directory / "6"
    match what:
        case "data":
            damage(make.directory, 6)
        case "metadata":
            (newest / "metadata" / "metadata.json").write_text("{}")
        case "all arrays":
            shutil.rmtree(newest / "state")
        case "copy":
            shutil.rmtree(newest)
            shutil.copytree(make.directory / "4", newest)
    before = listing(make.directory)
    state, step = restore(make, toy)
    assert step == 4
    same(state, toy.after(4))
    assert listing(make.directory) == before
    assert f"checkpoint {newest} cannot be read and is skipped: " in make.lines[0]
    assert make.lines[1] == "falling back to step 4: 2 steps are lost to the damage"


def test_damaged_step_is_never_counted_deleted_or_overwritten(make, toy, same):
    save_steps(make, toy, 4, 6)
    damage(make.directory, 6)
    with make(max_num_checkpoints_to_keep=1) as checkpointer:
        checkpointer.restore_or_init(toy.abstract(), toy.init)
        checkpointer.save_final(5, toy.after(5))
        assert sorted(path.name for path in make.directory.iterdir()) == ["5", "6"]
        checkpointer.save_final(6, toy.after(6))
    assert sorted(path.name for path in make.directory.iterdir()) == ["6", "6.set-aside-1"]
    state, step = restore(make, toy)
    assert step == 6
    same(state, toy.after(6))


def test_no_good_step_is_an_error_and_nothing_is_changed(make, toy):
    save_steps(make, toy, 4, 6)
    damage(make.directory, 4)
    damage(make.directory, 6)
    before = listing(make.directory)
    with pytest.raises(RestoreError, match=r"none of the 2 checkpoints .*\(steps 6, 4\); nothing was changed"):
        restore(make, toy)
    assert listing(make.directory) == before


def test_another_structure_is_refused_with_the_first_differing_paths(make, toy):
    save_steps(make, toy, 1)
    abstract = toy.abstract()
    abstract.params["w"] = jax.ShapeDtypeStruct((4, 7), jnp.bfloat16)
    abstract.params["b"] = jax.ShapeDtypeStruct((40_000,), jnp.float16)
    abstract.params["new"] = jax.ShapeDtypeStruct((2,), jnp.float32)
    del abstract.opt[0]["mu"]["w"]
    with make() as checkpointer, pytest.raises(InputError) as caught:
        checkpointer.restore_or_init(abstract, toy.init)
    assert caught.value.problems[1:-1] == (
        "  opt/0/mu/w: checkpoint float32[4,6], this run has none",
        "  params/b: checkpoint float32[40000], this run float16[40000]",
        "  params/new: checkpoint has none, this run float32[2]",
        "  params/w: checkpoint bfloat16[4,6], this run bfloat16[4,7]",
    )


def test_parameters_alone_can_be_read(make, toy, same):
    save_steps(make, toy, 3, metadata={"a": 1})
    before = listing(make.directory)
    wanted = {"params": toy.abstract().params}
    restored = restore_newest(str(make.directory), wanted, partial=True)
    assert restored.metadata.run == {"a": 1}
    same(restored.state, {"params": toy.after(3).params})
    with pytest.raises(InputError, match="this run has none"):
        restore_newest(make.directory, wanted)
    with pytest.raises(InputError, match="new: checkpoint has none"):
        restore_newest(make.directory, {"new": jax.ShapeDtypeStruct((), jnp.float32)}, partial=True)
    assert listing(make.directory) == before
    assert restore_newest(make.directory / "nothing", wanted) is None


def test_checkpointing_off_says_what_it_does_not_use(make, toy):
    save_steps(make, toy, 5)
    _, step = restore(make, toy, enable_checkpointing=False)
    assert step == 0
    assert make.lines == [f"enable_checkpointing=false: checkpoint 5 in {make.directory} is not used"]


def test_state_that_cannot_be_named_is_refused(make):
    with make() as checkpointer, pytest.raises(ValueError, match="cannot be saved under the name"):
        checkpointer.save(1, {"a.b": np.zeros(1), "a": {"b": np.zeros(1)}})
