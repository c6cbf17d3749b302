"""The benchmark's Llama written as a PyTorch user would, for `benchmarks/train_step.py --peers`.

Reads one request a line, answers one JSON object a line: see `serve` in train_step.py. Needs torch only.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from contextlib import nullcontext

import torch  # pyrefly: ignore[missing-import]
import torch.nn.functional as F  # pyrefly: ignore[missing-import]
from torch import nn  # pyrefly: ignore[missing-import]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on x [batch, heads, length, head_dim]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Block(nn.Module):
    def __init__(self, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * mlp, bias=False)
        self.down = nn.Linear(mlp, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = (
            t * cos + torch.cat([-t[..., t.shape[-1] // 2 :], t[..., : t.shape[-1] // 2]], -1) * sin for t in (q, k)
        )
        a = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, a: argparse.Namespace) -> None:
        super().__init__()
        self.embed = nn.Embedding(a.vocab, a.width)
        self.blocks = nn.ModuleList(Block(a.width, a.heads, a.mlp) for _ in range(a.layers))
        self.norm = nn.RMSNorm(a.width, eps=1e-5)
        self.head = nn.Linear(a.width, a.vocab, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        half = a.width // a.heads // 2
        angle = torch.arange(a.length)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", torch.cat([angle.cos()] * 2, -1), persistent=False)
        self.register_buffer("sin", torch.cat([angle.sin()] * 2, -1), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def matmul_gflops(dtype: torch.dtype, size: int = 2048, repeats: int = 3) -> float:
    """Best rate of a size^3 product, GFLOP/s."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("width", "layers", "heads", "mlp", "vocab", "batch", "length"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--compile", action="store_true")
    a = parser.parse_args()
    dtype = getattr(torch, a.dtype)
    torch.manual_seed(0)
    model = Llama(a)
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not model.embed.weight]
    rest = [p for p in model.parameters() if p.ndim != 2 or p is model.embed.weight]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    loss_of = torch.compile(model) if a.compile else model
    data = torch.randint(a.vocab, (a.batch, a.length + 1))

    def step() -> float:
        cast = torch.autocast("cpu", dtype=dtype) if dtype != torch.float32 else nullcontext()
        with cast:
            loss = loss_of(data[:, :-1], data[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    for line in sys.stdin:
        request = json.loads(line)
        if "steps" in request:
            start = time.perf_counter()
            losses = [step() for _ in range(request["steps"])]
            answer = {"seconds": time.perf_counter() - start, "loss": losses[-1]}
        else:
            answer = {"gflops": matmul_gflops(dtype)}
        answer["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
