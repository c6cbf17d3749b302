"""scripts/slurm.sbatch: what it does with each end of a run, and a real job on a real Slurm."""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm.sbatch"
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "MAXLITE_PYTHON": "py thon"}


def end(desk, status, expect, state="RUNNING", **env):
    """Runs the script in a job whose tasks leave with `status`; what it printed, and whether it was requeued."""
    desk.program("srun", f"exit {status}")
    desk.program("scontrol", f'[[ $1 != show ]] || echo "JobId=7 JobState={state} Reason=None"')
    printed = desk.run(SCRIPT.name, "c.yml", expect=expect, **JOB, **env)
    return printed, ["scontrol", "requeue", "7"] in desk.calls


def test_the_tasks_get_the_words_as_they_were_typed(desk, nasty):
    end(desk, 0, 0)
    [call] = desk.calls
    assert call == ["srun", "--kill-on-bad-exit=0", "--wait=120", "py thon", "-m", "maxlite.train", "c.yml"]
    said = shlex.split(desk.run(SCRIPT.name, "--dry-run", *nasty, **JOB))
    assert said == [*call[:-1], *nasty]
    said = shlex.split(desk.run(SCRIPT.name, "--dry-run", "c.yml", MAXLITE_COMMAND="preflight", **JOB))
    assert said == [*call[:5], "maxlite.preflight", "c.yml"]


@pytest.mark.parametrize("status", [0, 2, 4])
def test_a_run_that_is_done_or_hopeless_ends(desk, status):
    assert end(desk, status, status) == ("", False)


def test_a_run_that_was_preempted_is_requeued_however_often(desk):
    for _ in range(3):
        printed, requeued = end(desk, 5, 0, MAX_FAILURES="1")
        assert "exit status 5: requeued" in printed
        assert requeued
    assert not list(desk.folder.glob("*.failures"))


@pytest.mark.parametrize("status", [1, 3, 137])
def test_a_run_that_failed_is_requeued_so_often(desk, status):
    for failure in (1, 2):
        assert end(desk, status, 0, MAX_FAILURES="2")[1]
        assert len((desk.folder / "slurm-7.failures").read_text().splitlines()) == failure
    requeues = desk.calls.count(["scontrol", "requeue", "7"])
    printed, _ = end(desk, status, status, MAX_FAILURES="2")
    assert "error: more than 2 failures (MAX_FAILURES), see slurm-7.failures" in printed
    assert desk.calls.count(["scontrol", "requeue", "7"]) == requeues
    assert f"exit status {status} on node[1-2]" in (desk.folder / "slurm-7.failures").read_text()


@pytest.mark.parametrize("state", ["CANCELLED", "PREEMPTED", "COMPLETING"])
def test_a_job_that_was_cancelled_is_not_requeued(desk, state):
    assert end(desk, 5, 5, state=state) == ("", False)


def test_without_a_job_it_says_how_to_make_one(desk):
    env = {name: value for name, value in JOB.items() if name != "SLURM_JOB_ID"}
    assert "start it with sbatch" in desk.run(SCRIPT.name, "c.yml", expect=2, **env)


