"""Programs as text: instructions, how often each runs, products and bytes."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from maxlite.parallel.hlo import HloProgram, array_bytes, array_dims
from maxlite.parallel.hlo_cost import matmul_flops, memory_traffic

# A loop that runs from 1 (a round is peeled) to 5, as libtpu writes them, shortened. A round multiplies a slice of
# the stack `w` and writes the product into the stack `y`.
LOOP = (Path(__file__).parent / "hlo" / "loop.txt").read_text()
PRODUCT = 2 * 32 * 64 * 256


def test_a_loop_counts_by_its_rounds():
    program = HloProgram(LOOP)
    times = {done.instruction.name: done.times for done in program.executed}
    assert times["loop"] == 1
    assert times["product"] == 4
    assert times["slice"] == 4, "what is fused runs as often as the fusion"
    assert matmul_flops(program) == 4 * PRODUCT
    assert program.unknown_loops == []


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("%first = s32[]{:T(128)} copy(%start)", "%first = s32[]{:T(128)} parameter(3)"),
        ("direction=LT", "direction=NE"),
    ],
    ids=["start unknown", "another comparison"],
)
def test_a_loop_of_unknown_length_is_said_and_counts_once(written, instead):
    program = HloProgram(LOOP.replace(written, instead))
    assert matmul_flops(program) == PRODUCT
    assert program.unknown_loops == ["loop"]


def test_a_known_trip_count_is_believed():
    known = 'body=%body, backend_config={"known_trip_count":{"n":"7"}}'
    assert matmul_flops(HloProgram(LOOP.replace("body=%body", known))) == 7 * PRODUCT


def test_of_a_stack_the_slice_is_read_and_written():
    weights, product, inputs = 64 * 256, 32 * 256, 32 * 64
    sliced = 4 * weights + 2 * weights + 4 + 4  # float32 in, bfloat16 out, and the index
    multiplied = 2 * inputs + 2 * weights + 4 * product
    stored = 4 * product + 4 * product + 4
    counter, comparison = 3 * 4, 4 + 4 + 1
    assert memory_traffic(HloProgram(LOOP)) == pytest.approx(
        4 * (sliced + multiplied + stored + counter) + comparison + 8, abs=4 * 8
    )


def test_what_lies_outside_the_main_memory_is_not_its_traffic():
    inside = LOOP.replace("f32[32,256]{1,0:T(8,128)}", "f32[32,256]{1,0:T(8,128)S(1)}")
    saved = memory_traffic(HloProgram(LOOP)) - memory_traffic(HloProgram(inside))
    assert saved == 4 * 2 * 4 * 32 * 256


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[8,128]{1,0:T(8,128)}", 4096),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", 2048),
        ("(f32[2]{0}, s8[3]{0}, pred[], token[])", 12),
        ("f8e4m3fn[16]{0}", 16),
        ("s4[16]{0}", 16),
        ("u32[]{:S(2)}", 4),
    ],
)
def test_bytes_of_a_shape(shape, size):
    assert array_bytes(shape) == size


def test_dimensions_of_a_shape():
    assert array_dims("f32[8,128]{1,0:T(8,128)}") == [8, 128]
    assert array_dims("u32[]") == []


def test_elements_of_tuples_may_be_written_in_short():
    short = re.sub(r"  %(i|w|x|y|ci) = .*get-tuple-element.*\n", "", LOOP)
    for name, index in (("i", 0), ("w", 1), ("x", 2), ("y", 3)):
        short = re.sub(rf"([(,] ?)%{name}([,)])", rf"\1%state#{index}\2", short)
    short = re.sub(r"\(%ci,", "(%cs#0,", short)
    program = HloProgram(short)
    assert "#" in short
    assert program.computations["body"].instructions["state#2"].shape == "bf16[32,64]{1,0:T(8,128)(2,1)}"
    assert matmul_flops(program) == 4 * PRODUCT
    assert memory_traffic(program) == memory_traffic(HloProgram(LOOP))
    assert program.unknown_loops == []


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        HloProgram("HloModule nothing\n")


@pytest.mark.parametrize("rounds", [2, 5])
def test_a_real_program_of_this_machine(rounds):
    def f(x, w):
        return jax.lax.scan(lambda x, w: (jnp.dot(x, w), None), x, w)[0]

    text = jax.jit(f).lower(jnp.ones((48, 32)), jnp.ones((rounds, 32, 32))).compile().as_text()
    assert matmul_flops(HloProgram(text)) == rounds * 2 * 48 * 32 * 32
