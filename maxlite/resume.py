"""What a resumed run may change: every difference from the run that was saved is shown, silent ones are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from maxlite.config import Config, InputError
from maxlite.config.resolve import keys_of, sections_of


class Kind(StrEnum):
    """What a difference is about."""

    DATA = "data"
    BATCH = "batch size"
    SEED = "seed"
    OPTIMIZER = "optimizer"
    MODEL = "model"
    LENGTH = "length of the run"
    OTHER = "config"


# Where a run is computed, when it is saved and what is measured: no key in these sections changes what is learned.
OTHER_SECTIONS = ("parallel", "checkpoint", "telemetry", "compile")

_KEYS = {
    # What decides the batches. Refused where the fingerprint differs: a file that only moved is the same text.
    Kind.DATA: (
        "dataset_type",
        "text_files",
        "eval_text_files",
        "eval_fraction",
        "text_column",
        "tokenizer_type",
        "tokenizer_path",
        "max_target_length",
        "enable_data_shuffling",
    ),
    # Shown; it is their product with the number of devices, the global batch, that must stay.
    Kind.BATCH: ("per_device_batch_size", "gradient_accumulation_steps"),
    # The initial weights are not drawn again: with another seed, config.yml would no longer tell how they came about.
    Kind.SEED: ("init_weights_seed", "data_shuffle_seed"),
    Kind.OPTIMIZER: (
        "opt_type",
        "learning_rate",
        "lr_schedule_type",
        "learning_rate_schedule_steps",
        "warmup_steps_fraction",
        "wsd_decay_steps_fraction",
        "learning_rate_final_fraction",
        "gradient_clipping_threshold",
        "adam_b1",
        "adam_b2",
        "adam_eps",
        "adam_weight_decay",
        "weight_decay_norms_and_embeddings",
        "momentum",
        "muon_beta",
    ),
    # Another function of the same weights. Heads and their width are here for the same reason as RoPE: kernels are
    # [inputs, heads * head_dim], so half the heads of twice the width fit every array.
    Kind.MODEL: (
        "base_emb_dim",
        "base_num_query_heads",
        "base_num_kv_heads",
        "base_mlp_dim",
        "base_num_decoder_layers",
        "head_dim",
        "vocab_size",
        "logits_via_embedding",
        "attention_bias",
        "mlp_bias",
        "normalization_layer_epsilon",
        "rope_max_timescale",
        "rope_type",
        "rope_factor",
        "rope_low_freq_factor",
        "rope_high_freq_factor",
        "original_max_position_embeddings",
        "z_loss_multiplier",
    ),
    Kind.LENGTH: ("steps",),
    Kind.OTHER: (
        # Names, places, and what is evaluated.
        "run_name",
        "base_output_directory",
        "base_config",
        "model_name",
        "jax_cache_dir",
        "data_cache_directory",
        "eval_per_device_batch_size",
        # How the same function is computed: rounding, memory and speed.
        "weight_dtype",
        "dtype",
        "mu_dtype",
        "attention",
        "sa_block_q",
        "sa_block_kv",
        "sa_block_kv_compute",
        "sa_block_q_dkv",
        "sa_block_kv_dkv",
        "sa_block_kv_dkv_compute",
        "sa_block_q_dq",
        "sa_block_kv_dq",
        "sa_use_fused_bwd_kernel",
        "scan_layers",
        "remat_policy",
        "loss_chunk_size",
        # Changes nothing before the update at which the other run would have stopped, and then says so.
        "on_nonfinite",
    ),
}
KINDS: dict[str, Kind] = {
    **{key: kind for kind, keys in _KEYS.items() for key in keys},
    **{key: Kind.OTHER for name in OTHER_SECTIONS for key in sections_of(Config)[name].model_fields},
}

NOT_RECORDED = "not recorded"


class Difference(NamedTuple):
    """One thing that the checkpoint's run and this one do not share."""

    key: str  # a config key, or what else the metadata tells: `global batch`, `versions.jax`, ...
    before: Any
    now: Any
    kind: Kind
    refused: bool  # would change the run silently: needs allow_config_change=true
    note: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.now}{self.note}"


