"""How a run begins: from another run's state or parameters, and as several processes that must mean one directory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.checkpoint import Checkpointer, Peers, reading, start
from maxlite.config import CheckpointConfig, InputError


@pytest.fixture
def other(make, toy, tmp_path):
    """The directory of another run, whose steps 3 and 5 are saved."""
    run = tmp_path / "other"
    with make(run / "checkpoints", metadata={"of": "other"}) as checkpointer:
        for step in (3, 5):
            checkpointer.save(step, toy.after(step))
            checkpointer.wait()
        assert checkpointer.stats.committed == 2
    return run


def begin(make, toy, abstract=None, **keys):
    with make(**keys) as checkpointer:
        state, step = checkpointer.restore_or_init(abstract or toy.abstract(), toy.init)
        return state, step, checkpointer


PLACES = {"": 5, "checkpoints": 5, "checkpoints/5": 5, "checkpoints/3": 3}


@pytest.mark.parametrize("place", PLACES)
def test_full_state_of_a_run_its_checkpoints_or_one_step(make, toy, same, other, place):
    state, step, checkpointer = begin(make, toy, load_full_state_path=str(other / place))
    assert step == PLACES[place]
    same(state, toy.after(step))
    assert checkpointer.saved_metadata == {"of": "other"}
    assert checkpointer.stats.last_committed_step is None  # here, nothing is
    assert make.lines == [f"load_full_state_path: step {step} of {other / place}"]


@pytest.mark.parametrize("place", PLACES)
def test_parameters_of_a_run_its_checkpoints_or_one_step(make, toy, same, other, place):
    state, step, checkpointer = begin(make, toy, load_parameters_path=str(other / place))
    assert step == 0
    same(state.params, toy.after(PLACES[place]).params)
    same(state.opt, toy.init().opt)
    same(state.step, toy.init().step)
    assert checkpointer.saved_metadata is None
    assert make.lines == [f"load_parameters_path: step {PLACES[place]} of {other / place}"]


@pytest.mark.parametrize("key", ["load_full_state_path", "load_parameters_path"])
@pytest.mark.parametrize("place", ["nothing", "checkpoints/4", "empty"])
def test_no_checkpoint_there(make, toy, other, key, place):
    (other / "empty").mkdir()
    with pytest.raises(InputError, match=f"{key}=.*{place}: there is no checkpoint there"):
        begin(make, toy, **{key: str(other / place)})


def test_the_runs_own_checkpoint_comes_first(make, toy, same, other):
    with make() as checkpointer:
        checkpointer.save_final(1, toy.after(1))
    state, step, _ = begin(make, toy, load_full_state_path=str(other))
    assert step == 1
    same(state, toy.after(1))


def test_another_run_is_read_only(make, toy, other):
    (other / "checkpoints" / "5" / "integrity.json").unlink()
    (other / "checkpoints" / "7.orbax-checkpoint-tmp-1").mkdir()
    before = sorted(other.rglob("*"))
    _, step, _ = begin(make, toy, load_full_state_path=str(other))
    assert step == 3
    assert f"{other / 'checkpoints' / '5'} is damaged: it has no integrity record" in make.lines[0]
    assert sorted(other.rglob("*")) == before


@pytest.mark.parametrize("key", ["load_full_state_path", "load_parameters_path"])
def test_floating_dtypes_are_cast_and_said(make, toy, other, key):
    abstract = toy.abstract()
    abstract.params["w"] = jax.ShapeDtypeStruct((4, 6), jnp.float32)
    abstract.params["b"] = jax.ShapeDtypeStruct((40_000,), jnp.bfloat16)
    state, _, _ = begin(make, toy, abstract, **{key: str(other)})
    for name, dtype in (("w", jnp.float32), ("b", jnp.bfloat16)):
        assert state.params[name].dtype == dtype
        np.testing.assert_array_equal(state.params[name], toy.after(5).params[name].astype(dtype))
    casts = "changed dtype on the way in: params/b: float32[40000] -> bfloat16 and 1 more arrays"
    assert make.lines == [f"{key}: step 5 of {other}", casts]


def flip_data(run):
    """Flips a bit of the values of step 5; sizes and the record stay."""
    file = run / "checkpoints" / "5" / "state" / "params.b" / "c" / "0"
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(data)


def cut_record(run):
    (run / "checkpoints" / "5" / "integrity.json").unlink()


@pytest.mark.parametrize(
    ("verify", "damage", "step"),
    [
        ("full", flip_data, 3),
        ("committed", flip_data, 5),
        ("committed", cut_record, 3),
        ("off", flip_data, 5),
        ("off", cut_record, 5),
    ],
)
def test_how_much_is_verified(make, toy, other, monkeypatch, verify, damage, step):
    # Small files have digests, and these are small.
    monkeypatch.setattr("maxlite.checkpoint.integrity.SMALL_BYTES", 0)
    with make(other / "checkpoints") as checkpointer:
        checkpointer.save(5, toy.after(5))
    damage(other)
    found = begin(make, toy, load_full_state_path=str(other), checkpoint_verify=verify)
    assert found[1] == step


class CountPerThread(threading.local):
    """Counts up in each thread of its own, as a module's counter does in each process."""

    count = -1

    def __next__(self):
        self.count += 1
        return self.count


