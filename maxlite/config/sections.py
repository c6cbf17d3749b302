"""Every config key: one line of type and default, one of doc, grouped by the part that takes it.

Names and meanings are MaxText's wherever MaxText has the key.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from maxlite.config.fields import Int, LocalPath, Section, Seed, key
from maxlite.config.read import shorten

DType = Literal["float32", "bfloat16", "float16"]


class RunConfig(Section):
    """The run: what it is called, where it lives, how long it is."""

    run_name: str = key("", "name of the run; its directory is base_output_directory/run_name", min_length=1)
    base_output_directory: LocalPath = key("runs", "parent of all run directories; a local path", min_length=1)
    base_config: str | None = key(None, "YAML file read before this one; relative to the file that names it")
    model_name: str | None = key(None, "preset of model keys: a file configs/models/<model_name>.yml")
    steps: Int = key(10_000, "optimizer updates in the whole run", "steps", ge=1)
    init_weights_seed: Seed = key(0, "seed of the initial weights")
    jax_cache_dir: LocalPath | None = key(None, "directory of compiled programs kept between runs; null: none kept")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.run_name:
            raise ValueError("run_name needs a value: name a config file, or write run_name=NAME")
        parts = self.run_name.split("/")
        if not self.run_name.isprintable() or not all(part.strip(". ") for part in parts):
            raise ValueError(f"run_name={self.run_name!r} cannot name a directory")
        if "://" in self.base_output_directory:
            raise ValueError(
                f"base_output_directory={self.base_output_directory}: object stores are not supported yet"
            )
        return self


class ModelConfig(Section):
    """The network, and how it is computed."""

    base_emb_dim: Int = key(2048, "width of the residual stream", ge=1)
    base_num_query_heads: Int = key(16, "attention query heads", ge=1)
    base_num_kv_heads: Int = key(16, "attention key and value heads; fewer than query heads: grouped", ge=1)
    base_mlp_dim: Int = key(7168, "hidden width of the SwiGLU block", ge=1)
    base_num_decoder_layers: Int = key(16, "decoder layers", ge=1)
    head_dim: Int = key(128, "width of one attention head; even, for RoPE", ge=2, multiple_of=2)
    vocab_size: Int = key(32_000, "rows of the embedding; at least the tokenizer's pieces", ge=2)
    logits_via_embedding: bool = key(False, "tie the output head to the token embedding")
    attention_bias: bool = key(False, "biases on the query, key, value and output projections")
    mlp_bias: bool = key(False, "biases on the three SwiGLU projections")
    normalization_layer_epsilon: float = key(1e-5, "epsilon of RMSNorm", gt=0)
    rope_max_timescale: float = key(10_000.0, "RoPE theta", gt=0)
    rope_type: Literal["default", "llama3.1"] = key("default", "RoPE frequencies: plain, or scaled as in Llama 3.1")
    rope_factor: float = key(8.0, "llama3.1: division of the lowest RoPE frequencies", ge=1)
    rope_low_freq_factor: float = key(1.0, "llama3.1: wavelengths over original/this are divided", gt=0)
    rope_high_freq_factor: float = key(4.0, "llama3.1: wavelengths under original/this are kept", gt=0)
    original_max_position_embeddings: Int = key(8192, "llama3.1: context before the scaling", "tokens", ge=1)
    weight_dtype: DType = key("float32", "dtype of the master weights")
    dtype: DType = key("bfloat16", "dtype of activations and matrix products; norms, softmax, loss: float32")
    attention: Literal["autoselected", "dot_product", "flash", "cudnn_flash_jax"] = key(
        "autoselected", "attention kernel: XLA, splash attention (TPU), cuDNN (GPU), or picked by device"
    )
    sa_block_q: Int = key(
        512, "flash: queries in one tile; tiles shrink to what divides the length", ge=128, multiple_of=128
    )
    sa_block_kv: Int = key(512, "flash: keys in one tile", ge=128, multiple_of=128)
    sa_block_kv_compute: Int = key(512, "flash: keys multiplied at once", ge=128, multiple_of=128)
    sa_block_q_dkv: Int = key(512, "flash, gradient of keys and values: queries in one tile", ge=128, multiple_of=128)
    sa_block_kv_dkv: Int = key(512, "flash, gradient of keys and values: keys in one tile", ge=128, multiple_of=128)
    sa_block_kv_dkv_compute: Int = key(
        512, "flash, gradient of keys and values: keys multiplied at once", ge=128, multiple_of=128
    )
    sa_block_q_dq: Int = key(512, "flash, gradient of queries: queries in one tile", ge=128, multiple_of=128)
    sa_block_kv_dq: Int = key(512, "flash, gradient of queries: keys in one tile", ge=128, multiple_of=128)
    sa_use_fused_bwd_kernel: bool = key(
        False, "flash: all gradients in one kernel; sa_block_q_dq and sa_block_kv_dq are then not used"
    )
    scan_layers: bool = key(True, "one compiled layer body for all layers; the numbers do not depend on it")
    remat_policy: Literal["full", "minimal", "save_qkv_proj", "save_dot_except_mlp", "none"] = key(
        "full", "what the backward pass recomputes; none: keeps every activation"
    )
    loss_chunk_size: Int = key(0, "tokens whose logits exist at once; 0: all of them", "tokens", ge=0)
    z_loss_multiplier: float = key(0.0, "weight of the squared log-normaliser in the loss", ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.base_num_query_heads % self.base_num_kv_heads:
            raise ValueError(
                f"base_num_query_heads={self.base_num_query_heads} is not a multiple of "
                f"base_num_kv_heads={self.base_num_kv_heads}"
            )
        if self.rope_type == "llama3.1" and self.rope_high_freq_factor <= self.rope_low_freq_factor:
            raise ValueError("rope_high_freq_factor must be greater than rope_low_freq_factor")
        return self


class ParallelConfig(Section):
    """The device mesh, and the processes that make it up."""

    ici_data_parallelism: Int = key(1, "devices that each hold all weights; -1: what is left", ge=-1)
    ici_fsdp_parallelism: Int = key(-1, "devices that share weights and batch; -1: what is left", ge=-1)
    ici_context_parallelism: Int = key(
        1, "devices that share each sequence; -1: what is left", ge=-1, aka="ici_sequence_parallelism"
    )
    ici_tensor_parallelism: Int = key(1, "devices that share each layer's heads and MLP; -1: what is left", ge=-1)
    dcn_data_parallelism: Int = key(-1, "slices that each hold all weights; -1: what is left", ge=-1)
    dcn_fsdp_parallelism: Int = key(1, "slices that share weights and batch; -1: what is left", ge=-1)
    dcn_context_parallelism: Int = key(
        1, "slices that share each sequence; -1: what is left", ge=-1, aka="dcn_sequence_parallelism"
    )
    dcn_tensor_parallelism: Int = key(1, "slices that share each layer's heads and MLP; -1: what is left", ge=-1)
    logical_axis_rules: list[tuple[str, list[str]]] = key(
        [],
        "[logical axis, [mesh axes]]: over which mesh axes a dimension of weights, or of activations (activation_*), "
        "is spread, in place of the default",
    )
    coordinator_address: str | None = key(
        None, "host:port where process 0 is met by the others; null: as the environment tells (Slurm, ...), or alone"
    )
    num_processes: Int = key(1, "with coordinator_address: processes of the run, all started with one command", ge=1)
    process_id: Int = key(0, "with coordinator_address: which of the num_processes this one is, from 0", ge=0)
    skip_jax_distributed_system: bool = key(
        False, "do not look for other processes in the environment: Slurm, Open MPI, JobSet, TPU pods"
    )
    jax_distributed_initialization_timeout: Int = key(
        300, "longest wait at the start for all processes to come", "seconds", ge=1
    )
    jax_distributed_heartbeat_timeout_seconds: Int = key(
        30, "a process that was silent for so long is taken for dead, and the others leave", "seconds", ge=1
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for kind in ("ici_", "dcn_"):
            sizes = {name: getattr(self, name) for name in type(self).model_fields if name.startswith(kind)}
            zero = [name for name, size in sizes.items() if size == 0]
            if zero:
                raise ValueError(f"{', '.join(zero)}: 0 devices; 1 means not used, -1 means what is left")
            fill = [name for name, size in sizes.items() if size == -1]
            if len(fill) > 1:
                raise ValueError(f"only one {kind} key may be -1 (what is left), here: {', '.join(fill)}")
        if self.process_id >= self.num_processes:
            raise ValueError(
                f"process_id={self.process_id} with num_processes={self.num_processes}: they count from 0 to "
                f"{self.num_processes - 1}"
            )
        if self.coordinator_address is None:
            if self.num_processes > 1:
                raise ValueError(
                    f"num_processes={self.num_processes} needs coordinator_address=HOST:PORT of process 0"
                )
            return self
        host, _, port = self.coordinator_address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(
                f"coordinator_address={shorten(self.coordinator_address)}: expected HOST:PORT, as in 10.0.0.1:1234"
            )
        if self.num_processes == 1:
            raise ValueError(f"coordinator_address={shorten(self.coordinator_address)} needs num_processes over 1")
        return self


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    opt_type: Literal["adamw", "adafactor", "lion", "sgd", "muon"] = key("adamw", "optax optimizer")
    learning_rate: float = key(3e-4, "peak learning rate; a float32", ge=0, le=3.4e38)
    lr_schedule_type: Literal["cosine", "wsd", "linear", "constant"] = key("cosine", "shape after the warm-up")
    learning_rate_schedule_steps: Int = key(-1, "length of the schedule; -1: steps", "steps", ge=-1)
    warmup_steps_fraction: float = key(0.1, "share of the schedule spent rising from 0", ge=0, le=1)
    wsd_decay_steps_fraction: float = key(0.1, "wsd: share of the schedule spent falling at its end", ge=0, le=1)
    learning_rate_final_fraction: float = key(0.1, "final learning rate as a share of the peak", ge=0, le=1)
    gradient_clipping_threshold: float = key(1.0, "largest global gradient norm; 0: no clipping", ge=0)
    gradient_accumulation_steps: Int = key(1, "micro-batches per optimizer update", ge=1)
    adam_b1: float = key(0.9, "decay of the first moment (adamw, lion, muon's adamw)", ge=0, lt=1)
    adam_b2: float = key(0.95, "decay of the second moment (adamw, lion, muon's adamw)", ge=0, lt=1)
    adam_eps: float = key(1e-8, "added to the root of the second moment", gt=0)
    adam_weight_decay: float = key(0.1, "decoupled weight decay", ge=0)
    weight_decay_norms_and_embeddings: bool = key(False, "decay norms, biases and embeddings too")
    mu_dtype: DType | None = key(None, "dtype of the first moment; null: weight_dtype")
    momentum: float = key(0.9, "sgd: momentum", ge=0, lt=1)
    muon_beta: float = key(0.95, "muon: momentum", ge=0, lt=1)
    on_nonfinite: Literal["stop", "skip"] = key(
        "stop",
        "non-finite loss, gradient or result: stop with exit 4, or skip that update; 10 in a row stop all the same",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.learning_rate_schedule_steps == 0:
            raise ValueError("learning_rate_schedule_steps=0: give a length, or -1 for steps")
        total = self.warmup_steps_fraction + self.wsd_decay_steps_fraction
        if self.lr_schedule_type == "wsd" and total > 1:
            raise ValueError(f"warmup_steps_fraction + wsd_decay_steps_fraction = {total:g}, more than the schedule")
        return self


class DataConfig(Section):
    """Where tokens come from and how they become batches."""

    dataset_type: Literal["text", "synthetic"] = key("text", "text: documents from text_files; synthetic: random ids")
    text_files: list[LocalPath] = key(
        ["corpus:sotu", "corpus:shakespeare"],
        "documents: .txt, .jsonl, .jsonl.xz, .jsonl.gz, globs, or a bundled corpus:sotu, corpus:shakespeare",
        min_length=1,
    )
    eval_text_files: list[LocalPath] = key([], "held-out documents; empty: eval_fraction of text_files' documents")
    eval_fraction: float = key(0.05, "share of the documents held out for evaluation, whole documents", ge=0, lt=1)
    text_column: str = key("text", "jsonl: the field that holds a document's text", min_length=1)
    tokenizer_type: Literal["sentencepiece", "huggingface", "byte"] = key("sentencepiece", "kind of tokenizer")
    tokenizer_path: LocalPath | None = key(None, "tokenizer file (.model or tokenizer.json); null: the bundled one")
    data_cache_directory: LocalPath = key(
        "~/.cache/maxlite", "where tokenised text is kept between runs", min_length=1
    )
    max_target_length: Int = key(2048, "length of one training sequence", "tokens", ge=1)
    per_device_batch_size: float = key(8.0, "sequences per device and micro-batch; may be under 1", gt=0)
    eval_per_device_batch_size: float = key(0.0, "the same for evaluation; 0: per_device_batch_size", ge=0)
    data_shuffle_seed: Seed = key(0, "seed of the order of training sequences")
    enable_data_shuffling: bool = key(True, "shuffle training sequences anew every epoch")


class CheckpointConfig(Section):
    """When the run is saved, what is kept, whether it is good."""

    enable_checkpointing: bool = key(True, "save checkpoints at all")
    async_checkpointing: bool = key(True, "write in the background while training goes on")
    enable_continuous_checkpointing: bool = key(False, "start the next save as soon as the last one is committed")
    continuous_checkpointing_minimum_interval_secs: float = key(
        0.0, "continuous: least time between the starts of two saves", "seconds", ge=0, aka="minimum_interval_secs"
    )
    continuous_checkpointing_max_overhead: float = key(
        0.0,
        "continuous: largest mean slow-down by saves, a share of the step time (0.05: 5%); 0: no limit",
        ge=0,
        le=1,
    )
    expected_mtbf_hours: float = key(
        0.0,
        "continuous: mean time between failures of the whole run, to choose the interval by; 0: not known",
        "hours",
        ge=0,
    )
    checkpoint_period: Int = key(1000, "steps between two saves when not continuous", "steps", ge=1)
    checkpoint_period_seconds: float = key(
        0.0, "seconds between two saves when not continuous, beside checkpoint_period; 0: none", "seconds", ge=0
    )
    save_checkpoint_on_start: bool = key(False, "save the initial state, step 0")
    save_checkpoint_on_completion: bool = key(True, "save the state after the last step")
    preemption_grace_seconds: float = key(
        25.0, "after SIGTERM or SIGINT: longest time until the process has saved and left", "seconds", gt=0
    )
    max_num_checkpoints_to_keep: Int = key(10, "newest checkpoints kept", ge=1)
    keep_checkpoint_every_n_steps: Int = key(
        0, "also keep for good: checkpoints of steps that this divides; 0: none", "steps", ge=0
    )
    keep_checkpoint_every_n_seconds: float = key(
        0.0, "also keep for good: the first checkpoint of every so many seconds; 0: none", "seconds", ge=0
    )
    keep_best_n_checkpoints: Int = key(0, "also keep: so many checkpoints with the lowest keep_best_metric", ge=0)
    keep_best_metric: Literal["eval_loss", "loss"] = key("eval_loss", "what keep_best_n_checkpoints goes by")
    checkpoint_save_policy: str | None = key(
        None, "your own class, module.Class, that decides when to save; see docs/checkpoint_policies.md"
    )
    checkpoint_preservation_policy: str | None = key(
        None, "your own class, module.Class, that decides what to keep; see docs/checkpoint_policies.md"
    )
    checkpoint_timeout_seconds: float = key(600.0, "longest a save may take before it has failed", "seconds", gt=0)
    on_save_failure: Literal["keep_training", "stop"] = key(
        "keep_training", "a save failed: go on and try again, or stop with exit 3"
    )
    checkpoint_verify: Literal["off", "committed", "full"] = key(
        "full",
        "what a restore checks. off: the commit marker; committed: the integrity record and the files' sizes too; "
        "full: every bit of every array too",
    )
    checkpoint_storage_use_ocdbt: bool | None = key(
        None, "few large files; false: a file per array and shard; null: few files on object stores only"
    )
    checkpoint_storage_use_zarr3: bool = key(True, "zarr 3 rather than zarr 2")
    checkpoint_storage_compression: bool = key(False, "compress arrays (zstd); costs processor time, gains little")
    checkpoint_storage_concurrent_gb: Int | None = key(
        None, "most of arrays that is written or read at once, on each host; null: Orbax's limit", "GB", ge=1
    )
    load_parameters_path: str | None = key(
        None, "start from these parameters, with a new optimizer, at step 0: a run, checkpoints or step directory"
    )
    load_full_state_path: str | None = key(
        None, "start from this state, at its step: a run, checkpoints or step directory"
    )
    allow_config_change: bool = key(
        False, "resume although data, seed, batch size or optimizer are not those of the checkpoint"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        continuous = self.enable_checkpointing and self.enable_continuous_checkpointing
        if continuous and not self.async_checkpointing:
            raise ValueError(
                "enable_continuous_checkpointing=true with async_checkpointing=false would stop training for a "
                "save at every step; set async_checkpointing=true, or use checkpoint_period"
            )
        if self.load_parameters_path and self.load_full_state_path:
            raise ValueError("load_parameters_path and load_full_state_path: only one state can be the first one")
        return self

    def warnings(self, steps: int) -> list[str]:
        """Settings that are allowed and can hardly be meant, one line each; `steps` is the length of the run."""
        if not self.enable_checkpointing:
            return ["enable_checkpointing=false: nothing of this run will be saved"]
        lines = []
        if not self.enable_continuous_checkpointing:
            only = (
                "continuous_checkpointing_minimum_interval_secs",
                "continuous_checkpointing_max_overhead",
                "expected_mtbf_hours",
            )
            unused = [name for name in only if getattr(self, name)]
            lines += [f"{name} has no effect without enable_continuous_checkpointing=true" for name in unused]
            timed = self.checkpoint_period_seconds or self.checkpoint_save_policy
            if self.checkpoint_period > steps and not timed:
                lines.append(
                    f"checkpoint_period={self.checkpoint_period} is longer than the run, steps={steps}: nothing is "
                    "saved before its end; a failure would lose all of it"
                )
        if not self.save_checkpoint_on_completion:
            lines.append("save_checkpoint_on_completion=false: the last state is saved only if a save is due there")
        return lines


class TelemetryConfig(Section):
    """What is measured and shown."""

    log_period: Int = key(10, "steps between two log lines", "steps", ge=1)
    eval_interval: Int = key(-1, "steps between two evaluations; -1: only after the last step", "steps", ge=-1)
    eval_steps: Int = key(-1, "held-out batches per evaluation; -1: all of them, 0: no evaluation", ge=-1)
    enable_tensorboard: bool = key(False, "write TensorBoard files too (extra: tensorboard)")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.eval_interval == 0:
            raise ValueError("eval_interval=0: give a number of steps, or -1 for only after the last step")
        return self

    def evaluation_due(self, step: int, last: int) -> bool:
        """Whether the held-out loss is wanted after `step` updates of `last`."""
        if self.eval_steps == 0 or step == 0:
            return False
        return step == last or (self.eval_interval > 0 and step % self.eval_interval == 0)


class CompileConfig(Section):
    """What maxlite.compile compiles for; training takes no notice of it."""

    compile_topology: str | None = key(None, "TPU slice to compile for, such as v5p-128, v5e-256, v6e-256, tpu7x-128")
    compile_topology_num_slices: Int = key(1, "slices of compile_topology", ge=1)
    compiled_trainstep_file: LocalPath | None = key(
        None, "file that the compiled train step is written to, in the form of the TPU runtime; null: none"
    )
    compile_storage_gb_per_second: float = key(
        1.0, "what one host writes to the storage, to tell how long a save will take", "GB/s", gt=0
    )
