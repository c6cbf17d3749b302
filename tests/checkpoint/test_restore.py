"""Round trips through Orbax, and what happens when storage holds something else than good checkpoints."""

import json
import re
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


def below(root, path):
    return [str(path.relative_to(root)), *(str(inner.relative_to(root)) for inner in path.rglob("*"))]


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
    restored = restore_newest(root, toy.abstract(), make.lines.append)
    assert restored.metadata.step == 2
    assert restored.damaged == (9, 8)
    assert listing(root) == sorted([*before, *(name for leftover in leftovers for name in below(root, leftover))])
    assert make.lines == [
        f"checkpoint {root / '9'} is damaged: it has no commit marker",
        f"checkpoint {root / '8'} is damaged: it has no commit marker",
        "falling back to step 2: 7 steps are lost to the damage",
    ]
    state, step = restore(make, toy)
    assert step == 2
    same(state, toy.after(2))
    assert listing(root) == sorted(re.sub(r"^([89])(?=/|$)", r"\1.set-aside-1", name) for name in before)


@pytest.mark.parametrize("what", ["data", "metadata", "metadata is a file", "all arrays", "copy"])
def test_damaged_newest_step_falls_back_and_says_so(make, toy, same, what):
    save_steps(make, toy, 4, 6)
    newest = make.directory / "6"
    match what:
        case "data":
            damage(make.directory, 6)
        case "metadata":
            (newest / "metadata" / "metadata.json").write_text("{}")
        case "metadata is a file":
            shutil.rmtree(newest / "metadata")
            (newest / "metadata").write_text("a file")
        case "all arrays":
            shutil.rmtree(newest / "state")
        case "copy":
            shutil.rmtree(newest)
            shutil.copytree(make.directory / "4", newest)
    before = listing(make.directory)
    restored = restore_newest(make.directory, toy.abstract(), make.lines.append)
    assert restored.damaged == (6,)
    assert listing(make.directory) == before
    state, step = restore(make, toy)
    assert step == 4
    same(state, toy.after(4))
    assert listing(make.directory) == sorted(re.sub(r"^6(?=/|$)", "6.set-aside-1", name) for name in before)
    assert make.lines[:2] == make.lines[2:4]
    assert make.lines[2].startswith(f"checkpoint {newest} is damaged: ")
    assert make.lines[3] == "falling back to step 4: 2 steps are lost to the damage"
    assert make.lines[4].startswith(f"checkpoint {newest} was renamed to 6.set-aside-1; ")
    assert [kind for kind, _ in make.events[-2:]] == ["checkpoint_damaged", "restored"]


@pytest.mark.parametrize(("saved", "found"), [('"seed": 0', '"seed": 1'), ('"format": 2', '"format": 3')])
def test_metadata_is_not_believed_before_it_is_checked(make, toy, saved, found):
    save_steps(make, toy, 4, 6, metadata={"seed": 0})
    file = make.directory / "6" / "metadata" / "metadata.json"
    text = file.read_text()
    assert saved in text
    file.write_text(text.replace(saved, found))  # one bit

    def admit(run):
        if run != {"seed": 0}:
            raise InputError("another run")

    restored = restore_newest(make.directory, toy.abstract(), make.lines.append, admit=admit)
    assert restored.metadata.step == 4
    assert (
        make.lines[0]
        == f"checkpoint {make.directory / '6'} is damaged: metadata/metadata.json differs from what was saved"
    )


def test_a_newer_version_of_the_record_too_is_no_damage(make, toy):
    save_steps(make, toy, 4, 6)
    for file, found, new in (
        ("metadata/metadata.json", '"format": 2', '"format": 3'),
        ("integrity.json", "mixed-weighted-sums-2x32", "better"),
    ):
        path = make.directory / "6" / file
        assert found in path.read_text()
        path.write_text(path.read_text().replace(found, new))
    with pytest.raises(InputError, match="use a newer maxlite"):
        restore(make, toy)


def test_a_step_that_was_moved_and_linked_is_a_step_and_only_the_link_is_deleted(make, toy, same, tmp_path):
    save_steps(make, toy, 1, 2)
    elsewhere = tmp_path / "elsewhere"
    (make.directory / "1").rename(elsewhere)
    (make.directory / "1").symlink_to(elsewhere)
    (make.directory / "0.deleting").symlink_to(elsewhere)
    with make(max_num_checkpoints_to_keep=1) as checkpointer:
        checkpointer.restore_or_init(toy.abstract(), toy.init)
        checkpointer.save(3, toy.after(3))
        checkpointer.wait()
        checkpointer.save_final(3, toy.after(3))
    assert [path.name for path in make.directory.iterdir()] == ["3"]
    assert (elsewhere / "state").is_dir()
    assert not make.lines


