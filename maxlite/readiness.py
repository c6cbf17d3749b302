"""What preflight makes of what the processes found: each check's verdict, and what to do where it is a bad one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from maxlite.checkpoint.capacity import most_kept, most_that_fit, room_bytes
from maxlite.checkpoint.stats import in_bytes
from maxlite.checkpoint.trial import Room
from maxlite.config import CheckpointConfig
from maxlite.telemetry.console import duration

Status = Literal["ok", "note", "FAIL", "skipped"]
Finding = Mapping[str, Any]  # what a process found, as JSON

CLOCK_SKEW_SECONDS = 5.0  # ages of checkpoints, logs and access tokens are compared between machines
SHOWN = 5  # processes named in a line


class Check(NamedTuple):
    """One line of the page. `advice`: what to do."""

    name: str
    status: Status
    text: str
    advice: str = ""

    def lines(self) -> list[str]:
        """For people."""
        indented = "\n" + " " * 20
        lines = [f"{self.status:<8}{self.name:<12}{self.text.replace(chr(10), indented)}"]
        return [*lines, f"{'':20}-> {self.advice.replace(chr(10), indented)}"] if self.advice else lines


class Clock(NamedTuple):
    """A process's time, between two looks of process 0 at its own; seconds since 1970."""

    before: float
    there: float
    after: float

    @property
    def skew(self) -> float:
        """How far it is off for certain, in seconds; negative: it is behind."""
        return self.there - min(max(self.there, self.before), self.after)


def check_errors(name: str, found: Sequence[Finding], advice: str = "") -> Check | None:
    """A failed check that names the processes whose finding has an `error`; None if there is none."""
    errors: dict[str, list[int]] = {}
    for index, finding in enumerate(found):
        if finding.get("error"):
            errors.setdefault(finding["error"], []).append(index)
    if not errors:
        return None
    if len(found) == 1:
        return Check(name, "FAIL", next(iter(errors)), advice)
    return Check(name, "FAIL", "\n".join(f"{_processes(at, found)}: {error}" for error, at in errors.items()), advice)


def check_versions(found: Sequence[Finding]) -> Check:
    """The same packages everywhere."""
    shown = ", ".join(f"{name} {number}" for name, number in found[0]["versions"].items() if number)
    differing = _differing(found, lambda finding: finding["versions"])
    if not differing:
        return Check("versions", "ok", shown + (", the same everywhere" if len(found) > 1 else ""))
    advice = "install the same versions on every machine: what one saves or compiles another may not read"
    return Check("versions", "FAIL", "\n".join(differing), advice)


def check_config(found: Sequence[Finding]) -> Check | None:
    """The same config everywhere; None where there is nothing to compare."""
    if len(found) == 1:
        return None
    differing = _differing(found, lambda finding: finding["config"])
    if differing:
        return Check("config", "FAIL", "\n".join(differing), "start every process with the same file and key=value")
    return Check("config", "ok", "the same everywhere")


def check_clocks(clocks: Sequence[Clock], found: Sequence[Finding]) -> Check | None:
    """The same time everywhere; None where there is nothing to compare."""
    if len(clocks) == 1:
        return None
    skews = [clock.skew for clock in clocks]
    off = [index for index, skew in enumerate(skews) if abs(skew) > CLOCK_SKEW_SECONDS]
    if not off:
        within = max(max(map(abs, skews)), max(clock.after - clock.before for clock in clocks))
        return Check("clocks", "ok", f"no more than {within:.1f} s apart")
    shown = "; ".join(f"process {index} on {found[index]['host']} {skews[index]:+.1f} s" for index in off[:SHOWN])
    return Check("clocks", "FAIL", f"off from process 0's: {shown}", "set them by NTP (chrony, systemd-timesyncd)")


def check_data(found: Sequence[Finding]) -> Check:
    """The first batch is there everywhere, of the same data."""
    advice = "every process needs to read text_files and to write data_cache_directory"
    if failed := check_errors("data", found, advice):
        return failed
    differing = _differing(found, lambda finding: {"data fingerprint": finding["fingerprint"]})
    if differing:
        return Check("data", "FAIL", "\n".join(differing), "text_files must name the same files on every machine")
    slowest = max(finding["seconds"] for finding in found)
    return Check("data", "ok", f"{found[0]['data'].removeprefix('data: ')}\nfirst batch after {slowest:.1f} s")


