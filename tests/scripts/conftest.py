"""The launch scripts as a person runs them, with programs of the test's own in place of ssh, gcloud, kubectl ..."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

# Words that break a script which quotes too little, too much, or twice.
NASTY = [
    "configs/my run.yml",
    'run_name=it\'s a "test"',
    "a=$(touch pwned) `touch pwned` $HOME ~ * \\ & ; | < > !",
    "b=${NAME} @ % #",
    "empty=",
    "",
]


class Desk:
    """A home with programs first on PATH, each of which notes its arguments and then runs its body."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir()
        self._bin = folder / "bin"
        self._bin.mkdir()
        self._calls = folder / "calls"

    def program(self, name, body=""):
        """A program: a body in bash."""
        path = self._bin / name
        note = f'{{ printf "%s\\0" {name} "$@"; printf "\\n\\0"; }} >>{shlex.quote(str(self._calls))}\n'
        path.write_text(f"#!/usr/bin/env bash\n{note}{body}\n")
        path.chmod(0o755)

    @property
    def calls(self):
        """Every call so far, as its words."""
        if not self._calls.exists():
            return []
        words, calls = self._calls.read_bytes().decode().split("\0"), [[]]
        for word in words[:-1]:
            if word == "\n":
                calls.append([])
            else:
                calls[-1].append(word)
        return calls[:-1]

    def start(self, script, *arguments, **env):
        env = {**os.environ, "PATH": f"{self._bin}:{os.environ['PATH']}", "HOME": str(self.home), **env}
        return subprocess.Popen(
            [SCRIPTS / script, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=self.folder,
            env=env,
        )

    def run(self, script, *arguments, expect=0, **env):
        """Runs a script to its end: what it printed; the exit status must be `expect`."""
        return "".join(self._run(script, *arguments, expect=expect, **env))

    def _run(self, script, *arguments, expect=0, **env):
        process = self.start(script, *arguments, **env)
        out, err = process.communicate(timeout=60)
        assert process.returncode == expect, f"exit status {process.returncode}\n{out}{err}"
        assert not list(self.folder.rglob("pwned")), "something was run that should have been quoted"
        return out, err

    def dry_run(self, script, action, *arguments):
        """The commands that a script says it would run, as their words; it runs none."""
        before = len(self.calls)
        printed, _ = self._run(script, action, "--dry-run", *arguments)
        assert len(self.calls) == before
        return [shlex.split(line) for line in printed.splitlines()]


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path)


@pytest.fixture
def nasty():
    return list(NASTY)
