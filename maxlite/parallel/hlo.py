"""Reads a compiled program as text (HLO): its instructions, and how often a step runs each."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

_BYTES = {"pred": 1, "bf16": 2, "c64": 8, "c128": 16, "token": 0, "opaque": 0}

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(r"\b(?:calls|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
# What hands on the value of its first operand.
_SAME_VALUE = ("copy", "bitcast", "copy-done", "copy-start", "convert", "reshape")


@dataclass(frozen=True)
class Instruction:
    """`name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    literal: str  # what is between the parentheses, as written

    def attribute(self, name: str) -> str:
        """The computation or word that an attribute names; '' where it is absent."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else ""

    @property
    def called(self) -> list[str]:
        """The computations that run when this does, but not those applied to single numbers (`to_apply`)."""
        names = _CALLED.findall(self.attributes)
        if branches := _BRANCHES.search(self.attributes):
            names += [name.strip().lstrip("%") for name in branches[1].split(",")]
        return names


@dataclass
class Computation:
    """Instructions by name; the last is the result."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: Instruction | None = None


@dataclass(frozen=True)
class Executed:
    """An instruction with the times that one run of the program runs it.

    scope: the computation it is in; for one inside a fusion, that which the fusion is in.
    """

    instruction: Instruction
    computation: Computation
    scope: str
    times: int


class HloProgram:
    """A compiled program.

    partitions: devices that run it together.
    unknown_loops: the loops whose number of rounds could not be read; they count as run once.
    """

    def __init__(self, text: str) -> None:
        header = re.search(r"\bnum_partitions=(\d+)", text.partition("\n")[0])
        self.partitions = int(header[1]) if header else 1
        self.computations: dict[str, Computation] = {}
        self._entry = ""
        self.unknown_loops: list[str] = []
        current: Computation | None = None
        for line in text.splitlines():
            if found := _HEADER.match(line):
                current = self.computations.setdefault(found[1], Computation(found[1]))
                if line.startswith("ENTRY"):
                    self._entry = found[1]
            elif current is not None and (name := _NAME.match(line)):
                instruction = _parse(name[2], line[name.end() :])
                current.instructions[name[2]] = instruction
                if name[1]:
                    current.root = instruction
        for computation in self.computations.values():
            _name_elements(computation)
        if not self._entry:
            raise ValueError("not the text of a compiled program: it has no ENTRY")

    @cached_property
    def executed(self) -> list[Executed]:
        """Every instruction of the program, those of loops and fusions included."""
        self.unknown_loops.clear()
        return list(self._walk(self.computations[self._entry], self._entry, 1))

    def _walk(self, computation: Computation, scope: str, times: int) -> Iterator[Executed]:
        for instruction in computation.instructions.values():
            yield Executed(instruction, computation, scope, times)
            rounds = self._rounds(instruction, computation) if instruction.opcode == "while" else 1
            for name in instruction.called:
                inner = self.computations[name]
                inside = scope if instruction.opcode == "fusion" or instruction.opcode.startswith("async") else name
                yield from self._walk(inner, inside, times * rounds)

    def _rounds(self, loop: Instruction, computation: Computation) -> int:
        """Rounds of a `while` that counts up to a constant."""
        if known := re.search(r"known_trip_count\D+(\d+)", loop.attributes):
            return int(known[1])
        condition = self.computations[loop.attribute("condition")]
        body = self.computations[loop.attribute("body")]
        compare = condition.root
        if compare is not None and compare.opcode == "compare" and compare.attribute("direction") == "LT":
            counter, bound = (condition.instructions[name] for name in compare.operands)
            start = self._element(computation, loop.operands[0], counter)
            step = self._step(body, counter)
            end = _constant(condition, bound.name)
            if start is not None and end is not None and step:
                return max(0, math.ceil((end - start) / step))
        self.unknown_loops.append(loop.name)
        return 1

    def _element(self, computation: Computation, tuple_name: str, counter: Instruction) -> int | None:
        """The constant that the loop's counter starts at."""
        state = computation.instructions[tuple_name]
        index = counter.attribute("index")
        if state.opcode != "tuple" or not index:
            return None
        return _constant(computation, state.operands[int(index)])

    def _step(self, body: Computation, counter: Instruction) -> int | None:
        """What a round adds to the counter."""
        root, index = body.root, counter.attribute("index")
        if root is None or root.opcode != "tuple" or not index:
            return None
        added = _origin(body, root.operands[int(index)])
        if added is None or added.opcode != "add":
            return None
        steps = [_constant(body, name) for name in added.operands]
        return next((step for step in steps if step is not None), None)


def array_bytes(shape: str, hbm_only: bool = False) -> int:
    """Bytes of an array, or of all arrays in a tuple, by its HLO shape such as `(f32[8,128]{1,0}, u32[])`.

    Args:
        shape: as written.
        hbm_only: leave out what a TPU keeps outside its main memory, marked `S(1)` and higher in the layout.
    """
    total = 0
    for dtype, dims, layout in _ARRAY.findall(shape):
        if hbm_only and re.search(r"S\([1-9]", layout):
            continue
        if (size := dtype_bytes(dtype)) is not None:
            total += math.prod(int(dim) for dim in dims.split(",") if dim) * size
    return total


def array_dims(shape: str) -> list[int]:
    """The dimensions of an array, by its HLO shape."""
    match = _ARRAY.search(shape)
    return [int(dim) for dim in match[2].split(",") if dim] if match else []


def dtype_bytes(dtype: str) -> int | None:
    """Bytes of one element, packed ones as one; None: not the name of a dtype."""
    if dtype in _BYTES:
        return _BYTES[dtype]
    bits = re.fullmatch(r"[suf](\d+)\w*", dtype)
    return max(1, int(bits[1]) // 8) if bits else None


def _name_elements(computation: Computation) -> None:
    """Newer programs write `%state#0` for element 0 of `%state`: gives such elements instructions of their own."""

    def add(name: str) -> Instruction:
        if name not in computation.instructions:
            whole, _, index = name.rpartition("#")
            shape = _elements(add(whole).shape)[int(index)]
            computation.instructions[name] = Instruction(
                name, shape, "get-tuple-element", (whole,), f", index={index}", ""
            )
        return computation.instructions[name]

    for instruction in list(computation.instructions.values()):
        for operand in instruction.operands:
            if "#" in operand:
                add(operand)


