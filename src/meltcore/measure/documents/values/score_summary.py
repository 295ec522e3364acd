"""Computes totals of a GPU score, and judges its sustained window by utilization, temperature and stability."""

from __future__ import annotations

from collections.abc import Sequence

from meltcore.measure.documents.score import ANY_KERNEL, SM_ACTIVE, GpuScore, Score, Totals, WindowExpectation
from meltcore.measure.documents.values.formatting import format_number
from meltcore.measure.documents.verdicts import CheckVerdict

MIN_SM_ACTIVE_PERCENT = 90.0
TEMPERATURE_LIMIT_C = 85.0
# The standard deviation of the rates of intervals of 10 s, as a fraction of their mean.
VARIATION_LIMIT = 0.05


def totals(score: Score) -> Totals:
    """Return the sums over all counted windows of all devices."""
    windows = [level for device in score.devices for level in device.levels]
    sustained = [device.sustained for device in score.devices if device.sustained is not None]
    counted_levels = [*windows, *sustained]
    return Totals(
        generations=sum(level.finished for level in counted_levels),
        sustained_generations=sum(level.finished for level in sustained),
        prompt_tokens=sum(level.prompt_tokens for level in counted_levels),
        output_tokens=sum(level.output_tokens for level in counted_levels),
    )


def totals_line(sums: Totals) -> str:
    """Format totals as one sentence."""
    return (
        f"Generations: {sums.generations:,} completed requests ({sums.sustained_generations:,} in the sustained "
        f"window), {sums.prompt_tokens:,} prompt tokens and {sums.output_tokens:,} output tokens in all counted "
        "windows."
    )


def expectations(score: Score) -> list[WindowExpectation]:
    """Judge the three expectations, each by the device with the worst value.

    An expectation is NOT MEASURED if a device lacks the value and no device fails. The expectations change neither the
    score nor the health verdict.
    """
    return [_judge_utilization(score.devices), _judge_temperature(score.devices), _judge_stability(score.devices)]


def _judge_utilization(devices: Sequence[GpuScore]) -> WindowExpectation:
    sm_active = [_sustained_mean(device, SM_ACTIVE) for device in devices]
    measured = [value for value in sm_active if value is not None]
    observed_text = f"{min(measured):.1f} %" if measured else "not measured"
    nvml_utilization = [value for device in devices if (value := _sustained_mean(device, ANY_KERNEL)) is not None]
    if nvml_utilization:
        observed_text += f" (NVML GPU utilization {format_number(min(nvml_utilization))} %, which is not judged)"
    return WindowExpectation(
        name="utilization",
        expected=f"above {MIN_SM_ACTIVE_PERCENT:g} %",
        seen=observed_text,
        verdict=_verdict([None if value is None else value > MIN_SM_ACTIVE_PERCENT for value in sm_active]),
        rule="mean SM activity (GPM) of the sustained window",
    )


def _judge_temperature(devices: Sequence[GpuScore]) -> WindowExpectation:
    temperatures_c = [_highest_temperature_c(device) for device in devices]
    measured = [value for value in temperatures_c if value is not None]
    return WindowExpectation(
        name="temperature",
        expected=f"below {TEMPERATURE_LIMIT_C:g} °C",
        seen=f"{max(measured):g} °C" if measured else "not measured",
        verdict=_verdict([None if value is None else value < TEMPERATURE_LIMIT_C for value in temperatures_c]),
        rule="highest GPU temperature of the sustained window",
    )


def _judge_stability(devices: Sequence[GpuScore]) -> WindowExpectation:
    spreads = [device.spread if device.sustained is not None else None for device in devices]
    measured = [spread for spread in spreads if spread is not None and spread.change is not None]
    observed_text = "not measured"
    if measured:
        change = min(spread.change for spread in measured if spread.change is not None)
        observed_text = (
            f"varies by {100 * max(spread.variation for spread in measured):.1f} %, last third {100 * change:+.1f} %"
        )
    elif any(spreads):
        observed_text = "not measured: the sustained window is too short for a trend"
    return WindowExpectation(
        name="throughput",
        expected="stable",
        seen=observed_text,
        verdict=_verdict(
            [
                None
                if spread is None or spread.change is None
                else spread.variation <= VARIATION_LIMIT and not spread.drifts
                for spread in spreads
            ]
        ),
        rule=f"rates of intervals of 10 s in the sustained window: standard deviation at most "
        f"{100 * VARIATION_LIMIT:g} % of the mean, last third at most 3 % below the first",
    )


def _verdict(outcomes: Sequence[bool | None]) -> CheckVerdict:
    return "FAIL" if False in outcomes else "NOT MEASURED" if None in outcomes or not outcomes else "PASS"


def _sustained_mean(device: GpuScore, key: str) -> float | None:
    return None if device.sustained is None else device.mean_utilization(device.sustained, key)


def _highest_temperature_c(device: GpuScore) -> float | None:
    if device.health is None or device.sustained is None:
        return None
    return next((row.maximum for row in device.health.metrics if row.key == "temperature_c"), None)
