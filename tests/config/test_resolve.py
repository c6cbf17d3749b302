"""Config sources, their order, and what each kind of bad input is answered with."""

import subprocess
import sys
import textwrap
import time

import pytest

from maxlite.config import Config, InputError, resolve
from maxlite.config.show import config_yaml


@pytest.fixture
def write(tmp_path):
    def _write(text, name="run.yml"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return _write


def problems_of(file, *arguments, environ=None):
    with pytest.raises(InputError) as caught:
        resolve(Config, file, arguments, environ or {})
    return caught.value.problems


def test_later_sources_win(write):
    write("steps: 1\nlog_period: 1\neval_interval: 1\nlearning_rate: 1\nbase_emb_dim: 1\nvocab_size: 5\n", "base.yml")
    file = write("base_config: base.yml\nmodel_name: tiny\nlog_period: 2\neval_interval: 2\nlearning_rate: 2\n")
    resolved = resolve(Config, file, ["learning_rate=4"], {"M_EVAL_INTERVAL": "3", "M_LEARNING_RATE": "3"})
    config = resolved.config
    assert config.run.steps == 1
    assert config.telemetry.log_period == 2
    assert config.telemetry.eval_interval == 3
    assert config.optimizer.learning_rate == 4
    assert config.model.vocab_size > 5, "the preset lies over the base_config chain"
    assert resolved.origins["steps"].endswith("base.yml:1")
    assert resolved.origins["log_period"].endswith("run.yml:3")
    assert resolved.origins["eval_interval"] == "environment M_EVAL_INTERVAL"
    assert resolved.origins["learning_rate"] == "command line"
    assert resolved.origins["dtype"] in ("default",) or "tiny.yml" in resolved.origins["dtype"]
    assert "models/tiny.yml" in resolved.origins["base_emb_dim"]


def test_the_yaml_overrides_its_preset_and_the_command_line_names_another(write):
    file = write("model_name: tiny\nbase_mlp_dim: 4096\n")
    config = resolve(Config, file, ["model_name=llama3.1-8b"], {}).config
    assert config.model.base_mlp_dim == 4096
    assert config.model.base_emb_dim == 4096
    assert config.model.rope_type == "llama3.1"


def test_run_name_is_the_files_name_by_default(write):
    resolved = resolve(Config, write("steps: 1", "first_try.yml"), (), {})
    assert resolved.config.run.run_name == "first_try"


@pytest.mark.parametrize(
    ("argument", "section", "expected"),
    [
        ("learning_rate=3e-4", "optimizer", 3e-4),
        ("steps=1_000", "run", 1000),
        ("steps=1e3", "run", 1000),
        ("scan_layers=true", "model", True),
        ("scan_layers=False", "model", False),
        ("mu_dtype=null", "optimizer", None),
        ("mu_dtype=None", "optimizer", None),
        ("mu_dtype=bfloat16", "optimizer", "bfloat16"),
        ("remat_policy=none", "model", "none"),
        ("text_files=[a.txt, 'b c.txt']", "data", ["a.txt", "b c.txt"]),
        ("text_files=a.txt", "data", ["a.txt"]),
        ("text_files=data/[ab]*.txt", "data", ["data/[ab]*.txt"]),
        ("eval_text_files=[]", "data", []),
        ("eval_text_files=null", "data", []),
        ("run_name=007", "run", "007"),
        ("run_name=1e3", "run", "1e3"),
        ("base_output_directory=/data/a=b", "run", "/data/a=b"),
    ],
)
def test_values_mean_what_a_person_expects_from_every_source(write, argument, section, expected):
    key, value = argument.split("=", 1)
    from_line = resolve(Config, write("log_period: 1"), [argument], {}).config
    from_env = resolve(Config, write("log_period: 1"), (), {f"M_{key.upper()}": value}).config
    from_yaml = resolve(Config, write(f"{key}: {value}"), (), {}).config
    for config in (from_line, from_env, from_yaml):
        got = getattr(getattr(config, section), key)
        assert got == expected
        assert type(got) is type(expected)


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        ("checkpoint_perid: 10", [], ["run.yml:1", "checkpoint_perid", "did you mean checkpoint_period"]),
        ("lr: 1", [], ["lr", "did you mean learning_rate"]),
        ("steps: 1", ["seqlen=1"], ["command line", "seqlen", "no such key", "--help"]),
        ("steps: ten", [], ["run.yml:1", "steps=ten", "whole number"]),
        ("steps: 1.5", [], ["steps=1.5", "whole number"]),
        ("steps: true", [], ["steps=true", "whole number"]),
        ("steps: null", [], ["steps=null", "whole number"]),
        ("steps:", [], ["steps=nothing", "whole number"]),
        ("steps: 0", [], ["steps=0", "at least 1"]),
        ("steps: 1e30", [], ["steps=", "at most 2,147,483,647"]),
        ("learning_rate: .nan", [], ["learning_rate=.nan", "number"]),
        ("learning_rate: nan", [], ["learning_rate=nan", "finite"]),
        ("learning_rate: inf", [], ["learning_rate=inf", "finite"]),
        ("head_dim: 7", [], ["head_dim=7", "multiple of 2"]),
        ("scan_layers: maybe", [], ["scan_layers=maybe", "true | false"]),
        ("dtype: bfloat61", [], ["dtype=bfloat61", "did you mean bfloat16"]),
        ("run_name: [a]", [], ["run_name=a list", "expected text"]),
        ("run_name: ''", [], ["run_name", "needs a value"]),
        ("run_name: ..", [], ["run_name='..'", "cannot name a directory"]),
        ("base_output_directory: gs://b", [], ["base_output_directory=gs://b", "object stores"]),
        ("text_files: []", [], ["text_files", "at least one"]),
        ("steps: 1", ["text_files=[a, [b]"], ["text_files", "malformed list"]),
        ("base_num_kv_heads: 3", [], ["run.yml:1", "base_num_query_heads=16", "base_num_kv_heads=3"]),
        ("ici_data_parallelism: -1", [], ["run.yml:1", "only one ici_ key may be -1"]),
        (
            "enable_continuous_checkpointing: true\nasync_checkpointing: false",
            [],
            ["run.yml:2, ", "run.yml:1", "async_checkpointing=true"],
        ),
        ("lr_schedule_type: wsd", ["warmup_steps_fraction=1"], ["warmup_steps_fraction + wsd_decay", "1.1"]),
        ("steps: 1\nlog_period: 2\nsteps: 3", [], ["run.yml:3", "steps", "given twice", "line 1"]),
        ("", [], ["run.yml", "empty"]),
        ("# only a comment\n", [], ["run.yml", "empty"]),
        ("- a\n- b\n", [], ["run.yml:1", "holds a list"]),
        ("just words", [], ["run.yml:1", "single value"]),
        ("steps: [1\nx: 2", [], ["run.yml:", "malformed YAML"]),
        ("steps: 1\n\tlog_period: 2", [], ["run.yml:2", "malformed YAML"]),
        ("? [a, b]\n: 1", [], ["run.yml:1", "single word"]),
        ("steps: &a [*a]", [], ["run.yml:1", "recursive"]),
        ("base_config: gone.yml", [], ["gone.yml", "no such file", "base_config", "run.yml:1"]),
        ("base_config: run.yml", [], ["run.yml", "circle"]),
        ("model_name: llama3-8b", [], ["run.yml:1", "llama3-8b", "llama3.1-8b"]),
        ("steps: 1", ["--steps=4"], ["--steps=4", "write steps=4"]),
        ("steps: 1", ["train"], ["train", "key=value"]),
        ("steps: 1", ["base_config=x.yml"], ["base_config", "YAML"]),
        ("base_config: [a.yml]", [], ["run.yml:1", "base_config=a list", "one file"]),
        ("data_cache_directory: ~nosuchuser/x", [], ["data_cache_directory=~nosuchuser/x", "no such user"]),
        ('tokenizer_path: "a\\0b"', [], ["tokenizer_path=", "NUL"]),
        ('text_files: ["a\\0b"]', [], ["text_files=", "NUL"]),
        ("learning_rate: 1e39", [], ["learning_rate=1e39", "at most"]),
    ],
)
def test_bad_input_is_one_line_that_says_what_and_where(write, text, arguments, words):
    problems = problems_of(write(text), *arguments)
    assert len(problems) == 1
    assert "\n" not in problems[0]
    for word in words:
        assert word in problems[0]


