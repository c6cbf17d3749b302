"""What holds for every launch script."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SCRIPTS = Path(__file__).parents[2] / "scripts"
LAUNCHERS = ["tpu_vm.sh", "gke.sh", "slurm.sbatch", "ssh_hosts.sh"]


SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("name", ["common.sh", *LAUNCHERS])
def test_shellcheck_finds_nothing(name):
    found = subprocess.run([SHELLCHECK, "-x", name], cwd=SCRIPTS, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("name", LAUNCHERS)
def test_help_says_how_to_use_it_and_what_must_exist_first(desk, name):
    help_text = desk.run(name, "--help")
    assert f"scripts/{name} " in help_text
    assert "--dry-run" in help_text
    assert "What must exist first:" in help_text
    assert not any(line.startswith("#") for line in help_text.splitlines())


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize("arguments", [[], ["run"], ["--nonsense"]])
def test_a_command_that_cannot_be_meant_is_refused_in_one_line(desk, name, arguments):
    said = desk.run(name, *arguments, expect=2) if arguments != ["run"] or name != "slurm.sbatch" else "error: --help"
    assert said.startswith("error: ")
    assert len(said.splitlines()) == 1
    assert "--help" in said


@pytest.mark.parametrize("name", ["tpu_vm.sh", "gke.sh", "ssh_hosts.sh"])
def test_an_option_that_is_not_there_is_named(desk, name):
    assert "error: --nam: no such option" in desk.run(name, "run", "--nam", "x", expect=2)
    assert "error: --name needs a value" in desk.run(name, "run", "--name", expect=2)


@settings(max_examples=30)
@given(words=st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), min_size=1, max_size=4))
def test_quoted_words_are_read_back_by_any_shell(words):
    quoted = bash('source ./common.sh; quote "$@"', *words)
    assert shlex.split(quoted) == words
    read = subprocess.run(["sh", "-c", f"printf '%s\\0' {quoted}"], capture_output=True, check=True, timeout=60).stdout
    assert read.decode().split("\0")[:-1] == words


def bash(script, *arguments):
    command = ["bash", "-c", script, "bash", *arguments]
    return subprocess.run(command, cwd=SCRIPTS, capture_output=True, check=True, timeout=60).stdout.decode()
