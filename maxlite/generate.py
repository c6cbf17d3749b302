"""Samples text from a run: `python -m maxlite.generate RUN_DIRECTORY prompt="..."`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from maxlite.config import Config, Exit, InputError, ParallelConfig, read_command, report_input_error
from maxlite.config.fields import Int, Section, Seed, key

if TYPE_CHECKING:
    from maxlite.program import Network

USAGE = "usage: python -m maxlite.generate RUN_DIRECTORY [key=value ...] [--help]"


class GenerateConfig(Section):
    """What to sample. (The other keys are the run's own, from its config.yml.)"""

    prompt: str = key("", "text to go on from; empty: the start of a document")
    max_new_tokens: Int = key(100, "tokens to sample at most; max_target_length bounds prompt and sample", ge=1)
    temperature: float = key(0.8, "divides the logits; 0 takes the likeliest token", ge=0)
    generate_seed: Seed = key(0, "seed of the samples")


class GenerateCommand(Config):
    """A run's config, with what to sample from it."""

    generate: GenerateConfig


def main(arguments: Sequence[str]) -> Exit:
    """Runs the command; returns its exit status."""
    try:
        named = (
            bool(arguments) and arguments[0][:1] != "-" and ("=" not in arguments[0] or Path(arguments[0]).is_dir())
        )
        run = Path(arguments[0]) if named else None
        if run is None and not {"-h", "--help"} & set(arguments):
            raise InputError(f"no run directory given\n{USAGE}")
        if run is not None and not (run / "config.yml").is_file():
            raise InputError(f"{run}: not a run directory: it has no config.yml")
        config_file = [] if run is None else [str(run / "config.yml")]
        config = read_command(GenerateCommand, [*config_file, *arguments[len(config_file) :]], USAGE).config
        assert run is not None, "--help has left already"
        return generate(config, run)
    except InputError as error:
        report_input_error(error)
        return Exit.BAD_INPUT
    except KeyboardInterrupt:
        print()
        return Exit.DONE


def generate(config: GenerateCommand, run: Path) -> Exit:
    """Prints the prompt and what the run's newest checkpoint makes of it, as it comes.

    Raises:
        InputError: the run has no tokenizer or no checkpoint, or the prompt does not fit.
    """
    import jax

    from maxlite.checkpoint import RestoreError, restore_newest
    from maxlite.data import load_tokenizer
    from maxlite.parallel import make_mesh
    from maxlite.program import build_network

    if config.data.dataset_type == "synthetic":
        raise InputError(f"{run}: was trained on synthetic ids, which are not text")
    try:
        config.generate.prompt.encode()
    except UnicodeEncodeError as error:
        raise InputError("prompt: is not valid UTF-8") from error
    tokenizer = load_tokenizer(config.data)
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = [*start, *(int(i) for i in tokenizer.encode(config.generate.prompt))]
    context = config.data.max_target_length
    if not 0 < len(ids) < context:
        raise InputError(
            f"prompt: has {len(ids)} tokens; max_target_length={context} leaves room for 1 to {context - 1}"
        )

    # One device, and a kernel that takes any length, whatever the run was trained on.
    model = config.model.model_copy(update={"attention": "dot_product"})
    network = build_network(model, make_mesh(ParallelConfig(), jax.devices()[:1]))
    wanted = {"params": network.abstract_params}
    try:
        restored = restore_newest(run / "checkpoints", wanted, lambda line: print(line, file=sys.stderr), partial=True)
    except RestoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return Exit.SAVE_FAILED
    if restored is None:
        raise InputError(f"{run}: has no committed checkpoint yet")
    print(f"step {restored.metadata.step} of {run}", file=sys.stderr)

    shown = ""
    for token in _sample(network, restored.state["params"], ids, config.generate, context):
        if token == tokenizer.eos_id:
            break
        ids.append(token)
        text = tokenizer.decode(ids[len(start) :])
        # A character of several tokens is shown once it is whole.
        if not text.endswith("\ufffd"):
            print(text.removeprefix(shown), end="", flush=True)
            shown = text
    print()
    return Exit.DONE


def _sample(
    network: Network, params: object, ids: Sequence[int], config: GenerateConfig, context: int
) -> Iterator[int]:
    """New tokens one by one. Without a cache: every token costs a forward pass over the whole sequence."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    length = min(len(ids) + config.max_new_tokens, context)

    @jax.jit
    def next_token(params: object, tokens_S: jax.Array, position: jax.Array, key: jax.Array) -> jax.Array:
        model = nnx.merge(network.graphdef, params)
        x_D = model.hidden(tokens_S[None])[0, position]
        logits_V = jnp.dot(x_D, model.head_matrix().astype(x_D.dtype), preferred_element_type=jnp.float32)
        if config.temperature == 0:
            return jnp.argmax(logits_V)
        return jax.random.categorical(key, logits_V / config.temperature)

    tokens_S = jnp.zeros(length, jnp.int32).at[: len(ids)].set(jnp.asarray(ids))
    key = jax.random.key(config.generate_seed)
    for position in range(len(ids) - 1, length - 1):
        token = next_token(params, tokens_S, position, jax.random.fold_in(key, position))
        tokens_S = tokens_S.at[position + 1].set(token)
        yield int(token)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