def test_a_file_in_the_place_of_a_step_is_set_aside(make, toy, same):
    save_steps(make, toy, 2)
    (make.directory / "3").write_text("mine")
    with make() as checkpointer:
        checkpointer.restore_or_init(toy.abstract(), toy.init)
        checkpointer.save_final(3, toy.after(3))
    assert make.lines == [f"{make.directory / '3'} was in the way of a save and is now 3.set-aside-1"]
    assert (make.directory / "3.set-aside-1").read_text() == "mine"
    state, step = restore(make, toy)
    assert step == 3
    same(state, toy.after(3))


def test_damaged_step_is_never_counted_deleted_or_overwritten(make, toy, same):
    save_steps(make, toy, 4, 6)
    damage(make.directory, 6)
    with make(max_num_checkpoints_to_keep=1) as checkpointer:
        checkpointer.restore_or_init(toy.abstract(), toy.init)
        checkpointer.save_final(5, toy.after(5))
        assert sorted(path.name for path in make.directory.iterdir()) == ["5", "6.set-aside-1"]
        checkpointer.save(6, toy.after(6))
        checkpointer.wait()
        # Step 5 was read and found good; 6 was not yet read.
        assert sorted(path.name for path in make.directory.iterdir()) == ["5", "6", "6.set-aside-1"]
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
    with pytest.raises(RestoreError, match=r"each of the 2 .* nothing was changed\. step 6: .*; step 4: "):
        restore(make, toy)
    assert listing(make.directory) == before


def test_another_structure_is_refused_with_the_first_differing_paths(make, toy):
    save_steps(make, toy, 1)
    abstract = toy.abstract()
    abstract.params["w"] = jax.ShapeDtypeStruct((4, 7), jnp.bfloat16)
    abstract.params["b"] = jax.ShapeDtypeStruct((40_000,), jnp.int32)
    abstract.params["new"] = jax.ShapeDtypeStruct((2,), jnp.float32)
    del abstract.opt[0]["mu"]["w"]
    with make() as checkpointer, pytest.raises(InputError) as caught:
        checkpointer.restore_or_init(abstract, toy.init)
    assert caught.value.problems[1:-1] == (
        "  opt/0/mu/w: checkpoint float32[4,6], this run has none",
        "  params/b: checkpoint float32[40000], this run int32[40000]",
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


def test_checkpointing_off_does_not_start_anew_over_checkpoints(make, toy):
    save_steps(make, toy, 5)
    with pytest.raises(InputError, match=r"enable_checkpointing=false, but .* has a checkpoint of step 5"):
        restore(make, toy, enable_checkpointing=False)


def test_newest_verified_step_stays_besides_the_newest(make, toy):
    save_steps(make, toy, 2)
    with make(max_num_checkpoints_to_keep=2) as checkpointer:
        checkpointer.restore_or_init(toy.abstract(), toy.init)
        for step in (3, 4, 5):
            checkpointer.save(step, toy.after(step))
            checkpointer.wait()
        assert sorted(path.name for path in make.directory.iterdir()) == ["2", "4", "5"]
        checkpointer.save_final(6, toy.after(6))
        checkpointer.save(7, toy.after(7))
        checkpointer.wait()
    assert sorted(path.name for path in make.directory.iterdir()) == ["6", "7"]


def test_floating_dtypes_are_cast_and_said(make, toy):
    save_steps(make, toy, 3)
    abstract = toy.abstract()
    abstract.params["b"] = jax.ShapeDtypeStruct((40_000,), jnp.bfloat16)
    abstract.params["w"] = jax.ShapeDtypeStruct((4, 6), jnp.float32)
    with make() as checkpointer:
        state, _ = checkpointer.restore_or_init(abstract, toy.init)
    for name in "wb":
        wanted = toy.after(3).params[name].astype(abstract.params[name].dtype)
        np.testing.assert_array_equal(state.params[name], wanted)
        assert state.params[name].dtype == wanted.dtype
    assert make.lines == ["changed dtype on the way in: params/b: float32[40000] -> bfloat16 and 1 more arrays"]


def test_state_that_cannot_be_named_is_refused(make):
    with make() as checkpointer, pytest.raises(ValueError, match="cannot be saved under the name"):
        checkpointer.save(1, {"a.b": np.zeros(1), "a": {"b": np.zeros(1)}})
