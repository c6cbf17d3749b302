"""Exchanges between the processes of a run, each of them a thread here, over a store that behaves as jax's."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from maxlite.checkpoint.errors import PeerError
from maxlite.checkpoint.peers import Peers

LONG = 60.0
LEFT = ["outcome/0", "texts/0", "texts/1"]  # of the newest exchange of two processes


@pytest.fixture
def run(store):
    """`run(part, ...)`: each part is run as one process, given its Peers; what each returned or raised."""
    everyone = []

    def run(*parts):
        everyone.extend(Peers(index, len(parts), store) for index in range(len(everyone), len(parts)))

        def outcome(part, peers):
            try:
                return part(peers)
            except PeerError as error:
                return error

        with ThreadPoolExecutor(len(parts)) as pool:
            return list(pool.map(outcome, parts, everyone))

    return run


def says(text="", topic="save/1/written", **keywords):
    return lambda peers: peers.exchange(topic, text, **{"timeout_seconds": LONG, **keywords})


def test_alone_there_is_nobody_to_wait_for():
    assert Peers().primary
    assert Peers().exchange("any", "text", timeout_seconds=0) == ["text"]
    with pytest.raises(PeerError, match=r"^disk full$"):
        Peers().exchange("any", error="disk full", timeout_seconds=0)


def test_everyone_gets_every_text_by_index(run):
    assert run(*(says(str(index)) for index in range(12))) == [[str(index) for index in range(12)]] * 12
    assert run(*(says("!", topic="agree/1") for _ in range(12))) == [["!"] * 12] * 12


def test_an_error_is_raised_everywhere_at_once_in_that_processs_words(run):
    began = time.monotonic()
    results = run(says(), says(error="disk full"), says())
    assert time.monotonic() - began < LONG / 2
    assert [str(error) for error in results] == ["process 1: disk full", "disk full", "process 1: disk full"]


def test_an_error_does_not_wait_for_those_who_are_late(run):
    began = threading.Event()

    def late(peers):
        assert began.wait(30)  # the others have left
        return says()(peers)

    def first(peers):
        try:
            return says(error="disk full")(peers)
        finally:
            began.set()

    assert [str(error) for error in run(first, late)] == ["disk full", "process 0: disk full"]


def test_of_several_errors_that_are_there_the_first_processs_is_told(store):
    peers = [Peers(index, 4, store) for index in range(4)]
    for index, told in ((2, "third"), (1, "second")):
        with pytest.raises(PeerError, match=f"^{told}$"):
            says(error=told)(peers[index])
    for index in (0, 3):
        with pytest.raises(PeerError, match=r"^process 1: second$"):
            says()(peers[index])


def test_who_does_not_answer_is_named(run):
    results = run(says(timeout_seconds=0), lambda peers: None, lambda peers: None)
    assert str(results[0]) == "process 1, 2 did not answer within 0 s"


def test_given_up_by_another_thread(run):
    abandoned = threading.Event()
    abandoned.set()
    results = run(says(abandoned=abandoned), lambda peers: None)
    assert str(results[0]) == "given up"


def test_spent_keys_are_deleted(run, store):
    for number in range(1, 6):
        run(says(topic=f"save/{number}/written"), says(topic=f"save/{number}/written"))
        assert sorted(store.texts) == [f"maxlite/save/{number}/written/{key}" for key in LEFT]
    run(says(topic="save/6/written", error="disk full"), says(topic="save/6/written"))
    run(says(topic="save/7/written"), says(topic="save/7/written"))
    assert sorted(store.texts) == [f"maxlite/save/7/written/{key}" for key in LEFT]


def test_another_stream_does_not_delete_what_was_not_read_yet(store):
    gate = threading.Event()

    class SlowToReadSaves:
        """The store as a process sees it that is slow to look."""

        key_value_set, key_value_delete = store.key_value_set, store.key_value_delete

        def key_value_dir_get(self, prefix):
            return store.key_value_dir_get(prefix) if gate.is_set() or "/save/" not in prefix else []

    everyone = [Peers(0, 2, store), Peers(1, 2, SlowToReadSaves())]
    with ThreadPoolExecutor(4) as pool:
        saves = [pool.submit(says(), peers) for peers in everyone]
        assert saves[0].result(30) == ["", ""]
        agreed = [pool.submit(says(topic="agree/1"), peers) for peers in everyone]
        assert [future.result(30) for future in agreed] == [["", ""]] * 2
        gate.set()
        assert saves[1].result(30) == ["", ""]