def _elements(shape: str) -> list[str]:
    """The shapes in a tuple's shape."""
    inside = re.sub(r"/\*.*?\*/", "", shape)[1:-1]
    parts, depth, start = [], 0, 0
    for position, char in enumerate(inside):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(inside[start:position].strip())
            start = position + 1
    return [*parts, inside[start:].strip()]


def _origin(computation: Computation, name: str) -> Instruction | None:
    """The instruction whose value `name` is a copy of."""
    instruction = computation.instructions.get(name)
    while instruction is not None and instruction.opcode in _SAME_VALUE:
        instruction = computation.instructions.get(instruction.operands[0])
    return instruction


def _constant(computation: Computation, name: str) -> int | None:
    origin = _origin(computation, name)
    if origin is None or origin.opcode != "constant" or not re.fullmatch(r"-?\d+", origin.literal):
        return None
    return int(origin.literal)


def _parse(name: str, rest: str) -> Instruction:
    shape, rest = _until_space(rest)
    opcode, _, rest = rest.partition("(")
    inside, attributes = _balanced("(" + rest)
    operands = tuple(re.findall(r"%([\w.\-#]+)", inside)) or tuple(
        part.strip().split(" ")[-1] for part in inside.split(",") if part.strip() and opcode != "constant"
    )
    return Instruction(name, shape, opcode.strip(), operands, attributes, inside)


def _until_space(text: str) -> tuple[str, str]:
    """A shape, which may be a tuple with spaces in it, and the text after it."""
    if text.startswith("("):
        inside, rest = _balanced(text)
        return f"({inside})", rest.lstrip()
    shape, _, rest = text.partition(" ")
    return shape, rest


def _balanced(text: str) -> tuple[str, str]:
    """What is between the first parenthesis and the one that closes it, and the text after that."""
    depth = 0
    for position, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return text[1:position], text[position + 1 :]
    return text[1:], ""
