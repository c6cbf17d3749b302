"""Processes that meet, here as threads: all come, some do not, and strangers that knock."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from maxlite.config import InputError
from maxlite.parallel.cluster import Place
from maxlite.parallel.meeting import meet

BRIEF = 2


@pytest.fixture
def address():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(autouse=True)
def nothing_is_logged(caplog):
    yield
    assert not caplog.records, "asyncio tells of forgotten tasks in the log"


@pytest.fixture
def together():
    """Starts `meet` for each place at once; the error of each, or None, once all have ended."""

    def run(places, seconds=60):
        def one(place):
            try:
                meet(place, seconds, said.append)
            except InputError as error:
                return str(error)

        said = []
        with ThreadPoolExecutor(len(places)) as pool:
            return list(pool.map(one, places))

    return run


def places(address, count, source="coordinator_address"):
    return [Place(address, count, index, source) for index in range(count)]


@pytest.mark.parametrize("count", [2, 5, 40])
def test_all_come_in_any_order(address, together, count):
    assert together(places(address, count)[::-1]) == [None] * count


def test_the_missing_are_named_by_all(address, together):
    errors = together([place for place in places(address, 5) if place.index not in (2, 4)], BRIEF)
    assert errors[0] == (
        f"coordinator_address={address}: process 2, 4 of 5 did not come within jax_distributed_initialization_timeout="
        "2 s; start each with the same command and its own process_id"
    )
    assert errors == [errors[0]] * 3


def test_many_missing_are_counted(address, together):
    (error,) = together(places(address, 300, "Slurm step 7.0")[:1], BRIEF)
    assert (
        f"coordinator {address} (Slurm step 7.0): process 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 289 more of 300" in error
    )
    assert "see what they printed, and whether their machines are up" in error


def knock(address, words):
    """Connects, as soon as somebody listens, and says this."""
    host, _, port = address.partition(":")
    deadline = time.monotonic() + 30
    while True:
        try:
            connection = socket.create_connection((host, int(port)))
        except OSError:
            assert time.monotonic() < deadline
        else:
            connection.sendall(words)
            return connection


def test_a_process_that_left_before_all_came_is_missing(address, together):
    with ThreadPoolExecutor(1) as pool:
        host = pool.submit(together, places(address, 3)[:1], 3)
        with knock(address, b'{"index": 1, "count": 3, "who": "killed"}\n') as connection:
            assert b"over" in connection.recv(100), "it is waited with"
        assert "process 1, 2 of 3 did not come" in host.result()[0]


def test_two_that_are_the_same_process(address, together):
    with ThreadPoolExecutor(1) as pool:
        host = pool.submit(together, places(address, 3)[:1], BRIEF)
        with knock(address, b'{"index": 1, "count": 3, "who": "process 7 on earth"}\n'):
            (error,) = together(places(address, 3)[1:2])
            assert "process 2 of 3 did not come" in host.result()[0]
        assert "and process 7 on earth are both process 1; every process has its own number, from 0" in error


def test_processes_that_were_told_of_other_numbers(address, together):
    errors = together([*places(address, 3)[:2], Place(address, 9, 2, "coordinator_address")], BRIEF)
    assert "process 2 was told of 9 processes, process 0 of 3; every process has its own number" in errors[2]
    assert "process 2 of 3 did not come" in errors[0]


def test_strangers_are_not_counted(address, together):
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(together, places(address, 2)[:1])
        words = (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"index": [1], "count": 2, "who": 1}\n', b"\xff\n", b"")
        strangers = [knock(address, said) for said in words]
        (error,) = together(places(address, 2)[1:])
        assert error is None
        assert result.result() == [None]
        for stranger in strangers:
            stranger.close()


def test_process_0_is_not_there(address, together):
    (error,) = together(places(address, 2)[1:], BRIEF)
    assert error == (
        f"coordinator_address={address}: process 0 was not reached within jax_distributed_initialization_timeout=2 s "
        "(Connection refused); is it started, and is this its address?"
    )


def test_an_unknown_host_is_said(together):
    (error,) = together([Place("host.invalid:80", 2, 1, "coordinator_address")], BRIEF)
    assert "coordinator_address=host.invalid:80: process 0 was not reached within" in error


def test_a_port_in_use_is_said(together):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (error,) = together(places(f"127.0.0.1:{listener.getsockname()[1]}", 2)[:1])
    assert "process 0 cannot listen there (Address already in use); is another run using the port?" in error
