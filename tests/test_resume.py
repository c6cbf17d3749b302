"""What a resumed run may change: every key is classified, and each kind is shown or refused as it should be."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.config import Config, InputError, resolve
from maxlite.config.resolve import keys_of, sections_of
from maxlite.resume import KINDS, OTHER_SECTIONS, Kind, config_changes, require_same_run

KEYS = sorted(KINDS)
ALWAYS_REFUSED = [key for key in KEYS if KINDS[key] in (Kind.SEED, Kind.OPTIMIZER, Kind.MODEL)]
NEVER_REFUSED = [key for key in KEYS if KINDS[key] in (Kind.OTHER, Kind.LENGTH, Kind.BATCH)]
DATA = [key for key in KEYS if KINDS[key] is Kind.DATA]


def metadata(*arguments, fingerprint="aaaa", rows=8, **more):
    """What a run says about itself, as it reads back from a checkpoint."""
    config = resolve(Config, None, ["run_name=r", "steps=100", *arguments], {}).config.flat()
    values = {"config": config, "data_fingerprint": fingerprint, "global_batch_size": rows, **more}
    return json.loads(json.dumps(values))


def other(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return ["elsewhere"] if isinstance(value, list) else f"{value}-2"


def changed(key):
    """(saved, now) that differ in one key."""
    saved, now = metadata(), metadata()
    now["config"][key] = other(now["config"][key])
    return saved, now


def refusal(saved, now):
    with pytest.raises(InputError) as caught:
        require_same_run(saved, now, allow_config_change=False)
    assert all("\n" not in problem for problem in caught.value.problems)
    return str(caught.value)


def test_every_key_is_classified_once():
    by_hand = [key for name, section in sections_of(Config).items() for key in section.model_fields]
    assert sorted(by_hand) == KEYS, "a new key: say in maxlite/resume.py whether a resumed run may change it"
    for name in OTHER_SECTIONS:
        assert {KINDS[key] for key in sections_of(Config)[name].model_fields} == {Kind.OTHER}


def test_the_seeds_the_optimizer_and_the_model_are_not_free_to_change():
    seeds = {key for key in KEYS if key.endswith("_seed")}
    optimizer = set(sections_of(Config)["optimizer"].model_fields)
    assert seeds <= set(ALWAYS_REFUSED)
    assert optimizer - set(ALWAYS_REFUSED) == {"gradient_accumulation_steps", "mu_dtype", "on_nonfinite"}


@settings(deadline=None)
@given(st.lists(st.sampled_from(KEYS), unique=True), st.booleans())
def test_every_difference_is_shown_once_and_a_run_goes_on_only_if_none_is_silent(keys, other_data):
    saved, now = metadata(), metadata(fingerprint="bbbb" if other_data else "aaaa")
    for key in keys:
        now["config"][key] = other(now["config"][key])
    changes = config_changes(saved, now)
    assert [c.key for c in changes if c.key != "data fingerprint"] == [key for key in now["config"] if key in keys]
    by_key = {change.key: change for change in changes}
    for key in keys:
        assert (by_key[key].before, by_key[key].now) == (saved["config"][key], now["config"][key])
        if key in ALWAYS_REFUSED:
            assert by_key[key].refused
        elif key in NEVER_REFUSED:
            assert not by_key[key].refused
        else:
            assert by_key[key].refused == other_data
    lines = require_same_run(saved, now, allow_config_change=True)
    assert len(lines) == len(changes)
    assert [line.endswith("(allowed by allow_config_change)") for line in lines] == [c.refused for c in changes]
    if other_data or set(keys) & set(ALWAYS_REFUSED):
        said = refusal(saved, now)
        assert all(f"{c.key}: {c.before} -> {c.now}" in said for c in changes if c.refused)
        assert "allow_config_change=true" in said
        assert "another run_name" in said
    else:
        assert require_same_run(saved, now, allow_config_change=False) == lines
    json.dumps([change._asdict() for change in changes])  # for the record of events


def test_a_run_that_starts_anew_or_is_the_same_has_nothing_to_say():
    assert require_same_run(None, metadata(), allow_config_change=False) == []
    assert require_same_run(metadata(), metadata(), allow_config_change=False) == []


@pytest.mark.parametrize("key", DATA)
def test_a_data_key_explains_other_data_and_does_not_matter_for_the_same(key):
    saved, now = changed(key)
    assert "the batches are the same" in str(config_changes(saved, now)[0])
    now["data_fingerprint"] = "bbbb"
    assert [change.key for change in config_changes(saved, now)] == [key]
    assert f"not the data that the checkpoint was made with: {key}" in refusal(saved, now)


def test_other_data_that_no_key_explains_is_refused():
    said = refusal(metadata(), metadata("per_device_batch_size=4", fingerprint="bbbb"))
    assert "data fingerprint: aaaa -> bbbb; no key changed, so the text itself did" in said
    assert "per_device_batch_size" not in said


def test_another_global_batch_is_refused_with_the_size_that_keeps_it():
    saved = metadata("per_device_batch_size=4", rows=4)
    said = refusal(saved, metadata("per_device_batch_size=8", rows=8, fingerprint="bbbb"))
    assert "global batch: 4 -> 8 sequences; per_device_batch_size=4 keeps 4" in said
    assert "fingerprint" not in said, "the batch size explains it"


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 8), st.integers(1, 8))
def test_the_size_that_is_named_keeps_the_global_batch(before, per_device, devices, accumulation):
    arguments = f"per_device_batch_size={per_device}", f"gradient_accumulation_steps={accumulation}"
    now = metadata(*arguments, rows=per_device * devices * accumulation)
    said = " ".join(str(change) for change in config_changes(metadata(*arguments, rows=before), now))
    if before == now["global_batch_size"]:
        assert said == ""
    elif before % accumulation:
        assert "keeps" not in said, "no size could"
    else:
        fits = float(said.split("per_device_batch_size=")[1].split()[0])
        assert fits * devices * accumulation == pytest.approx(before, rel=1e-9)


def test_the_same_global_batch_on_other_devices_is_only_shown():
    saved = metadata("per_device_batch_size=4", "gradient_accumulation_steps=1")
    now = metadata("per_device_batch_size=1", "gradient_accumulation_steps=2")
    lines = require_same_run(saved, now, allow_config_change=False)
    assert [line.split(": ", 1)[1] for line in lines] == [
        "gradient_accumulation_steps: 1 -> 2",
        "per_device_batch_size: 4.0 -> 1.0",
    ]


def test_another_optimizer_is_refused_with_the_way_to_have_one():
    said = refusal(metadata(), metadata("opt_type=lion"))
    assert "not the optimizer that the checkpoint was made with: opt_type: adamw -> lion" in said
    assert "load_parameters_path" in said
    assert "load_parameters_path" not in refusal(metadata(), metadata("rope_max_timescale=5e5"))


def test_a_longer_run_is_told_that_its_learning_rate_schedule_moves():
    (line,) = require_same_run(metadata(), metadata("steps=200"), allow_config_change=False)
    assert "steps: 100 -> 200; the learning-rate schedule" in line
    assert "learning_rate_schedule_steps=100 keeps it" in line
    fixed = ["learning_rate_schedule_steps=50"]
    (line,) = require_same_run(metadata(*fixed), metadata("steps=200", *fixed), allow_config_change=False)
    assert line.endswith("steps: 100 -> 200")


@settings(deadline=None)
@given(st.sampled_from([-1, 50, 100, 200]), st.sampled_from([-1, 50, 100, 200]), st.sampled_from([50, 100, 200]))
def test_a_schedule_may_be_written_otherwise_but_not_be_another(before, now, steps):
    saved = metadata(f"learning_rate_schedule_steps={before}")
    changes = config_changes(saved, metadata(f"learning_rate_schedule_steps={now}", f"steps={steps}"))
    same = (100 if before == -1 else before) == (steps if now == -1 else now)
    assert any(change.refused for change in changes) == (before != now and not same)


@settings(deadline=None)
@given(st.sets(st.sampled_from(KEYS)), st.booleans())
def test_a_key_that_an_older_version_did_not_have_had_its_default(missing, stray):
    saved, now = metadata(), metadata()
    for key in missing:
        del saved["config"][key]
    if stray:
        saved["config"]["old_key"] = 7
    fields = keys_of(Config)
    expected = [key for key in now["config"] if key in missing and fields[key].get_default() != now["config"][key]]
    changes = config_changes(saved, now)
    assert [change.key for change in changes] == expected + ["old_key"] * stray
    assert not any(change.refused for change in changes)


@pytest.mark.parametrize("missing", ["config", "data_fingerprint", "global_batch_size"])
def test_a_checkpoint_that_does_not_say_what_it_was_made_with_is_refused(missing):
    saved = metadata()
    del saved[missing]
    assert "not recorded" in refusal(saved, metadata())
    assert "not recorded" in refusal({}, metadata())
    assert require_same_run(saved, metadata(), allow_config_change=True)


def test_versions_and_mesh_are_shown_name_by_name():
    saved = metadata(versions={"jax": "1", "flax": "1"}, host="a")
    now = metadata(versions={"jax": "2", "flax": "1"}, mesh={"data": 2})
    assert [str(change) for change in config_changes(saved, now)] == [
        "versions.jax: 1 -> 2",
        "mesh.data: not recorded -> 2",
        "host: a -> not recorded",
    ]
    assert not any(change.refused for change in config_changes(saved, now))


def test_nothing_given_is_changed():
    saved, now = metadata(fingerprint="bbbb"), metadata("steps=5")
    before = copy.deepcopy((saved, now))
    require_same_run(saved, now, allow_config_change=True)
    assert (saved, now) == before