def test_every_problem_is_reported_at_once(write):
    file = write("stesp: 1\nsteps: x\nlog_period: 0\nbase_num_kv_heads: 3\nhead_dim: 7\n")
    problems = problems_of(file, "foo", "learning_rate=-1", environ={"M_NO_SUCH": "1"})
    text = "\n".join(problems)
    for word in ("stesp", "steps=x", "log_period=0", "base_num_kv_heads=3", "head_dim=7", "foo", "learning_rate=-1"):
        assert word in text
    assert "environment M_NO_SUCH" in text
    assert len(problems) == 8


def test_unreadable_files(tmp_path):
    assert "no such file" in problems_of(str(tmp_path / "gone.yml"))[0]
    assert "cannot be read" in problems_of(str(tmp_path))[0]
    binary = tmp_path / "b.yml"
    binary.write_bytes(b"steps: \xff\xfe\x00")
    assert "b.yml" in problems_of(str(binary))[0]


def test_resolved_yaml_reads_back_to_the_same_config(write, tmp_path):
    write("steps: 77\n", "base.yml")
    file = write("base_config: base.yml\nmodel_name: tiny\nlearning_rate: 1e-7\ntext_files: ['a, b', 'c: d']\n")
    resolved = resolve(Config, file, ["run_name=a"], {})
    for text in (config_yaml(resolved.config), config_yaml(resolved.config, resolved.origins)):
        (tmp_path / "again.yml").write_text(text)
        again = resolve(Config, str(tmp_path / "again.yml"), (), {})
        assert again.config == resolved.config


def run_train(*arguments):
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "maxlite.train", *arguments], capture_output=True, text=True, check=False
    )
    return done, time.monotonic() - start


def test_command_line_says_bad_input_without_traceback_and_before_jax_loads(write):
    done, _ = run_train(write("stesp: 1\n"))
    assert done.returncode == 2
    assert "did you mean steps" in done.stderr
    assert "Traceback" not in done.stderr
    code = "import sys, maxlite.train; maxlite.train.main(['gone.yml']); print('jax' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "False"


def test_help_lists_every_key_and_print_config_says_origins(write):
    done, _ = run_train("--help")
    assert done.returncode == 0
    for key in resolve(Config, write("steps: 1"), (), {}).config.flat():
        assert f"\n  {key}=" in done.stdout
    done, _ = run_train(write("steps: 7"), "--print_config", "log_period=3")
    assert done.returncode == 0
    assert "steps: 7" in done.stdout
    assert "run.yml:1" in done.stdout
    assert "command line" in done.stdout


def test_no_arguments_is_a_usage_error():
    done, _ = run_train()
    assert done.returncode == 2
    assert "usage" in done.stderr
