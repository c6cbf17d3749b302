"""The page that `python -m maxlite.compile` prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from maxlite.checkpoint.stats import in_bytes

if TYPE_CHECKING:
    from maxlite.compile_report import Report

HBM_LINES = (
    ("parameters", "parameters"),
    ("optimizer", "optimizer"),
    ("gradients", "gradients"),
    ("activations", "activations and other temporaries"),
    ("program_and_outputs", "program and outputs"),
    ("total", "total"),
    ("capacity", "capacity"),
)


def page(report: Report) -> str:
    """The report as text, every number with its unit."""
    topology, model, hbm = report.topology, report.model, report.hbm
    lines = [
        f"{topology['slices']} x {topology['name']} ({topology['shape']}): {topology['mesh']}",
        f"{model['parameters']:,} parameters; {model['global_batch_size']:,} sequences of "
        f"{model['max_target_length']:,} tokens in a step, {model['tokens']:,} tokens",
        f"compiled in {report.compile_seconds:.0f} s by "
        + ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        "",
        "memory of each device",
        *_table((words, in_bytes(hbm[key])) for key, words in HBM_LINES),
        _verdict(report),
    ]
    if report.roofline is not None:
        lines += ["", *_work(report), "", *_collectives(report), "", *_roofline(report)]
    lines += ["", *_checkpoint(report)]
    return "\n".join(lines)


def _table(rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"  {words:<40}{value:>14}" for words, value in rows]


def _verdict(report: Report) -> str:
    total, capacity = report.hbm["total"], report.hbm["capacity"]
    if report.fits:
        return f"  fits, {in_bytes(capacity - total)} free ({1 - total / capacity:.0%})"
    over = f"  DOES NOT FIT, {in_bytes(max(0, total - capacity))} too much"
    if report.fix is None:
        return f"{over}; no change that was tried makes it fit"
    keys = " ".join(f"{key}={value}" for key, value in report.fix["keys"].items())
    return f"{over}; it fits with {keys} ({in_bytes(report.fix['total'])}, compiled)"


def _work(report: Report) -> list[str]:
    assert report.flops is not None
    assert report.bytes_accessed is not None
    assert report.hbm_traffic is not None
    assert report.recompute_share is not None
    lines = [
        "work of each device in a step",
        *_table(
            [
                ("FLOPs by the model's formula", f"{report.model_flops / 1e12:,.1f} TFLOP"),
                ("FLOPs of the compiled step", f"{report.flops / 1e12:,.1f} TFLOP"),
                ("of these computed again", f"{report.recompute_share:.1%}"),
                ("memory read and written", in_bytes(report.hbm_traffic)),
                ("the same, loops counted once", in_bytes(report.bytes_accessed)),
            ]
        ),
    ]
    if report.uncounted_loops:
        lines.append(f"  loops counted once, their rounds unknown: {', '.join(report.uncounted_loops)}")
    return lines


def _collectives(report: Report) -> list[str]:
    lines = [f"  {'exchange':<23}{'axis':<14}{'devices':>8}  {'network':<8}{'count':>8}{'bytes a device':>17}"]
    for each in report.collectives or []:
        kind = each.kind + (" (scalars)" if each.scalar else "")
        who = f"{kind:<23}{each.axis:<14}{each.devices:>8}  {each.network:<8}"
        lines.append(f"  {who}{each.count:>8,}{in_bytes(each.bytes):>17}")
    return ["exchanges in a step", *lines]


def _roofline(report: Report) -> list[str]:
    roofline, chip = report.roofline, report.topology["chip"]
    assert roofline is not None
    names = {"compute": "matrix products", "hbm": "memory", "ici": "ICI", "dcn": "DCN"}
    speeds = {
        "compute": f"{chip['bf16_tflops']:,.0f} TFLOP/s",
        "hbm": f"{chip['hbm_gb_per_second']:,.0f} GB/s",
        "ici": f"{chip['ici_gb_per_second'] or 0:,.0f} GB/s",
        "dcn": f"{chip['dcn_gb_per_second'] or 0:g} GB/s",
    }
    rows = [
        (f"{words}, at {speeds[key]} a chip", f"{roofline[key]:.3f} s")
        for key, words in names.items()
        if key in roofline
    ]
    return [
        f"least time of a step, by the peak figures of {chip['name']} ({chip['source']})",
        *_table(rows),
        f"  a step takes at least {roofline['step']:.2f} s; MFU (share of the peak by the model's FLOPs) "
        f"at most {roofline['mfu']:.1%}",
    ]


def _checkpoint(report: Report) -> list[str]:
    saved = report.checkpoint
    lines = [
        f"checkpoint: {in_bytes(saved['bytes'])}, {in_bytes(saved['bytes_per_host'])} from each of "
        f"{saved['hosts']:,} hosts",
        f"  at {saved['gb_per_second_per_host']:g} GB/s a host a save takes {saved['save_seconds']:.1f} s",
    ]
    if "shortest_interval_steps" in saved:
        lines[-1] += f", so continuous saves are at least {saved['shortest_interval_steps']:,} steps apart"
    return lines
