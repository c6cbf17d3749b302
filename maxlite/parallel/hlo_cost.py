"""What a compiled TPU program computes and moves, by its instructions, each as often as it runs.

The compiler's own cost analysis counts the body of a loop once, so for scanned layers it says little.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping

from maxlite.parallel.hlo import Computation, Executed, HloProgram, Instruction, array_bytes, array_dims

# What moves nothing itself: names for values, or the frame of what is counted inside.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "after-all",
    "partition-id",
    "replica-id",
    "iota",
    "opt-barrier",
    "copy-done",
    "send-done",
    "recv-done",
    "recv",
    "async-update",
}
_SLICES = ("dynamic-slice", "slice", "gather")


def matmul_flops(program: HloProgram) -> float:
    """FLOPs of every matrix product of a TPU program in one run, on one device; a multiply-add is two.

    TPU programs write matrix products as convolutions. Hand-written kernels (`custom-call`) are not counted, and
    nothing elementwise is.
    """
    total = 0.0
    shapes = {id(c): {name: i.shape for name, i in c.instructions.items()} for c in program.computations.values()}
    for done in program.executed:
        if done.instruction.opcode in ("convolution", "dot"):
            total += done.times * _product_flops(done.instruction, shapes[id(done.computation)])
    return total


def _product_flops(product: Instruction, shapes: Mapping[str, str]) -> float:
    left, right = (array_dims(shapes[name]) for name in product.operands[:2])
    result = math.prod(array_dims(product.shape))
    if product.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", product.attributes)
        return 2.0 * result * math.prod(left[int(d)] for d in (contracted[1] if contracted else "").split(",") if d)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", product.attributes)
    if labels is None:
        raise ValueError(f"a convolution without dim_labels: {product.name}")
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", (re.search(r"window=\{([^}]*)\}", product.attributes) or [""])[0]))
    # A batched product is a convolution over a dilated input: of the taps of a window, one meets a number.
    dilation = [int(n) for n in window.get("lhs_dilate", "1").split("x")]
    taps = math.prod(int(n) for n in window.get("size", "1").split("x"))
    return 2.0 * result * right[labels[2].index("i")] * max(1, taps // math.prod(dilation))


def memory_traffic(program: HloProgram) -> float:
    """Bytes that one run reads from and writes to a device's main memory.

    Of an array of which an instruction reads or writes a slice, the slice counts.
    """
    return float(
        sum(
            done.times * _instruction_traffic(program, done)
            for done in program.executed
            if done.scope == done.computation.name  # what is inside a fusion moves nothing
        )
    )


def _instruction_traffic(program: HloProgram, done: Executed) -> int:
    instruction, shapes = done.instruction, done.computation.instructions
    if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
        return 0
    operands = [array_bytes(shapes[name].shape, hbm_only=True) for name in instruction.operands if name in shapes]
    result = array_bytes(instruction.shape, hbm_only=True)
    if instruction.opcode == "fusion":
        inside = program.computations[instruction.attribute("calls")]
        return _read_by_fusion(inside, operands) + _written_by_fusion(inside, instruction)
    if instruction.opcode in _SLICES:
        return 2 * result
    if instruction.opcode == "dynamic-update-slice":
        return 2 * operands[1]
    if instruction.opcode in ("copy-start", "send") or instruction.opcode.endswith("-start"):
        return max(result, sum(operands))  # the result of a start names what went in and what comes out
    return sum(operands) + result


def _read_by_fusion(inside: Computation, operands: list[int]) -> int:
    users: Mapping[str, list[Instruction]] = defaultdict(list)
    for instruction in inside.instructions.values():
        for name in instruction.operands:
            users[name].append(instruction)
    total = 0
    for instruction in inside.instructions.values():
        if instruction.opcode != "parameter":
            continue
        size = operands[int(instruction.literal)]
        used = _through_bitcasts(instruction.name, users)
        if used and all(user.opcode in _SLICES for user in used):
            size = min(size, sum(array_bytes(user.shape) for user in used))
        elif used and all(user.opcode == "dynamic-update-slice" for user in used):
            first = [inside.instructions[user.operands[0]] for user in used]
            if all(_under_bitcasts(inside, each).name == instruction.name for each in first):
                size = 0  # written into, not read
        total += size
    return total


def _written_by_fusion(inside: Computation, fusion: Instruction) -> int:
    root = inside.root
    if root is None:
        return array_bytes(fusion.shape, hbm_only=True)
    parts = [inside.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    total = 0
    for part in parts:
        origin = _under_bitcasts(inside, part)
        if origin.opcode == "dynamic-update-slice":
            origin = inside.instructions[origin.operands[1]]
            total += array_bytes(origin.shape)
        elif root.opcode == "tuple":
            total += array_bytes(part.shape, hbm_only=True)
        else:
            total += array_bytes(fusion.shape, hbm_only=True)
    return total


def _through_bitcasts(name: str, users: Mapping[str, list[Instruction]]) -> list[Instruction]:
    found: list[Instruction] = []
    for user in users[name]:
        found += _through_bitcasts(user.name, users) if user.opcode == "bitcast" else [user]
    return found


def _under_bitcasts(inside: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode == "bitcast":
        instruction = inside.instructions[instruction.operands[0]]
    return instruction