class Slurm:
    """A controller and one node on this machine, of its own: nothing of it is outside of `folder`."""

    def __init__(self, folder):
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        host = socket.gethostname().split(".")[0]
        socket_path = folder / "munge.socket"
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        user = subprocess.check_output(["id", "-un"], text=True).strip()
        settings = {
            "ClusterName": "test",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmctldPort": free_port(),
            "SlurmdPort": free_port(),
            "AuthType": "auth/munge",
            # A requeued job waits for as long as a credential is valid.
            "AuthInfo": f"socket={socket_path},cred_expire=5",
            "SlurmUser": user,
            "SlurmdUser": user,
            "StateSaveLocation": folder / "state",
            "SlurmdSpoolDir": folder / "spool",
            "SlurmctldPidFile": folder / "slurmctld.pid",
            "SlurmdPidFile": folder / "slurmd.pid",
            "SlurmctldLogFile": folder / "slurmctld.log",
            "SlurmdLogFile": folder / "slurmd.log",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "SelectType": "select/cons_tres",
            "ReturnToService": 2,
            "JobRequeue": 1,
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
            "SchedulerParameters": "sched_interval=2,bf_interval=2",
            "NodeName": f"{host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN",
        }
        partitions = [
            f"PartitionName=low Nodes={host} Default=YES PriorityTier=1 GraceTime=60",
            f"PartitionName=high Nodes={host} PriorityTier=2",
        ]
        lines = [*(f"{name}={value}" for name, value in settings.items()), *partitions]
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        for name in ("state", "spool"):
            (folder / name).mkdir()
        munged = ["munged", "--force", f"--key-file={key}", f"--socket={socket_path}"]
        munged += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
        try:
            for command in (munged, ["slurmctld"], ["slurmd"]):
                self.call(*command)
            wait(lambda: "idle" in self.call("sinfo", "--noheader", "--format=%t"), seconds=30)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired, AssertionError) as error:
            why = getattr(error, "stderr", None) or error
            self.stop()
            pytest.skip(f"Slurm does not run here: {why}")

    def call(self, *command):
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        done = subprocess.run(
            command, env=self.env | {"PATH": path}, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout

    def submit(self, *arguments, cwd):
        done = subprocess.run(
            ["sbatch", "--parsable", *arguments], env=self.env, cwd=cwd, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return Job(self, int(done.stdout), cwd)

    def stop(self):
        for name in ("slurmd.pid", "slurmctld.pid", "munge.pid"):
            if (self.folder / name).exists():
                pid = int((self.folder / name).read_text())
                os.kill(pid, signal.SIGTERM)
                wait(lambda pid=pid: not Path(f"/proc/{pid}").exists(), seconds=30)


class Job:
    def __init__(self, slurm, number, cwd):
        self.slurm, self.number = slurm, number
        self.log = cwd / f"slurm-{number}.out"

    def __getitem__(self, field):
        words = self.slurm.call("scontrol", "show", "job", "--oneliner", str(self.number)).split()
        return next(word.removeprefix(f"{field}=") for word in words if word.startswith(f"{field}="))

    def printed(self):
        return self.log.read_text() if self.log.exists() else ""

    def pid_of_task(self, index):
        """Of the task of the running step."""
        rows = self.slurm.call("scontrol", "listpids", str(self.number)).splitlines()[1:]
        return next(int(row.split()[0]) for row in rows if row.split()[2] == "0" and row.split()[4] == str(index))


@pytest.fixture
def slurm(tmp_path_factory):
    needed = ["munged", "slurmctld", "slurmd", "sbatch"]
    missing = [name for name in needed if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed (Debian: slurm-wlm, munge)")
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    yield slurm
    slurm.stop()


@pytest.mark.slow
def test_a_job_whose_task_is_killed_and_that_is_preempted_ends_as_the_run_never_stopped(slurm, make_run):
    run, whole = make_run("job"), make_run("whole")
    slurm.env |= {"MAXLITE_PYTHON": sys.executable, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    endless = ["steps=1000000", "learning_rate_schedule_steps=1000"]
    same = ["lr_schedule_type=constant", "eval_steps=0", "enable_continuous_checkpointing=true"]
    arguments = [*run.arguments, *same, "per_device_batch_size=2", *endless]

    job = slurm.submit("--ntasks=2", str(SCRIPT), *arguments, cwd=run.folder)
    try:
        wait(lambda: run.steps(), job.printed)
        os.kill(job.pid_of_task(1), signal.SIGKILL)
        wait(lambda: job["Restarts"] == "1", job.printed)
        lost = run.steps()[-1]
        assert "exit status 137" in (run.folder / f"slurm-{job.number}.failures").read_text()
        wait(lambda: f"resuming from step {lost} " in job.printed(), job.printed)
        wait(lambda: run.steps()[-1] > lost, job.printed)

        urgent = slurm.submit("--partition=high", "--exclusive", "--wrap=true", cwd=run.folder)
        wait(lambda: job["Restarts"] == "2", job.printed)
        assert "SIGTERM: step" in job.printed()
        assert "exit status 5: requeued, to resume" in job.printed()
        wait(lambda: urgent["JobState"] == "COMPLETED", job.printed)
        saved = run.steps()[-1]
        wait(lambda: f"resuming from step {saved} " in job.printed(), job.printed)
        wait(lambda: run.steps()[-1] > saved, job.printed)

        slurm.call("scancel", str(job.number))
        wait(lambda: job["JobState"] == "CANCELLED" and not slurm.call("squeue", "--noheader"), job.printed)
        assert len((run.folder / f"slurm-{job.number}.failures").read_text().splitlines()) == 1
    finally:
        slurm.call("scancel", str(job.number))
    last = run.steps()[-1]
    whole.train(*same, "per_device_batch_size=2", *endless, f"steps={last}", devices=2)
    assert run.arrays(last) == whole.arrays(last)


def wait(reached, printed=lambda: "", seconds=300):
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, printed()
        time.sleep(0.1)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