def check_directory(directory: str, found: Sequence[Finding]) -> Check:
    """All processes see it and write to it."""
    advice = "base_output_directory must be one directory that all processes share and may write to"
    if failed := check_errors("directory", found, advice):
        return failed
    by = "seen and written by all processes" if len(found) > 1 else "can be written"
    return Check("directory", "ok", f"{directory}: {by}")


class Speed(NamedTuple):
    """Of all processes together, in bytes a second."""

    write: float
    read: float

    def numbers(self, state_bytes: int) -> dict[str, float]:
        """For programs: the speeds, and what they make of a state of so many bytes."""
        return {
            "write_bytes_per_second": self.write,
            "read_bytes_per_second": self.read,
            "save_seconds": state_bytes / self.write,
            "restore_seconds": state_bytes / self.read,
        }

    @classmethod
    def of(cls, found: Sequence[Finding]) -> Speed:
        """What they did at the same time, until the last one was done."""

        def together(way: str) -> float:
            seconds = max(finding[way]["seconds"] for finding in found)
            return sum(finding[way]["bytes"] for finding in found) / max(seconds, 1e-9)

        return cls(together("write"), together("read"))


def check_speed(speed: Speed, state_bytes: int, config: CheckpointConfig) -> Check:
    """A save is done before it is given up."""
    save, restore = state_bytes / speed.write, state_bytes / speed.read
    text = (
        f"writes {in_bytes(speed.write)}/s, reads {in_bytes(speed.read)}/s; the train state is {in_bytes(state_bytes)}"
        f"\na save takes at least {_seconds(save)}, the shortest interval of continuous saves; a restore "
        f"{_seconds(restore)}"
    )
    if save > config.checkpoint_timeout_seconds:
        return Check(
            "speed",
            "FAIL",
            text,
            f"every save would be given up after checkpoint_timeout_seconds={config.checkpoint_timeout_seconds:g}: "
            "use faster storage, or set it higher",
        )
    if save > config.preemption_grace_seconds:
        return Check(
            "speed",
            "note",
            text,
            f"after a signal a save does not end within preemption_grace_seconds={config.preemption_grace_seconds:g}: "
            "a preemption costs the steps since the last one; set it higher where the machines give more time",
        )
    return Check("speed", "ok", text)


def check_room(room: Room, state_bytes: int, config: CheckpointConfig, steps: int) -> Check:
    """The checkpoints that a run of so many steps keeps have room; `state_bytes`: of one."""
    needed, kept = room_bytes(config, steps, state_bytes), most_kept(config, steps)
    text = f"{kept} checkpoints kept and one being written: {in_bytes(needed)}"
    if room.free is None:
        return Check("room", "ok", text)
    own = f", and this run's checkpoints: {in_bytes(room.own)}" if room.own else ""
    text, there = f"{text}; free: {in_bytes(room.free)}{own}", room.free + room.own
    if needed <= there:
        return Check("room", "ok", text)
    fit = most_that_fit(config, steps, state_bytes, there)
    less = f"set max_num_checkpoints_to_keep={fit}" if fit else "use other storage"
    return Check("room", "FAIL", text, f"free {in_bytes(needed - there)}, or {less}")


def _differing(found: Sequence[Finding], values: Callable[[Finding], Mapping[str, object]]) -> list[str]:
    """One line for each name whose value is not process 0's everywhere."""
    lines, first = [], values(found[0])
    for name in dict.fromkeys(name for finding in found for name in values(finding)):
        others: dict[str, list[int]] = {}
        for index, finding in enumerate(found):
            if values(finding).get(name) != first.get(name):
                others.setdefault(_shown(values(finding).get(name)), []).append(index)
        if others:
            there = "; ".join(f"{value} on {_processes(at, found)}" for value, at in others.items())
            lines.append(f"{name}: {_shown(first.get(name))} on process 0 ({found[0]['host']}); {there}")
    return lines


def _processes(at: Sequence[int], found: Sequence[Finding]) -> str:
    named = ", ".join(f"{index} ({found[index]['host']})" for index in at[:SHOWN])
    return f"process {named}" + (f" and {len(at) - SHOWN} more" if len(at) > SHOWN else "")


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


def _seconds(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds:.2g} s"