def as_processes(count, store, part):
    """Runs `part(peers)` as so many processes; what each returned or raised."""

    def outcome(index):
        try:
            return part(Peers(index, count, store))
        except InputError as error:
            return error

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(count) as pool:
        patch.setattr(reading, "_COUNT", CountPerThread())
        return list(pool.map(outcome, range(count)))


def test_directory_that_is_not_shared_is_refused_on_every_process(toy, tmp_path, store, monkeypatch):
    monkeypatch.setattr(start, "SHARED_SECONDS", 0.0)

    def part(peers):
        directory = tmp_path / f"of process {peers.index}"
        with Checkpointer(directory, CheckpointConfig(checkpoint_timeout_seconds=60), peers=peers) as checkpointer:
            return checkpointer.restore_or_init(toy.abstract(), toy.init)

    results = as_processes(3, store, part)
    assert all(isinstance(result, InputError) for result in results)
    assert "is not shared: this process does not see what process 0 wrote there" in str(results[0])
    assert str(results[0]).startswith(("process 1: ", "process 2: "))
    assert not list((tmp_path / "of process 0").iterdir())


def test_directory_that_process_0_cannot_make_is_refused_on_every_process(toy, tmp_path, store):
    (tmp_path / "file").write_text("")

    def part(peers):
        with Checkpointer(
            tmp_path / "file" / "checkpoints", CheckpointConfig(checkpoint_timeout_seconds=60), peers=peers
        ) as checkpointer:
            return checkpointer.restore_or_init(toy.abstract(), toy.init)

    results = as_processes(2, store, part)
    assert "cannot be used: " in str(results[0])
    assert str(results[1]) == f"process 0: {results[0]}"


def test_processes_restore_the_same_step_and_one_sets_aside(make, toy, same, tmp_path, store):
    with make() as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, toy.after(step))
            checkpointer.wait()
    (make.directory / "2" / "integrity.json").unlink()

    def part(peers):
        lines = []
        with Checkpointer(
            make.directory, CheckpointConfig(checkpoint_timeout_seconds=60), peers=peers, report=lines.append
        ) as checkpointer:
            return *checkpointer.restore_or_init(toy.abstract(), toy.init), lines

    results = as_processes(2, store, part)
    for state, step, lines in results:
        assert step == 1
        same(state, toy.after(1))
        assert "2 is damaged: " in lines[0]
    assert sorted(path.name for path in Path(make.directory).iterdir()) == ["1", "2.set-aside-1"]
