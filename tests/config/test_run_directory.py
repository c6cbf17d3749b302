"""The run directory: one process at a time, the config of the run and what changed."""

import os
import shutil

import pytest

from maxlite.config import Config, InputError, RunDirectory, resolve


def config_of(tmp_path, *arguments):
    return resolve(Config, None, ["run_name=r", f"base_output_directory={tmp_path}", *arguments], {}).config


def test_the_config_is_written_and_where_the_run_goes_on_is_said(tmp_path):
    with RunDirectory(config_of(tmp_path, "steps=5")) as run:
        assert run.begin(0, False)[-1] == "starting at step 0"
    assert resolve(Config, str(tmp_path / "r" / "config.yml"), (), {}).config.run.steps == 5
    with RunDirectory(config_of(tmp_path, "steps=9", "log_period=1")) as run:
        assert run.begin(5, True)[-1] == "resuming from step 5 of 9"
        assert run.begin(9, True) == [
            f"run directory: {tmp_path / 'r'}",
            "resuming from step 9: nothing left of steps=9",
        ]
    assert resolve(Config, str(tmp_path / "r" / "config.yml"), (), {}).config.run.steps == 9


def test_a_second_process_is_refused_while_the_first_is_there(tmp_path):
    config = config_of(tmp_path)
    with (
        RunDirectory(config),
        pytest.raises(InputError, match=f"process {os.getpid()} is training"),
        RunDirectory(config),
    ):
        pass
    with RunDirectory(config):
        pass


def test_a_directory_that_is_removed_is_taken_again(tmp_path):
    config = config_of(tmp_path)
    with RunDirectory(config) as run:
        run.begin(0, False)
        assert run.check() == []
        shutil.rmtree(tmp_path / "r")
        assert "was removed and is made again" in run.check()[0]
        assert run.check() == []
        assert (tmp_path / "r" / "config.yml").exists()
        with pytest.raises(InputError, match=f"process {os.getpid()} is training"), RunDirectory(config):
            pass
        shutil.rmtree(tmp_path / "r")
        (tmp_path / "r").write_text("in the way")
        assert "was removed, and cannot be made again" in run.check()[0]
        (tmp_path / "r").unlink()
        with RunDirectory(config), pytest.raises(InputError, match=r"was removed while this run trained there"):
            run.check()


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "r").write_text("a file")
    with (
        pytest.raises(InputError, match=r"base_output_directory=.* cannot be used"),
        RunDirectory(config_of(tmp_path)),
    ):
        pass
