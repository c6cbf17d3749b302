"""scripts/gke.sh and its manifest."""

import json
import shlex
from pathlib import Path

import pytest
import yaml

SLICE = ["--name", "run-1", "--image", "a/b:c", "--accelerator", "tpu-v5p-slice", "--topology", "4x4x4"]
JOB = [*SLICE, "--claim", "runs"]


def manifest(desk, *arguments):
    return yaml.safe_load(desk.run("gke.sh", "manifest", *arguments))


def pod_of(job_set):
    [job] = job_set["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]["spec"]


def problems(value, schema, path="manifest"):
    """What of the schema (as much of JSON Schema as jobset.schema.yaml uses) the value does not fit."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{path}: {value!r}"]
    allowed = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(type(value) is kinds[kind] for kind in allowed):
        return [f"{path}: {value!r} is no {schema['type']}"]
    if isinstance(value, dict):
        known, other = schema.get("properties", {}), schema.get("additionalProperties")
        found = [f"{path}: {name} is missing" for name in schema.get("required", []) if name not in value]
        for name, inner in value.items():
            there = known.get(name, other)
            found += [f"{path}: {name} is not known"] if there is None else problems(inner, there, f"{path}.{name}")
        return found
    if isinstance(value, list):
        return [found for inner in value for found in problems(inner, schema["items"], f"{path}[]")]
    return [f"{path}: {value} is too small"] if value is not True and value < schema.get("minimum", value) else []


@pytest.fixture(scope="module")
def schema():
    return yaml.safe_load((Path(__file__).parent / "jobset.schema.yaml").read_text())


def test_the_manifest_fits_the_schema(desk, schema, nasty):
    job_set = manifest(desk, *JOB, "--slices", "2", "--max-restarts", "7", "--mount", "/a b", *nasty)
    assert problems(job_set, schema) == []
    job_set["spec"]["replicatedJobs"][0]["replica"] = 2
    job_set["spec"]["failurePolicy"]["maxRestarts"] = "7"
    del pod_of(job_set)["containers"][0]["name"]
    assert len(problems(job_set, schema)) == 3


def test_the_manifest_says_what_was_asked_for(desk, nasty):
    job_set = manifest(desk, *JOB, "--slices", "2", "--max-restarts", "7", "--grace-seconds", "90", *nasty)
    [job] = job_set["spec"]["replicatedJobs"]
    assert job_set["metadata"]["name"] == "run-1"
    assert job_set["spec"]["failurePolicy"]["maxRestarts"] == 7
    assert job["replicas"] == 2
    assert job["template"]["spec"]["parallelism"] == job["template"]["spec"]["completions"] == 16  # 64 chips, 4 a host
    pod = pod_of(job_set)
    assert pod["terminationGracePeriodSeconds"] == 90
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4x4"
    [container] = pod["containers"]
    assert container["command"] == ["python", "-m", "maxlite.train"]
    assert [expanded(word) for word in container["args"]] == nasty


def test_preflight_runs_in_the_place_of_the_training(desk):
    pod = pod_of(manifest(desk, *JOB, "--command", "preflight", "c.yml"))
    assert pod["containers"][0]["command"] == ["python", "-m", "maxlite.preflight"]


def expanded(word):
    """What Kubernetes makes of a word of `args`: $(NAME) is a variable, $$ is $ before a parenthesis."""
    return word.replace("$$(", "$(")


def test_only_what_can_go_on_is_restarted(desk):
    spec = manifest(desk, *JOB, "c.yml")["spec"]
    preempted, hopeless = spec["failurePolicy"]["rules"]
    assert (preempted["action"], hopeless["action"]) == ("RestartJobSetAndIgnoreMaxRestarts", "FailJobSet")
    job = spec["replicatedJobs"][0]["template"]["spec"]
    [rule] = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"containerName": "maxlite", "operator": "In", "values": [2, 4, 5]}
    assert job["backoffLimit"] == 0
    # As Kubernetes words it (pkg/controller/job/pod_failure_policy.go).
    message = "Container maxlite for pod default/x failed with exit code {} matching FailJob rule at index 0"
    [pattern] = preempted["onJobFailureMessagePatterns"]
    assert [code for code in (2, 4, 5, 52) if pattern in message.format(code)] == [5]


def test_a_run_does_what_its_dry_run_says(desk, nasty):
    desk.program("kubectl", '[[ $1 != apply ]] || cat >"applied"')
    printed = desk.run("gke.sh", "run", "--dry-run", *JOB, *nasty)
    assert not desk.calls
    desk.run("gke.sh", "run", *JOB, *nasty)
    apply, *rest = printed.split("\nEOF\n")
    command, _, said = apply.partition(" <<'EOF'\n")
    assert said + "\n" == (desk.folder / "applied").read_text()
    assert [shlex.split(line) for line in [command, *rest[0].splitlines()]] == desk.calls
    assert [call[1] for call in desk.calls] == ["apply", "wait", "logs"]


def test_stop_suspends_and_resume_goes_on(desk):
    desk.program("kubectl")
    desk.run("gke.sh", "stop", "--name", "run-1", "--namespace", "n")
    desk.run("gke.sh", "resume", "--name", "run-1", "--namespace", "n")
    patches = [call for call in desk.calls if "patch" in call]
    assert all(call[:6] == ["kubectl", "--namespace", "n", "patch", "jobset", "run-1"] for call in patches)
    assert [json.loads(call[-1])["spec"]["suspend"] for call in patches] == [True, False]


def test_xpk_gets_the_words_as_they_were_typed(desk, nasty):
    options = ["--name", "run-1", "--image", "a/b:c", "--cluster", "c", "--type", "v5p-128", "--slices", "2"]
    [call] = desk.dry_run("gke.sh", "xpk", *options, *nasty)
    assert call[:3] == ["xpk", "workload", "create"]
    given = dict(zip(call[3::2], call[4::2], strict=True))
    assert shlex.split(given["--command"]) == ["python", "-m", "maxlite.train", *nasty]
    assert given["--tpu-type"] == "v5p-128"
    assert given["--num-slices"] == "2"
    assert given["--restart-on-exit-codes"] == "1,3,5-126"  # not 2, a bad config, nor 4, a loss that is not finite


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--name", "Run_1"], "--name Run_1: small letters"),
        (["--name", "a" * 41], "at most 40"),
        (["--topology", "4x4x"], "--topology 4x4x: expected sizes"),
        (["--topology", "3x1", "--chips-per-host", "4"], "has 3 chips, no multiple of --chips-per-host 4"),
        (["--slices", "0"], "--slices 0: expected a number of 1 or more"),
        (["--max-restarts", "1; x"], "--max-restarts 1; x: expected"),
        (["--claim", ""], "--claim is needed"),
        (["--image", "a\nb"], "' has a control character in it"),
    ],
)
def test_what_no_manifest_can_be_made_of_is_refused(desk, arguments, words):
    desk.program("kubectl")
    assert words in desk.run("gke.sh", "run", *JOB, *arguments, "c.yml", expect=2)
    assert not desk.calls
