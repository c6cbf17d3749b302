"""`python -m maxlite.preflight`, as one process and as two."""

import json
import signal
import subprocess
import sys

import pytest

from maxlite import preflight

CHECKS = ("versions", "config", "clocks", "devices", "directory", "room", "speed", "data")
PREFLIGHT = ("-m", "maxlite.preflight")


@pytest.fixture
def run(make_run):
    return make_run("run")


@pytest.fixture
def check(run, capsys):
    """`check(arguments)`: exit status, verdict by name of the check, and everything printed."""

    def check(*arguments):
        status = preflight.main([*run.arguments, *arguments])
        printed = capsys.readouterr()
        return status, verdicts(printed.out), printed.err + printed.out

    return check


def verdicts(page):
    rows = [line.split() for line in page.splitlines()]
    return {row[1]: row[0] for row in rows if len(row) > 1 and row[1] in CHECKS}


def mount(*arguments):
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"may not mount here: {done.stderr.strip()}")


def test_all_is_well_and_nothing_is_left(run, check):
    status, page, printed = check()
    assert page == dict.fromkeys(("versions", "devices", "directory", "room", "speed", "data"), "ok")
    assert status == 0
    assert printed.splitlines()[-1] == "ready"
    assert not (run.folder / "runs").exists()
    assert signal.getsignal(signal.SIGTERM) is not signal.default_int_handler


def test_json_says_it_to_programs(run, check):
    status, _, printed = check("--json")
    result = json.loads(printed.splitlines()[-1])
    assert (status, result["ready"]) == (0, True)
    assert {one["name"] for one in result["checks"]} == {"versions", "devices", "directory", "room", "speed", "data"}
    measured = result["measured"]
    assert measured["save_seconds"] == pytest.approx(measured["state_bytes"] / measured["write_bytes_per_second"])
    assert measured["restore_seconds"] > 0
    assert measured["clock_skew_seconds"] == [0.0]
    # Parameters and two moments in float32, and a few counters.
    assert measured["state_bytes"] == pytest.approx(12 * 26_912, rel=1e-3)


def test_devices_that_do_not_fit_the_plan(check):
    status, page, printed = check("ici_fsdp_parallelism=4")
    assert status == 2
    assert page == {"versions": "ok", "devices": "FAIL"} | dict.fromkeys(
        ("directory", "room", "speed", "data"), "skipped"
    )
    assert "ici_fsdp_parallelism=4" in printed
    assert printed.splitlines()[-1] == "not ready: devices"


def test_a_directory_that_cannot_be_made(run, check):
    (run.folder / "runs").touch()
    status, page, printed = check()
    assert status == 2
    assert page["directory"] == "FAIL"
    assert page["room"] == page["speed"] == "skipped"
    assert page["data"] == "ok"
    assert "cannot be used: Not a directory" in printed
    assert "-> base_output_directory must be" in printed


def test_a_directory_that_is_read_only(run, check):
    runs = run.folder / "runs"
    runs.mkdir()
    mount("--bind", runs, runs)  # root may write whatever the mode bits say
    try:
        mount("-o", "remount,bind,ro", runs)
        status, page, printed = check()
    finally:
        subprocess.run(["umount", "--lazy", runs], check=True)
    assert status == 2
    assert page["directory"] == "FAIL"
    assert "Read-only file system" in printed


def test_a_disk_that_is_too_full_for_the_checkpoints_that_are_kept(run, check):
    runs = run.folder / "runs"
    runs.mkdir()
    mount("-t", "tmpfs", "-o", "size=20m", "tmpfs", runs)
    try:
        status, page, printed = check("enable_continuous_checkpointing=true", "max_num_checkpoints_to_keep=9")
        left = list(runs.iterdir())
    finally:
        subprocess.run(["umount", "--lazy", runs], check=True)
    assert status == 2
    assert page["room"] == "FAIL"
    assert page["speed"] == page["data"] == "ok"
    assert "9 checkpoints kept and one being written" in printed
    assert "or set max_num_checkpoints_to_keep=3" in printed
    assert not left


def test_data_that_cannot_be_read(check):
    status, page, printed = check("text_files=/nowhere.txt")
    assert status == 2
    assert {name for name, verdict in page.items() if verdict != "ok"} == {"data"}
    assert "/nowhere.txt" in printed
    assert "-> every process needs to read text_files" in printed


def test_a_run_that_saves_nothing_needs_no_directory(run, check):
    (run.folder / "runs").touch()
    status, page, _ = check("enable_checkpointing=false")
    assert status == 0
    assert page["directory"] == page["room"] == page["speed"] == "skipped"


def test_a_wrong_key_is_bad_input(check):
    status, page, printed = check("stepz=3")
    assert (status, page) == (2, {})
    assert "error: " in printed


def test_a_signal_leaves_nothing_behind(run):
    """It comes while the files are written."""
    waits = (
        "import os, signal, sys, threading\n"
        "os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGTERM)\n"
        "from maxlite.preflight import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    done = subprocess.run([sys.executable, "-c", waits, *run.arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 130, done.stderr
    assert not (run.folder / "runs").exists()


def test_two_processes_are_ready(start_several):
    two = start_several("--json", programs=[PREFLIGHT] * 2)
    statuses, outputs, errors = two.end()
    assert statuses == [0, 0], "\n".join(errors)
    result = json.loads(outputs[0])
    assert {one["name"]: one["status"] for one in result["checks"]} == dict.fromkeys(CHECKS, "ok")
    assert len(result["measured"]["clock_skew_seconds"]) == 2
    assert not outputs[1]
    assert not (two.run.folder / "runs").exists()


def test_what_is_wrong_with_one_of_two_is_said_once_and_ends_both(start_several, tmp_path):
    other = tmp_path / "other"
    two = start_several(
        programs=[PREFLIGHT] * 2, of_one=[f"base_output_directory={other}", "text_files=/nowhere.txt", "steps=7"]
    )
    statuses, outputs, errors = two.end()
    assert statuses == [2, 2], errors
    page = verdicts(outputs[0])
    assert {name for name, verdict in page.items() if verdict == "FAIL"} == {"config", "directory", "data"}
    assert "steps: 10000 on process 0 (" in outputs[0]
    assert f"{other}/r/checkpoints is not shared: this process does not see what process 0 wrote there" in outputs[0]
    assert "/nowhere.txt" in outputs[0]
    assert outputs[0].splitlines()[-1] == "not ready: config, directory, data"
    assert not outputs[1]
    assert not other.exists()