def config_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Every difference between two runs.

    Args:
        saved: what the checkpoint says about the run that made it: `config`, `data_fingerprint`,
            `global_batch_size`, and whatever else `run_metadata` tells. A key that its version of maxlite did not
            have counts as having had its default.
        now: the same of this run, complete.
    """
    if "config" not in saved:
        return [Difference("config", NOT_RECORDED, "this run's", Kind.OTHER, True)]
    other_data = saved.get("data_fingerprint") != now["data_fingerprint"]
    changes = list(_key_changes(saved["config"], now["config"], other_data))
    if saved.get("global_batch_size") != now["global_batch_size"]:
        changes.append(_batch_change(saved.get("global_batch_size", NOT_RECORDED), now))
    explained = any(
        change.refused and (change.kind in (Kind.DATA, Kind.BATCH) or change.key == "data_shuffle_seed")
        for change in changes
    )
    if other_data and not explained:
        prints = saved.get("data_fingerprint", NOT_RECORDED), now["data_fingerprint"]
        note = "; no key changed, so the text itself did, or a library that makes batches of it"
        changes.append(Difference("data fingerprint", *prints, Kind.DATA, True, note))
    known = ("config", "data_fingerprint", "global_batch_size")
    before, after = ({key: value for key, value in of.items() if key not in known} for of in (saved, now))
    before, after = dict(_flat(before)), dict(_flat(after))
    for name in dict.fromkeys([*after, *before]):
        pair = before.get(name, NOT_RECORDED), after.get(name, NOT_RECORDED)
        if pair[0] != pair[1]:
            changes.append(Difference(name, *pair, Kind.OTHER, False))
    return changes


def require_same_run(
    saved: Mapping[str, Any] | None, now: Mapping[str, Any], *, allow_config_change: bool
) -> list[str]:
    """The differences from the checkpoint's run, a line each; nothing for a run that starts anew (`saved` None).

    Raises:
        InputError: one of them would change the run silently, and `allow_config_change` is not given.
    """
    changes = [] if saved is None else config_changes(saved, now)
    refused = [change for change in changes if change.refused]
    if refused and not allow_config_change:
        optimizer = any(change.kind is Kind.OPTIMIZER for change in refused)
        raise InputError(
            *(f"not the {change.kind} that the checkpoint was made with: {change}" for change in refused),
            "going on would silently make it another run. Put back what changed, use another run_name, or give "
            "allow_config_change=true to go on all the same"
            + (
                "; load_parameters_path=CHECKPOINT and another run_name start a new optimizer on its parameters"
                if optimizer
                else ""
            ),
        )
    allowed = " (allowed by allow_config_change)"
    return [f"changed since the checkpoint: {change}{allowed if change.refused else ''}" for change in changes]


def _key_changes(before: Mapping[str, Any], now: Mapping[str, Any], other_data: bool) -> Iterator[Difference]:
    fields = keys_of(Config)
    before = {**{key: field.get_default() for key, field in fields.items()}, **before}
    lengths = _schedule_steps(before), _schedule_steps(now)
    for key, value in now.items():
        if before[key] == value:
            continue
        kind, note = KINDS[key], ""
        refused = kind in (Kind.SEED, Kind.OPTIMIZER, Kind.MODEL) or (kind is Kind.DATA and other_data)
        if kind is Kind.DATA and not other_data:
            note = "; the batches are the same"
        elif key == "learning_rate_schedule_steps" and lengths[0] == lengths[1]:
            refused, note = False, f"; the schedule stays {lengths[0]} steps long"
        elif key == "steps" and before["learning_rate_schedule_steps"] == now["learning_rate_schedule_steps"] == -1:
            note = (
                "; the learning-rate schedule is as long as the run, so it moves; "
                f"learning_rate_schedule_steps={lengths[0]} keeps it"
            )
        yield Difference(key, before[key], value, kind, refused, note)
    for key in before:
        if key not in fields:
            yield Difference(key, before[key], "no longer a key", Kind.OTHER, False)


def _schedule_steps(config: Mapping[str, Any]) -> int:
    """The length of the learning-rate schedule."""
    length = config["learning_rate_schedule_steps"]
    return config["steps"] if length == -1 else length


def _batch_change(before: Any, now: Mapping[str, Any]) -> Difference:
    """Another global batch, and the per_device_batch_size that keeps the old one, if one does."""
    config, rows, note = now["config"], now["global_batch_size"], " sequences"
    if isinstance(before, int) and before % config["gradient_accumulation_steps"] == 0:
        fits = config["per_device_batch_size"] * before / rows
        note += f"; per_device_batch_size={fits:.12g} keeps {before}"
    return Difference("global batch", before, rows, Kind.BATCH, True, note)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`{"versions": {"jax": "1"}}` as `("versions.jax", "1")`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
