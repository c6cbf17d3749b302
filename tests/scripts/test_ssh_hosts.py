"""scripts/ssh_hosts.sh, with an ssh that stays on this machine: what runs on the hosts is run for real."""

import os
import shlex
import signal
import subprocess
import time
from contextlib import suppress

import pytest

HOSTS = ["--hosts", "me@a,b"]
# Runs the command as sshd does, by a shell from the home directory.
SSH = 'while [[ $1 == -* ]]; do [[ $1 != -o ]] || shift; shift; done; shift; cd "$HOME" && exec sh -c "$*"'


@pytest.fixture
def hosts(desk):
    desk.program("ssh", SSH)
    (desk.home / "maxlite").mkdir()

    def python(body):
        """What `--python` is on the hosts: told its process by the last argument."""
        path = desk.home / "maxlite" / "python"
        path.write_text(f"#!/usr/bin/env bash\nlast=${{*: -1}}\nindex=${{last#process_id=}}\n{body}\n")
        path.chmod(0o755)
        return [*HOSTS, "--python", "./python"]

    yield python
    for job in (desk.home / ".maxlite" / "jobs").glob("*"):
        if not (job / "status").exists():
            with suppress(ProcessLookupError):
                os.killpg(int((job / "pid").read_text()), signal.SIGKILL)


def test_each_process_gets_the_words_as_they_were_typed(desk, hosts, nasty):
    options = hosts('printf "%s\\0" "$@" >"$HOME/words-$index"; echo "hello from $index"')
    printed = desk.run("ssh_hosts.sh", "run", *options, "--port", "9", *nasty)
    for index in range(2):
        words = (desk.home / f"words-{index}").read_text().split("\0")[:-1]
        keys = ["coordinator_address=a:9", "num_processes=2", f"process_id={index}"]
        assert words == ["-m", "maxlite.train", *nasty, *keys]
    assert "[0:me@a] hello from 0\n" in printed
    assert "[1:b] hello from 1\n" in printed


def test_a_dry_run_prints_what_a_run_does(desk, hosts, nasty):
    options = [*hosts("exit 0"), *nasty]
    said = desk.dry_run("ssh_hosts.sh", "run", *options)
    desk.run("ssh_hosts.sh", "run", *options)
    assert sorted(said) == sorted(desk.calls)
    assert [call[:5] for call in said[:2]] == [["ssh", "-n", "-o", "BatchMode=yes", host] for host in ("me@a", "b")]


def test_one_host_is_one_process_with_all_its_devices(desk, nasty):
    start, _ = desk.dry_run("ssh_hosts.sh", "run", "--hosts", "box", *nasty)
    words = shlex.split(start[-1])
    assert words[words.index("maxlite.train") + 1 :][: len(nasty)] == nasty
    assert "coordinator_address" not in start[-1]


def test_preflight_runs_in_the_place_of_the_training(desk):
    start, *_ = desk.dry_run("ssh_hosts.sh", "run", *HOSTS, "--command", "preflight", "c.yml")
    assert " -m maxlite.preflight c.yml coordinator_address=" in start[-1]
    assert "expected train" in desk.run("ssh_hosts.sh", "run", *HOSTS, "--command", "x; y", "c.yml", expect=2)


def test_installing_copies_the_source_first(desk):
    said = desk.dry_run("ssh_hosts.sh", "run", *HOSTS, "--dir", "my dir", "--install", "cuda", "c.yml")
    assert said[0][0] == "git"
    archive = said[0][-2].removeprefix("--output=")
    assert said[1] == ["scp", "-q", "-o", "BatchMode=yes", archive, "me@a:maxlite-source.tar.gz"]
    assert "tar -xzf maxlite-source.tar.gz -C 'my dir' && cd 'my dir'" in said[2][-1]
    assert said[2][-1].endswith("-e '.[cuda]'")
    assert len(said) == 1 + 2 * 2 + 2 + 2


@pytest.mark.parametrize(("statuses", "expected"), [((3, 2), 2), ((5, 5), 5), ((0, 0), 0), ((137, 3), 3), ((0, 4), 4)])
def test_the_status_is_that_of_the_process_that_failed_by_itself(desk, hosts, statuses, expected):
    options = hosts(f"statuses=({statuses[0]} {statuses[1]}); exit ${{statuses[index]}}")
    desk.run("ssh_hosts.sh", "run", *options, "c.yml", expect=expected)
    desk.run("ssh_hosts.sh", "logs", *options, expect=expected)


SAVES_ON_TERM = 'trap "echo saved; exit 5" TERM; echo "training $index"; while :; do sleep 0.1; done'


def test_stop_lets_the_run_save_and_its_watcher_ends_with_it(desk, hosts):
    options = hosts(SAVES_ON_TERM)
    watcher = desk.start("ssh_hosts.sh", "run", *options, "c.yml")
    wait_for_line(watcher, "training 0", "training 1")
    assert "is running here; stop it first" in desk.run("ssh_hosts.sh", "run", *options, "c.yml", expect=2)
    desk.run("ssh_hosts.sh", "stop", *options)
    printed, _ = watcher.communicate(timeout=60)
    assert printed.count("saved") == 2
    assert watcher.returncode == 5


def test_ctrl_c_ends_the_showing_and_not_the_training(desk, hosts):
    options = hosts(SAVES_ON_TERM)
    watcher = desk.start("ssh_hosts.sh", "run", *options, "c.yml")
    wait_for_line(watcher, "training 0", "training 1")
    watcher.terminate()
    watcher.communicate(timeout=60)
    assert watcher.returncode == 130
    desk.run("ssh_hosts.sh", "stop", *options)
    printed = desk.run("ssh_hosts.sh", "logs", *options, expect=5)
    assert printed.count("saved") == 2


def test_a_job_that_was_killed_says_so(desk, hosts):
    options = hosts("kill -9 $PPID; kill -9 $$")
    assert "was killed" in desk.run("ssh_hosts.sh", "run", *options, "c.yml", expect=137)


def test_a_job_that_is_not_there_says_so(desk, hosts):
    options = hosts("")
    assert "no job maxlite-0 here" in desk.run("ssh_hosts.sh", "logs", *options, expect=2)


def test_a_host_that_is_an_option_of_ssh_is_refused(desk):
    assert "is no host" in desk.run("ssh_hosts.sh", "run", "--hosts", "a,-oProxyCommand=x", "c.yml", expect=2)


def test_what_is_printed_for_the_hosts_is_posix_shell(desk, nasty):
    for action, arguments in (("run", nasty), ("logs", []), ("stop", [])):
        for *_, script in desk.dry_run("ssh_hosts.sh", action, *HOSTS, *arguments):
            subprocess.run(["sh", "-n", "-c", script], check=True, timeout=60)


def wait_for_line(process, *words):
    """Reads lines until each of the words was in one."""
    missing, deadline = set(words), time.monotonic() + 60
    while missing:
        line = process.stdout.readline()
        assert line, f"it ended: {process.communicate()}"
        assert time.monotonic() < deadline
        missing = {word for word in missing if word not in line}
