"""Where processes meet before jax.distributed, so that those that do not come can be named.

jax waits for all of them too, but then ends the process with a dump of the coordination service's internals. So
process 0 first listens at the coordinator's address itself; the others connect, say which they are, and stay. It tells
them every second that it waits, and at the end who is missing. If nobody is, all go on to jax, whose service takes the
address over.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from maxlite.config import InputError
from maxlite.parallel.cluster import Place

RETRY_SECONDS = 0.2
TELL_SECONDS = 1.0
HELLO_SECONDS = 5.0  # for a process that has connected to say which it is
WORD_SECONDS = 10.0  # of silence of process 0, after which it is asked again
SHOWN = 10  # processes named in a message


class _Refused(Exception):
    """Process 0 will not have this process."""


def meet(place: Place, seconds: int, say: Callable[[str], None]) -> None:
    """Returns when all processes have come.

    Args:
        place: which process this is.
        seconds: longest wait (jax_distributed_initialization_timeout).
        say: told by process 0 who is waited for, if that takes more than a moment.

    Raises:
        InputError: not all came in time, which names those; process 0 cannot listen, or was not reached; another
            process says that it is the same one.
    """
    within = f"within jax_distributed_initialization_timeout={seconds} s"
    asyncio.run(_host(place, seconds, within, say) if place.index == 0 else _join(place, seconds, within))


async def _host(place: Place, seconds: int, within: str, say: Callable[[str], None]) -> None:
    present: dict[int, tuple[str, asyncio.StreamWriter]] = {}
    came = asyncio.Event()

    def missing() -> str:
        return _names([index for index in range(1, place.count) if index not in present], place.count)

    async def welcome(connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            hello = json.loads(await asyncio.wait_for(reader.readline(), HELLO_SECONDS))
            index, count, who = hello["index"], hello["count"], str(hello["who"])
            if count != place.count:
                await _tell(
                    writer, refused=f"process {index} was told of {count} processes, process 0 of {place.count}"
                )
            elif index not in range(1, place.count):
                await _tell(writer, refused=f"there is no process {index} of {place.count}")
            elif index in present and present[index][0] != who:
                await _tell(writer, refused=f"{who} and {present[index][0]} are both process {index}")
            else:
                entry = present[index] = (who, writer)
                came.set()
                await reader.read()  # nothing more is said; it returns when the process has left
                if present.get(index) is entry:
                    del present[index]
        except (OSError, ValueError, TypeError, KeyError):
            pass  # not one of ours, or gone
        finally:
            writer.close()

    async def welcome_all(listener: socket.socket) -> None:
        async with asyncio.TaskGroup() as guests:
            while True:
                connection, _ = await loop.sock_accept(listener)
                guests.create_task(welcome(connection))

    loop = asyncio.get_running_loop()
    start, told, said = loop.time(), loop.time(), False
    with _listen(place) as listener:
        door = asyncio.create_task(welcome_all(listener))
        while missing() and loop.time() < start + seconds:
            came.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(came.wait(), TELL_SECONDS)
            if door.done():
                door.result()  # it only ends by an error: too many open files, say
            if loop.time() > told + TELL_SECONDS:
                told = loop.time()
                await _tell_all(present, over=False)
            if not said and missing() and loop.time() > start + WORD_SECONDS:
                said = True
                say(f"waiting at {place.address} for {missing()}")
        left_out = missing()
        await _tell_all(present, over=True, missing=left_out)
        door.cancel()
        await asyncio.wait([door])
    if left_out:
        raise _not_all_came(place, left_out, within)


async def _join(place: Place, seconds: int, within: str) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                reader, writer = await asyncio.open_connection(place.host, place.port)
            # From here on the clock of process 0 counts, or those it waits for would differ from those it has lost.
            missing = await _converse(place, reader, writer)
        except _Refused as refused:
            raise InputError(f"{_where(place)}: {refused}; every process has its own number, from 0") from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            # Process 0 is not there yet, or was started anew, or something else listens there.
            if loop.time() > deadline - RETRY_SECONDS:
                raise InputError(
                    f"{_where(place)}: process 0 was not reached {within} ({_in_words(error)}); is it started, and is "
                    "this its address?"
                ) from error
        else:
            if missing:
                raise _not_all_came(place, missing, within)
            return
        await asyncio.sleep(RETRY_SECONDS)


async def _converse(place: Place, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    """Says who this is, and hears at the end who is missing."""
    try:
        await _tell(writer, index=place.index, count=place.count, who=_who())
        while True:
            word = json.loads(await asyncio.wait_for(reader.readline(), WORD_SECONDS))
            if "refused" in word:
                raise _Refused(word["refused"])
            if word["over"]:
                return str(word["missing"])
    finally:
        writer.close()


def _listen(place: Place) -> socket.socket:
    """At the port of the address, on every network, as jax will. jax crashes where the port is taken."""
    ipv6 = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    try:
        listener = socket.create_server(("", place.port), family=family, dualstack_ipv6=ipv6)
    except OSError as error:
        raise InputError(
            f"{_where(place)}: process 0 cannot listen there ({_in_words(error)}); is another run using the port?"
        ) from error
    listener.setblocking(False)
    return listener


async def _tell(writer: asyncio.StreamWriter, **words: Any) -> None:
    writer.write(json.dumps(words).encode() + b"\n")
    await writer.drain()


async def _tell_all(present: Mapping[int, tuple[str, asyncio.StreamWriter]], **words: Any) -> None:
    writers = [writer for _, writer in present.values()]
    await asyncio.gather(*(_tell(writer, **words) for writer in writers), return_exceptions=True)  # some may be gone


def _not_all_came(place: Place, missing: str, within: str) -> InputError:
    if place.source == "coordinator_address":
        advice = "start each with the same command and its own process_id"
    else:
        advice = "see what they printed, and whether their machines are up"
    return InputError(f"{_where(place)}: {missing} did not come {within}; {advice}")


def _where(place: Place) -> str:
    if place.source == "coordinator_address":
        return f"coordinator_address={place.address}"
    return f"coordinator {place.address} ({place.source})"


def _in_words(error: Exception) -> str:
    """Short: asyncio's own words repeat the address."""
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number) if number is not None and number > 0 else str(error) or "no answer"


def _who() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _names(indices: Sequence[int], count: int) -> str:
    """`process 1, 2 of 4`; empty where there are none."""
    if not indices:
        return ""
    more = f" and {len(indices) - SHOWN} more" if len(indices) > SHOWN else ""
    return f"process {', '.join(map(str, indices[:SHOWN]))}{more} of {count}"
