"""The network: a Llama, its attention kernels, its loss and its size. Knows no files and no meshes."""

from maxlite.model.attention import AttentionChoice, choose_attention
from maxlite.model.flops import num_parameters, train_step_flops
from maxlite.model.llama import Llama
from maxlite.model.loss import LossSums, loss_sums
from maxlite.model.memory import activation_bytes
from maxlite.model.placement import Placement

__all__ = [
    "AttentionChoice",
    "Llama",
    "LossSums",
    "Placement",
    "activation_bytes",
    "choose_attention",
    "loss_sums",
    "num_parameters",
    "train_step_flops",
]
