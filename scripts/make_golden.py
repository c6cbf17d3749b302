"""Makes tests/fixtures/llama_*.npz: what Hugging Face transformers and PyTorch compute for tiny Llamas.

Needs torch and transformers (the tests that read the files do not):

    python -m venv golden && golden/bin/pip install torch==2.13.0 transformers==5.24.0
    golden/bin/python scripts/make_golden.py

llama_weights.npz: one set of weights (float16, exact), tokens and batches that every case shares.
llama_<case>.npz: that case's logits, and its losses over ten AdamW steps.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch  # pyrefly: ignore[missing-import]
from transformers import LlamaConfig, LlamaForCausalLM  # pyrefly: ignore[missing-import]

FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures"

# Odd sizes on purpose: heads * head_dim != width, kv heads < heads, a vocabulary that is no power of two.
VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS, LENGTH = 131, 48, 4, 2, 24, 96, 2, 48
STEPS, BATCH, IGNORED = 10, 4, -100

PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
# With 32 as the original context and head_dim 24, the frequencies fall in all three bands: kept, blended, divided.
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "gqa_untied": (PLAIN, False, False),
    "gqa_tied": (PLAIN, True, False),
    "rope31_untied": (SCALED, False, False),
    "rope31_tied": (SCALED, True, False),
    "biases": (PLAIN, False, True),
}


def build(rope: dict[str, str | float], tied: bool, biases: bool) -> LlamaForCausalLM:
    """The transformers model of one case, float32, weights not yet set."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=MLP,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            rms_norm_eps=1e-5,
            rope_parameters=dict(rope),
            tie_word_embeddings=tied,
            attention_bias=biases,
            mlp_bias=biases,
            attn_implementation="eager",
        )
    ).float()


def draw_weights(seed: int) -> dict[str, np.ndarray]:
    """Weights by Hugging Face name: large enough that attention is far from uniform, norms far from one."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, p in build(PLAIN, tied=False, biases=True).named_parameters():
        if "norm" in name:
            value = 1 + 0.2 * rng.standard_normal(p.shape)
        elif name.endswith("bias"):
            value = 0.2 * rng.standard_normal(p.shape)
        else:
            value = p.shape[1] ** -0.5 * rng.standard_normal(p.shape)
        weights[name] = value.astype(np.float16)
    return weights


def draw_batches(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Training tokens [STEPS, BATCH, LENGTH + 1], learnable, and the valid targets [STEPS, BATCH, LENGTH]."""
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, VOCAB + 1)
    tokens = rng.choice(VOCAB, (STEPS, BATCH, LENGTH + 1), p=share / share.sum()).astype(np.uint8)
    valid = np.ones((STEPS, BATCH, LENGTH), bool)
    for row in range(BATCH):  # rows that end early, each by its own length
        valid[:, row, LENGTH - 7 * row :] = False
    return tokens, valid


def train(model: LlamaForCausalLM, tokens: np.ndarray, valid: np.ndarray) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the AdamW steps; norms, biases and the embedding are not decayed."""
    decayed, kept = [], []
    for name, p in model.named_parameters():
        (decayed if p.ndim == 2 and "embed_tokens" not in name else kept).append(p)
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    losses, norms = [], []
    for step_tokens, step_valid in zip(tokens, valid, strict=True):
        batch = torch.from_numpy(step_tokens.astype(np.int64))
        targets = torch.where(torch.from_numpy(step_valid), batch[:, 1:], IGNORED)
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def main() -> None:
    torch.manual_seed(0)
    weights = draw_weights(seed=0)
    tokens, valid = draw_batches(seed=1)
    prompt = np.random.default_rng(2).integers(VOCAB, size=(1, LENGTH)).astype(np.uint8)
    np.savez_compressed(
        FIXTURES / "llama_weights.npz", allow_pickle=False, prompt=prompt, tokens=tokens, valid=valid, **weights
    )
    for case, (rope, tied, biases) in CASES.items():
        model = build(rope, tied, biases)
        names = dict(model.named_parameters())
        with torch.no_grad():
            for name, p in names.items():
                p.copy_(torch.from_numpy(weights[name].astype(np.float32)))
            logits = model(torch.from_numpy(prompt.astype(np.int64))).logits.numpy()
        losses, norms = train(model, tokens, valid)
        np.savez_compressed(
            FIXTURES / f"llama_{case}.npz", allow_pickle=False, logits=logits, losses=losses, grad_norms=norms
        )
        print(case, f"logits std {logits.std():.3f}", "losses", [round(x, 4) for x in losses], "norms", norms[:3])


if __name__ == "__main__":
    main()
