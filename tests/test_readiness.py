import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxlite.checkpoint.trial import Room
from maxlite.config import CheckpointConfig
from maxlite.readiness import (
    CLOCK_SKEW_SECONDS,
    Check,
    Clock,
    Speed,
    check_clocks,
    check_config,
    check_data,
    check_errors,
    check_room,
    check_speed,
    check_versions,
)

GB = 10**9


def finding(host, **what):
    return {"host": host, **what}


def test_versions_that_differ_are_named_with_their_processes():
    found = [finding(host, versions={"jax": jax, "flax": "1"}) for host, jax in (("a", "1"), ("b", "2"), ("c", "2"))]
    check = check_versions(found)
    assert check.status == "FAIL"
    assert check.text == "jax: 1 on process 0 (a); 2 on process 1 (b), 2 (c)"
    assert "install the same versions" in check.advice
    assert check_versions(found[1:]).status == "ok"


def test_a_package_that_one_has_not_is_named():
    found = [finding("a", versions={"libtpu": "1"}), finding("b", versions={"libtpu": None})]
    assert check_versions(found).text == "libtpu: 1 on process 0 (a); none on process 1 (b)"


def test_config_keys_that_differ_are_named():
    found = [finding("a", config={"steps": 10, "x": 1}), finding("b", config={"steps": 20, "x": 1})]
    check = check_config(found)
    assert (check.status, check.text) == ("FAIL", "steps: 10 on process 0 (a); 20 on process 1 (b)")
    assert check_config(found[:1]) is None


@given(
    skew=st.floats(-1000, 1000),
    start=st.floats(0, 1e9),
    delays=st.tuples(st.floats(0, 10), st.floats(0, 10)),
)
def test_a_clock_is_never_said_to_be_off_by_more_than_it_is(skew, start, delays):
    clock = Clock(start, start + delays[0] + skew, start + sum(delays))
    assert abs(clock.skew) <= abs(skew) + 1e-6
    assert abs(clock.skew) >= abs(skew) - sum(delays) - 1e-6
    assert clock.skew == 0 or math.copysign(1, clock.skew) == math.copysign(1, skew)


def test_clocks_that_are_off_are_named():
    found = [finding("a"), finding("b")]
    right, wrong = Clock(100.0, 100.1, 100.2), Clock(100.0, 100.0 - CLOCK_SKEW_SECONDS - 1, 100.2)
    check = check_clocks([right, wrong], found)
    assert check.status == "FAIL"
    assert "process 1 on b -6.0 s" in check.text
    assert check_clocks([right, right], found) == Check("clocks", "ok", "no more than 0.2 s apart")
    assert check_clocks([right], found[:1]) is None


def test_an_error_is_said_once_for_all_that_have_it():
    found = [finding(str(index), error="no such file" if index else "") for index in range(9)]
    check = check_errors("data", found, "do this")
    assert check.text == "process 1 (1), 2 (2), 3 (3), 4 (4), 5 (5) and 3 more: no such file"
    assert check_errors("data", found[:1], "do this") is None
    assert check_errors("data", found[1:2], "do this").text == "no such file"  # alone, it need not be named


def test_data_that_differs_is_named():
    found = [finding(host, fingerprint=host, data="data: x", seconds=1.0) for host in "ab"]
    assert check_data(found).text == "data fingerprint: a on process 0 (a); b on process 1 (b)"
    assert check_data(found[:1]).text == "x\nfirst batch after 1.0 s"


def test_the_speed_is_that_of_all_until_the_last_is_done():
    found = [{way: {"bytes": GB, "seconds": seconds} for way in ("write", "read")} for seconds in (1.0, 4.0)]
    assert Speed.of(found) == Speed(GB / 2, GB / 2)


@pytest.mark.parametrize(
    ("write", "status", "words"),
    [
        (GB, "ok", "a save takes at least 20 s"),
        (GB / 2, "note", "preemption_grace_seconds=25"),
        (GB / 100, "FAIL", "checkpoint_timeout_seconds=600"),
    ],
)
def test_a_save_has_to_end_in_time(write, status, words):
    check = check_speed(Speed(write, 2 * GB), 20 * GB, CheckpointConfig())
    assert check.status == status
    assert words in "\n".join(check.lines())
    assert "a restore 10 s" in check.text


def test_the_advice_on_room_helps():
    config = CheckpointConfig(enable_continuous_checkpointing=True)
    check = check_room(Room(free=6 * GB, own=GB), GB, config, steps=100)
    assert check.status == "FAIL"
    assert "10 checkpoints kept and one being written: 11.0 GB; free: 6.00 GB" in check.text
    assert "this run's checkpoints: 1.00 GB" in check.text
    assert check.advice == "free 4.05 GB, or set max_num_checkpoints_to_keep=5"
    fewer = config.model_copy(update={"max_num_checkpoints_to_keep": 5})
    assert check_room(Room(free=6 * GB, own=GB), GB, fewer, steps=100).status == "ok"
    assert check_room(Room(free=GB, own=0), GB, config, steps=100).advice.endswith("or use other storage")
    assert check_room(Room(free=None, own=0), GB, config, steps=100).status == "ok"


def test_lines_are_aligned():
    assert Check("speed", "FAIL", "one\ntwo", "do this").lines() == [
        "FAIL    speed       one\n                    two",
        "                    -> do this",
    ]
