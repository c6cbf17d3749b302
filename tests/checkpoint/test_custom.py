"""A person's own policies: the worked examples of the docs, and what is said about a class that will not do."""

import re
import sys
from pathlib import Path

import pytest

from maxlite.checkpoint.custom import SaveContext, load_preservation_policy, load_save_policy
from maxlite.checkpoint.keep import KeptStep, Preservation
from maxlite.checkpoint.policy import SavePolicy
from maxlite.config import CheckpointConfig, InputError

DOCS = Path(__file__).parents[2] / "docs" / "checkpoint_policies.md"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current directory to put modules in, which only this test imports from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def examples(here):
    """The module of the docs: both examples in one file, as their first lines say."""
    blocks = re.findall(r"```python\n(# my_policies\.py\n.*?)```", DOCS.read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    (here / "my_policies.py").write_text("\n\n".join(blocks))


def test_the_docs_save_policy_works(examples):
    policy = SavePolicy(CheckpointConfig(checkpoint_save_policy="my_policies.BeforeRiskySteps", checkpoint_period=1))
    saved, saving_until = [], None
    policy.resumed(990, 0.0)
    for step in range(991, 2300):
        now = 10.0 * (step - 990)
        if saving_until is not None and now >= saving_until:
            policy.committed(now)
            saving_until = None
        if policy.decide(step, policy.votes(step, now, saving=saving_until is not None)):
            policy.started(step, now)
            saved.append(step)
            saving_until = now + 25
    assert saved[:4] == [999, 1059, 1119, 1179]
    assert 1999 in saved


def test_the_docs_preservation_policy_works(examples):
    preservation = Preservation(
        CheckpointConfig(checkpoint_preservation_policy="my_policies.KeepPowersOfTwo", max_num_checkpoints_to_keep=2)
    )
    steps = [KeptStep(step, float(step), {"loss": 30.0 if step == 8 else 5.0}, True) for step in range(1, 21)]
    assert set(range(1, 21)) - set(preservation.to_delete(steps)) == {1, 2, 4, 16, 19, 20}


def test_the_docs_name_every_field():
    text = DOCS.read_text()
    for fields in (KeptStep._fields, SaveContext._fields):
        assert set(fields) <= set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE))


def test_a_policy_may_import_its_neighbour_when_it_is_called(here):
    (here / "neighbour_of_policy.py").write_text("EVERY = 3\n")
    (here / "late_policy.py").write_text(
        "class Late:\n"
        "    def should_save(self, context):\n"
        "        from neighbour_of_policy import EVERY\n"
        "        return context.step % EVERY == 0\n"
    )
    policy = SavePolicy(CheckpointConfig(checkpoint_save_policy="late_policy.Late"))
    assert [policy.votes(step, 0.0, saving=False).due for step in (1, 2, 3)] == [False, False, True]


MODULE = """
import collections

class Good:
    def should_save(self, context):
        return False

    def steps_to_keep(self, steps):
        return []

class NoMethod:
    pass

class WrongArguments:
    def should_save(self, step, metrics):
        return False

class Fails:
    def __init__(self):
        raise RuntimeError("no licence")

    def should_save(self, context):
        return False

class WantsArguments:
    def __init__(self, period):
        pass

    def should_save(self, context):
        return False

def function():
    pass
"""


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("Good", "write package.module.Class"),
        ("policies.", "write package.module.Class"),
        ("policies:Good", "write package.module.Class"),
        ("no_such_module.Good", "there is no module no_such_module, neither installed"),
        ("policies.inner.Good", "there is no module policies.inner"),
        ("policies.Goood", "Goood is not in .*policies.py; did you mean Good"),
        ("policies.function", "function is not a class"),
        ("policies.NoMethod", "the class has no method should_save; see docs/checkpoint_policies.md"),
        ("policies.WrongArguments", "should_save must take one argument"),
        ("policies.Fails", r"Fails\(\) raised RuntimeError: no licence \(.*policies.py:\d+\)"),
        ("policies.WantsArguments", r"WantsArguments\(\) raised TypeError: .*missing 1 required positional argument"),
        ("broken.Good", r"the module broken cannot be imported: SyntaxError: .*broken.py, line 1"),
        ("raises.Good", r"the module raises cannot be imported: ZeroDivisionError: .*raises.py:2"),
        ("needy.Good", "the module needy cannot be imported: ModuleNotFoundError: No module named 'absent_one'"),
    ],
)
def test_a_class_that_will_not_do_is_refused_in_a_line(here, path, problem):
    (here / "policies.py").write_text(MODULE)
    (here / "broken.py").write_text("def\n")
    (here / "raises.py").write_text("x = 0\ny = 1 / x\n")
    (here / "needy.py").write_text("import absent_one\n")
    with pytest.raises(InputError, match=problem) as caught:
        SavePolicy(CheckpointConfig(checkpoint_save_policy=path))
    (line,) = caught.value.problems
    assert line.startswith(f"checkpoint_save_policy={path}: ")
    assert "\n" not in line


def test_the_key_at_fault_is_named(here):
    (here / "policies.py").write_text(MODULE)
    load_save_policy("policies.Good")
    load_preservation_policy("policies.Good")
    with pytest.raises(InputError, match=r"^checkpoint_preservation_policy=policies.Fails: .* steps_to_keep"):
        load_preservation_policy("policies.Fails")


@pytest.mark.parametrize("answer", ["None", "'yes'", "1"])
def test_an_answer_that_is_not_true_or_false_is_refused(here, answer):
    (here / "vague.py").write_text(f"class Vague:\n    def should_save(self, context):\n        return {answer}\n")
    policy = SavePolicy(CheckpointConfig(checkpoint_save_policy="vague.Vague"))
    assert not policy.votes(1, 0.0, saving=False).due
    assert policy.problem() == f"vague.Vague.should_save returned {answer}, not True or False"


def test_numpys_answer_is_as_good(here):
    (here / "vague.py").write_text(
        "import numpy as np\nclass Vague:\n    def should_save(self, context):\n        return np.float64(1) > 0\n"
    )
    assert SavePolicy(CheckpointConfig(checkpoint_save_policy="vague.Vague")).votes(1, 0.0, saving=False).due
