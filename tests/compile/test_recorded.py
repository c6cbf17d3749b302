"""What benchmarks/tpu_compile.py recorded: the large presets fit, and the page that a person reads of them."""

import json
from pathlib import Path

import pytest

from maxlite.compile_report import Report
from maxlite.parallel.collectives import Collective

RECORDED = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "tpu_compile.json").read_text())
LARGE = "llama3.1-70b on 2 x v5p-128"


def report_of(case):
    fields = {key: value for key, value in RECORDED[case].items() if key not in ("command", "machine")}
    return Report(**{**fields, "collectives": [Collective(**each) for each in fields["collectives"]]})


@pytest.mark.parametrize("case", RECORDED)
def test_every_preset_fits(case):
    assert report_of(case).fits
    assert RECORDED[case]["versions"]["libtpu"]


def test_70b_takes_less_than_maxtext_on_the_same_compiler():
    hbm = RECORDED[LARGE]["hbm"]
    assert hbm["arguments"] < 13.3e9
    assert hbm["temporaries"] < 40.3e9
    assert RECORDED[LARGE]["bytes_accessed"] < 248e9


@pytest.mark.parametrize("case", RECORDED)
def test_between_slices_goes_the_gradient_and_nothing_else(case):
    report = report_of(case)
    between = [each for each in report.collectives if each.network == "DCN"]
    assert bool(between) == (report.topology["slices"] > 1)
    if between:
        assert {each.kind for each in between} == {"all-reduce"}
        gradients = sum(each.bytes for each in between if not each.scalar)
        assert gradients == pytest.approx(report.hbm["parameters"], rel=0.01)


@pytest.mark.parametrize("case", RECORDED)
def test_the_page_says_what_json_says(case):
    report = report_of(case)
    page = report.text()
    assert f"{report.hbm['total'] / 1e9:.1f} GB" in page
    assert f"{report.model['parameters']:,} parameters" in page
    assert f"fits, {(report.hbm['capacity'] - report.hbm['total']) / 1e9:.1f} GB free" in page
    assert f"at least {report.roofline['step']:.2f} s" in page
    assert f"{report.checkpoint['shortest_interval_steps']:,} steps apart" in page
    assert max(map(len, page.splitlines())) < 120


def test_a_step_that_does_not_fit_is_said_with_what_would():
    report = report_of(LARGE)
    small = {**report.hbm, "capacity": report.hbm["total"] - 10**9}
    fields = {**report.__dict__, "fits": False, "hbm": small}
    assert "DOES NOT FIT, 1.00 GB too much; no change" in Report(**fields).text()
    fix = {"keys": {"loss_chunk_size": 1024}, "total": 2 * 10**9}
    assert "it fits with loss_chunk_size=1024 (2.00 GB, compiled)" in Report(**{**fields, "fix": fix}).text()
