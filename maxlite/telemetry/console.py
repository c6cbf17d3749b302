"""The screen: lines on standard output, and on a terminal a progress bar below them on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm


class Console:
    """Prints lines; with `start`, shows how far the run is and how long it will take.

    A reader that is gone (`| head`) or a full disk behind standard output ends the printing, never the training.
    With `silent`, for all processes of a run but one, it shows nothing.
    """

    def __init__(self, silent: bool = False) -> None:
        self._silent = silent
        self._bar: tqdm | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def start(self, step: int, last_step: int) -> None:
        """Shows the progress bar, if standard error is a terminal."""
        disable = self._silent or None  # None: where standard error is no terminal
        self._bar = tqdm(initial=step, total=last_step, unit="step", dynamic_ncols=True, leave=False, disable=disable)

    @property
    def shows_bar(self) -> bool:
        """Whether there is a progress bar, which says how much time is left."""
        return self._bar is not None and not self._bar.disable

    def progress(self, step: int) -> None:
        """Moves the bar to `step`."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def line(self, text: str) -> None:
        """Prints a line above the bar; flushed, since a log is read while the run goes on."""
        if self._silent:
            return
        try:
            if self.shows_bar:
                tqdm.write(text, file=sys.stdout)
                sys.stdout.flush()
            else:
                print(text, flush=True)
        except OSError:
            # There is nobody left to tell. What is still in the buffer must have somewhere to go at exit.
            with Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())

    def lines(self, *texts: str | Sequence[str]) -> None:
        """Prints each text, or each of its lines."""
        for text in texts:
            for line in [text] if isinstance(text, str) else text:
                self.line(line)


def duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 07 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def step_line(record: Mapping[str, Any], last_step: int, seconds_left: float | None) -> str:
    """One logged step for a person to read."""
    peak = f" ({record['peak_share']:.0%} of peak)" if "peak_share" in record else ""
    left = "" if seconds_left is None else f"  left {duration(seconds_left)}"
    return (
        f"step {record['step']}/{last_step}  loss {record['loss']:.4f}  lr {record['learning_rate']:.2e}  "
        f"grad norm {record['grad_norm']:.2f}  {record['step_seconds']:.3f} s/step  "
        f"{record['tokens_per_second']:,.0f} tokens/s  {record['tflops_per_device']:.3f} TFLOP/s/device{peak}  "
        f"at risk {record['work_at_risk_seconds']:.1f} s{left}"
    )
