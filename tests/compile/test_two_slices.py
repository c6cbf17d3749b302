"""The real TPU compiler on a small model: two v5p slices, splash attention, and what goes between the slices."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = str(Path(__file__).parents[2] / "configs" / "llama3.1-70b.yml")
SMALL = (
    "compile_topology=v5p-8",
    "base_num_decoder_layers=3",
    "base_emb_dim=512",
    "base_num_query_heads=4",
    "base_num_kv_heads=2",
    "base_mlp_dim=1024",
    "vocab_size=1024",
    "max_target_length=256",
    "loss_chunk_size=1024",
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The command's exit status, its report, and where it wrote the compiled step."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU compiler is not installed (extra: tpu)")
    written = tmp_path_factory.mktemp("compile") / "step"
    arguments = [CONFIG, *SMALL, f"compiled_trainstep_file={written}", "--json"]
    ran = subprocess.run([sys.executable, "-m", "maxlite.compile", *arguments], capture_output=True, text=True)
    assert ran.stdout, ran.stderr
    return ran.returncode, json.loads(ran.stdout), written


@pytest.mark.slow
def test_a_small_model_on_two_slices(compiled):
    status, report, written = compiled
    assert status == 0
    assert report["fits"] is True
    hbm = report["hbm"]
    assert hbm["total"] == hbm["arguments"] + hbm["temporaries"] + hbm["program_and_outputs"]
    assert hbm["arguments"] >= hbm["parameters"] + hbm["optimizer"]
    assert report["uncounted_loops"] == []
    # With remat_policy=full every product of a layer but its last is computed again.
    assert 0.1 < report["recompute_share"] < 0.3
    assert written.stat().st_size > 1000
    between = [each for each in report["collectives"] if each["network"] == "DCN"]
    assert {each["kind"] for each in between} == {"all-reduce"}, "only sums go between slices"
    assert {each["axis"] for each in between} == {"data"}
    gradients = sum(each["bytes"] for each in between if not each["scalar"])
    assert gradients == pytest.approx(hbm["parameters"], rel=0.02), "the gradient, once, and nothing else"
    assert sum(each["bytes"] for each in between if each["scalar"]) < 0.02 * hbm["parameters"]
