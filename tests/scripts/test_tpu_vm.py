"""scripts/tpu_vm.sh, with a gcloud that only answers, and with gcloud's own parser where it is installed."""

import json
import shlex
import shutil
import subprocess

import pytest

POD = ["--name", "pod", "--zone", "us-east5-a", "--project", "p"]
V5P = [*POD, "--type", "v5p-128"]
WHERE = ["--zone", "us-east5-a", "--project", "p"]
TPUS = ["gcloud", "compute", "tpus"]
QUEUED = [*TPUS, "queued-resources"]


@pytest.fixture
def gcloud(desk):
    def answers(*states):
        """The states that `queued-resources list` tells, one call after the other."""
        (desk.folder / "states").write_text("".join(f"{state}\n" for state in states))
        desk.program("gcloud", 'if [[ $* == *" list "* ]]; then head -n1 states; sed -i 1d states; fi')

    return answers


def of(calls, *words):
    """The calls that have these words one after the other."""
    wanted = list(words)
    return [call for call in calls if any(call[i : i + len(wanted)] == wanted for i in range(len(call)))]


def test_several_slices_are_queued_together_and_get_the_words_as_they_were_typed(desk, nasty):
    said = desk.dry_run("tpu_vm.sh", "run", *V5P, "--slices", "2", "--spot", *nasty)
    [create] = of(said, "queued-resources", "create")
    assert create == [
        *QUEUED,
        "create",
        "pod",
        *("--accelerator-type", "v5p-128", "--runtime-version", "v2-alpha-tpuv5"),
        *("--node-count", "2", "--node-prefix", "pod", "--spot"),
        *WHERE,
    ]
    starts = [call for call in of(said, "tpu-vm", "ssh") if "maxlite.train" in call[9]]
    assert [call[5] for call in starts] == ["pod-0", "pod-1"]
    for call in starts:
        assert call[6:9] == ["--worker", "all", "--command"]
        words = shlex.split(call[9])
        assert words[words.index("maxlite.train") + 1 :][: len(nasty)] == nasty


def test_preflight_runs_in_the_place_of_the_training(desk):
    said = desk.dry_run("tpu_vm.sh", "run", *V5P, "--command", "preflight", "c.yml")
    assert [call for call in of(said, "tpu-vm", "ssh", "pod") if " -m maxlite.preflight c.yml " in call[9]]


def test_a_run_does_what_its_dry_run_says(desk, gcloud, nasty):
    gcloud("", "ACTIVE")
    said = desk.dry_run("tpu_vm.sh", "run", *V5P, "--no-install", *nasty)
    desk.run("tpu_vm.sh", "run", *V5P, "--no-install", *nasty)
    assert desk.calls == said
    assert of(said, "queued-resources", "create", "pod")[0][-6:-4] == ["--node-id", "pod"]


def test_tpus_that_are_there_are_used_again(desk, gcloud):
    gcloud("ACTIVE", "ACTIVE")
    desk.run("tpu_vm.sh", "run", *V5P, "--no-install", "c.yml")
    assert not of(desk.calls, "create")
    assert len(of(desk.calls, "tpu-vm", "ssh", "pod")) == 2


@pytest.mark.parametrize("state", ["SUSPENDED", "FAILED"])
def test_tpus_that_were_preempted_are_asked_for_anew(desk, gcloud, state):
    gcloud(state, "ACTIVE")
    printed = desk.run("tpu_vm.sh", "run", *V5P, "--no-install", "c.yml")
    assert f"pod is {state}: it has no TPUs any more" in printed
    kinds = [call[4] for call in of(desk.calls, "queued-resources")]
    assert kinds == ["list", "delete", "create", "list"]


def test_a_request_that_fails_ends_the_waiting(desk, gcloud):
    gcloud("", "FAILED")
    assert "error: pod is FAILED" in desk.run("tpu_vm.sh", "run", *V5P, "c.yml", expect=2)
    assert not of(desk.calls, "tpu-vm", "ssh")


def test_gcloud_that_fails_creates_nothing(desk):
    desk.program("gcloud", "echo 'not logged in' >&2; exit 7")
    assert "not logged in" in desk.run("tpu_vm.sh", "run", *V5P, "c.yml", expect=7)
    assert len(desk.calls) == 1


def test_stop_and_delete_are_for_what_was_named(desk, gcloud):
    gcloud()
    desk.run("tpu_vm.sh", "stop", *POD, "--slices", "2", "--internal-ip")
    stops = of(desk.calls, "tpu-vm", "ssh")
    assert sorted(call[5] for call in stops) == ["pod-0", "pod-1"]
    assert all("kill -TERM" in call[9] and "--internal-ip" in call for call in stops)
    desk.run("tpu_vm.sh", "delete", *POD)
    assert desk.calls[-1] == [*QUEUED, "delete", "pod", "--force", "--quiet", *WHERE]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--name", "-x", "--zone", "z", "--type", "v4-8", "c.yml"], "--name -x"),
        (["--name", "x;y", "--zone", "z", "--type", "v4-8", "c.yml"], "--name x;y"),
        (["--name", "x", "--zone", "z", "--type", "v4-8", "--slices", "two", "c.yml"], "--slices two"),
        (["--name", "x", "--zone", "z", "--type", "v99-8", "c.yml"], "give its --runtime-version too"),
        (["--name", "x", "--zone", "z", "c.yml"], "--type is needed"),
    ],
)
def test_bad_options_are_refused_before_anything_is_asked_for(desk, gcloud, arguments, words):
    gcloud()
    assert words in desk.run("tpu_vm.sh", "run", *arguments, expect=2)
    assert not desk.calls


@pytest.mark.skipif(not shutil.which("gcloud"), reason="gcloud is not installed")
def test_gcloud_knows_every_option(desk, tmp_path):
    more = ["--slices", "2", "--internal-ip", "--startup-script", "mount.sh"]
    said = desk.dry_run("tpu_vm.sh", "run", *V5P, *more, "--spot", "c.yml")
    for action in ("logs", "stop", "status", "delete"):
        said += desk.dry_run("tpu_vm.sh", action, *POD)
    commands = sorted({shlex.join(call) for call in said if call[0] == "gcloud"})
    assert len(commands) >= 8
    file = tmp_path / "commands.json"
    file.write_text(json.dumps([{"command_string": command} for command in commands]))
    lint = ["gcloud", "meta", "lint-gcloud-commands", f"--commands-file={file}"]
    checked = subprocess.run(lint, capture_output=True, text=True, timeout=120)
    if checked.returncode:
        pytest.skip(f"gcloud has no lint of commands: {checked.stderr}")
    results = json.loads(checked.stdout)
    assert len(results) == len(commands)
    assert {result["command_string"]: result["error_message"] for result in results if not result["success"]} == {}
