"""The load on a fleet: what each model gets, refusals that are obeyed, interference, health, result and page."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from task_server import serve_tasks

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.common.files import write_document
from meltcore.measure.documents.fingerprint import take_fingerprint
from meltcore.measure.documents.schema import (
    CheckResult,
    Distribution,
    FleetExperiment,
    FleetLevel,
    FleetLoad,
    LevelResult,
    ModelUnderLoad,
    SimulatedStream,
    StreamLoad,
)
from meltcore.measure.documents.step_costs import GpuStepCosts, StepCosts
from meltcore.measure.documents.verdicts import MEANINGS, CheckVerdict, Verdict
from meltcore.measure.load.config import IntRange, Timeouts
from meltcore.measure.load.fleet.fleet_config import (
    DEFAULT_MIX,
    FleetLoadConfig,
    parse_mix,
    shares_of,
    split_connections,
)
from meltcore.measure.load.fleet.fleet_gates import (
    ExperimentSpec,
    StreamSpec,
    choose_models,
    experiment_gates,
    fleet_health,
    load_experiment,
    make_experiment,
)
from meltcore.measure.load.fleet.fleet_run import judge, measure_fleet
from meltcore.measure.load.fleet.fleet_streams import NUM_WARMUPS, FleetLevels, Stream
from meltcore.measure.load.fleet.step_costs import StepCostsFile, read_step_costs
from meltcore.measure.load.record import RecordFile
from meltcore.measure.load.run.streams import LevelStream, StreamRunner
from meltcore.measure.load.tasks.task import ServedModel, Sizes, tasks
from meltcore.measure.load.wire.connection import resolve_target
from meltcore.measure.report.load.fleet_load import fleet_load_page
from meltcore.measure.report.page.html import render_html

SIZES = Sizes(input_len=IntRange(128, 1024), output_len=IntRange(128, 128), clip_s=IntRange(5, 15))
CARDS = [
    {"id": "gemma-3", "max_model_len": 8192, "vocab_size": 262_144, "weights": "dummy"},
    {"id": "chat", "root": "gemma-3", "max_model_len": 8192},
    {"id": "mt", "task": "translation", "source_languages": ["eng_Latn", "guj_Gujr"], "target_languages": ["guj_Gujr"],
     "device": "CPU", "priority": "standard"},
    {"id": "ears", "task": "transcription", "languages": ["en"], "device": "CPU"},
    {"id": "voice", "task": "synthesis", "languages": ["kn"], "device": "CPU"},
]  # fmt: skip


def default_workload(model: ServedModel, sizes: Sizes) -> str:
    return tasks()[model.task].default_workload(model, sizes)


def model(name: str, task: Any = "generation", **card: Any) -> ServedModel:
    return ServedModel(name=name, task=task, card=card)


def level(p95_ms: float, rate: float = 10.0, n: int = 1000, **changes: Any) -> LevelResult:
    latency = Distribution(n=n, p50=p95_ms / 2, p95=p95_ms if n >= 130 else None, p99=p95_ms * 2 if n >= 662 else None)
    fields = {"requests": n, "succeeded": n, "failed": 0, "ttft_ms": latency, "e2e_ms": latency} | changes
    return LevelResult(
        concurrency=8,
        peak_in_flight=8,
        duration_s=10.0,
        output_tokens_per_s=rate,
        total_tokens_per_s=rate,
        prompt_tokens=1,
        output_tokens=1,
        **fields,
    )


def load(name: str, result: LevelResult, **fields: Any) -> StreamLoad:
    return StreamLoad(name=name, model=name, level=result, **fields)


@pytest.mark.parametrize("total", [3, 10, 100, 10_000])
def test_connections_are_split_by_share_with_one_for_each_model(total: int) -> None:
    models = [
        model("a"),
        model("b"),
        model("mt", "translation"),
        model("asr", "transcription"),
        model("v", "synthesis"),
    ]
    shares = shares_of(models, DEFAULT_MIX)
    assert shares == pytest.approx([0.35, 0.35, 0.15, 0.12, 0.03])
    counts = split_connections(total, shares)
    assert sum(counts) == total
    assert total < 5 or min(counts) >= 1
    assert all(abs(count - share * total) <= 1 for count, share in zip(counts, shares, strict=True))
    # A task without a model leaves its share to the others.
    assert shares_of(models[:3], DEFAULT_MIX) == pytest.approx([35 / 85, 35 / 85, 15 / 85])


@pytest.mark.parametrize("mix", ["generation", "chat=70", "generation=1,generation=2", "generation=x"])
def test_invalid_mix_is_refused(mix: str) -> None:
    with pytest.raises(ConfigError, match="--mix"):
        parse_mix(mix)


def test_workload_follows_the_card() -> None:
    gpu: dict[str, Any] = {"max_model_len": 8192, "vocab_size": 150_000, "device": "NVIDIA H200"}
    assert default_workload(model("a", **gpu), SIZES) == "random:in=128-1024,out=128"
    assert default_workload(model("a", **gpu | {"vocab_size": 512}), SIZES) == "random:in=128-1024,out=128,vocab=512"
    assert default_workload(model("a", device="CPU", max_model_len=256, weights="real"), SIZES) == "problems:short"
    bundled = replace(model("sums", **gpu | {"weights": "real"}), is_bundled=True)
    assert default_workload(bundled, SIZES) == "problems:short"
    with pytest.raises(ConfigError, match="a has a context of 1024 tokens, and a request has up to 1152"):
        default_workload(model("a", **gpu | {"max_model_len": 1024}), SIZES)
    card = {"source_languages": ["hin_Deva", "kan_Knda"], "target_languages": ["eng_Latn"]}
    assert (
        default_workload(model("t", "translation", **card), SIZES) == "translate:src=kan_Knda,tgt=eng_Latn,words=8-40"
    )
    assert default_workload(model("r", "transcription", languages=["en"]), SIZES).startswith("transcribe:language=en,")
    assert default_workload(model("s", "synthesis", languages=["kn"]), SIZES).startswith("speak:language=kan_Knda,")


@pytest.mark.slow
def test_every_model_gets_its_requests_and_the_result_has_all_parts(tmp_path: Path) -> None:
    options = [
        "--levels",
        "4,8",
        "--level-duration",
        "0.3",
        "--interference-duration",
        "0.2",
        "--pair-connections",
        "2",
    ]
    with serve_tasks(models=CARDS, delay_s=0.02) as server:
        assert main(["load", server.url, "--fleet", *options, "--out", str(tmp_path)]) == 0
        received = Counter(str(each["model"].decode() if "file" in each else each["model"]) for each in server.received)
    [folder] = tmp_path.iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert (result["document"], result["status"]) == ("fleet-load", "complete")
    assert result["verdict"] in ("OK", "CLIENT_BOUND"), "a busy machine may slow the client"
    assert [entry["name"] for entry in result["models"]] == ["gemma-3", "mt", "ears", "voice"], "no alias"
    assert sorted(received) == ["ears", "gemma-3", "mt", "voice"]
    assert len(result["interference"]) == 4 * 3
    assert len((folder / "levels.jsonl").read_text().splitlines()) == 4 * 2 + 2 + 4 + 12
    mixed = [each for each in result["levels"] if each["part"] == "mixed"]
    assert [[stream["level"]["concurrency"] for stream in each["streams"]] for each in mixed] == [
        [1, 1, 1, 1],
        [5, 1, 1, 1],
    ]
    for each in result["levels"]:
        assert 0.2 <= each["duration_s"] < 20
        assert (
            each["peak_in_flight"] == each["connections"] == sum(s["level"]["peak_in_flight"] for s in each["streams"])
        )
        for stream in each["streams"]:
            assert stream["level"]["succeeded"] == stream["level"]["requests"] >= stream["level"]["concurrency"]
    sent = [sum(stream["level"]["requests"] for stream in each["streams"]) for each in result["levels"]]
    assert sum(sent) > sum(each["connections"] for each in result["levels"]), "connections send until the time is over"
    counted = sum(int(gate["detail"].split()[0].replace(",", "")) for gate in result["health"][:-1])
    assert counted == sum(received.values()) - 4 * 4, "all but the warm-up"
    assert {gate["status"] for gate in result["health"]} == {"PASS"}
    page = (folder / "report.html").read_text()
    (folder / "report.html").unlink()
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text() == page
    assert page.count("<svg") >= 8


@pytest.mark.slow
def test_refused_requests_are_sent_again_when_the_server_says() -> None:
    with serve_tasks(models=CARDS[2:3], refuse=(5, 6, 7), retry_after="1") as server:
        result = measure_fleet(config(server.url), [])
    [stream] = result.levels[0].streams
    # Behind the warm-up one request is refused, and once more after its second.
    assert (stream.refused, stream.refusals, stream.lost) == (2, 3, 0)
    assert result.verdict in ("OK", "CLIENT_BOUND"), "a busy machine may slow the client"
    assert (stream.level.e2e_ms.max or 0) >= 2000, "latency counts from the first try"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behavior", "timeout_s", "failure"),
    [
        ({"status": 429}, 30.0, "http 429: the queue is full"),
        ({"refuse": range(1, 10**6), "retry_after": "1"}, 1.5, "http 429: the queue is full"),
        ({"refuse": range(1, 10**6), "retry_after": "soon"}, 30.0, "http 429: the queue is full"),
    ],
)
def test_refusals_without_an_answer_in_the_end_are_lost(
    behavior: dict[str, Any], timeout_s: float, failure: str
) -> None:
    with serve_tasks(models=CARDS[2:3], **behavior) as server:
        result = measure_fleet(config(server.url, timeouts=Timeouts(total_s=timeout_s)), [])
    [stream] = result.levels[0].streams
    assert stream.lost == stream.level.requests > 0
    assert list(stream.level.failures) == [failure]
    assert result.verdict == "FAILED"
    assert [gate.status for gate in result.health] == ["FAIL", "FAIL"]
    assert stream.refusals == (stream.refused if timeout_s == 1.5 else 0)


def published_experiment() -> ExperimentSpec:
    return load_experiment(str(ROOT / "benchmarks" / "interference.yaml"))


def config(url: str, **fields: Any) -> FleetLoadConfig:
    return FleetLoadConfig(url=url, **{"parts": ("mixed",), "levels": (2,), "level_s": 0.2, **fields})


@pytest.mark.parametrize(
    ("p95_ms", "rate", "statuses"),
    [
        (200.0, 8.5, ["PASS", "PASS", "PASS", "PASS"]),
        (201.0, 8.5, ["FAIL", "PASS", "PASS", "PASS"]),
        (200.0, 8.4, ["PASS", "PASS", "FAIL", "PASS"]),
    ],
)
def test_experiment_fails_beyond_its_limits(p95_ms: float, rate: float, statuses: list[str]) -> None:
    spec = ExperimentSpec(
        name="x",
        streams=[
            StreamSpec(name="speech", task="transcription", rate=2, max_p95_ratio={"e2e": 2}),
            StreamSpec(name="busy", task="generation", concurrency=8, min_throughput_ratio=0.85),
        ],
    )
    alone = [load("asr", level(100.0)), load("qwen", level(100.0, rate=10.0))]
    together = [load("asr", level(p95_ms)), load("qwen", level(900.0, rate=rate))]
    gates = experiment_gates(spec, alone, together)
    assert [gate.status for gate in gates] == statuses
    assert "limit 2; p99 200 ms (n 1,000)" in gates[0].detail
    few = experiment_gates(spec, alone, [load("asr", level(100.0, n=60)), together[1]])
    assert (few[0].status, few[0].detail) == ("NOT RUN", "1000, 60 samples, p95 needs 130")
    lost = experiment_gates(spec, alone, [load("asr", level(100.0, failed=1)), together[1]])
    assert lost[1].status == "FAIL"


@pytest.mark.parametrize(
    ("p95_ms", "rate", "num_alone", "statuses"),
    [
        (300.0, 4.7, 1000, ["PASS", "PASS"]),
        (301.0, 4.7, 1000, ["FAIL", "PASS"]),
        (300.0, 4.5, 1000, ["PASS", "FAIL"]),
        (300.0, 4.7, 199, ["NOT RUN", "PASS"]),
    ],
)
def test_limits_beside_the_simulation_are_judged_in_one_run(
    p95_ms: float, rate: float, num_alone: int, statuses: list[str]
) -> None:
    """Half of the throughput alone and a p95 of 200 ms are simulated; 92 % of the one and 1.5 times the other hold."""
    published = published_experiment().streams
    spec = ExperimentSpec(name="x", streams=[published[1], published[0]])
    alone = [load("asr", level(100.0, n=num_alone)), load("qwen", level(100.0, rate=10.0))]
    together = [load("asr", level(p95_ms)), load("qwen", level(900.0, rate=rate))]
    latency = Distribution(n=1000, p50=150.0, p95=200.0)
    own = [each.level for each in alone]

    def simulated(off: float) -> list[SimulatedStream]:
        """Streams whose simulated p95 alone is `off` times the measured one."""
        return [
            SimulatedStream(
                first_ms=latency,
                e2e_ms=latency,
                throughput_ratio=ratio,
                alone_e2e_ms=Distribution(n=1000, p50=measured.e2e_ms.p50, p95=off * measured.e2e_ms.p95),
                alone_requests_per_s=measured.succeeded / measured.duration_s,
                alone_busy_s=1.0,
            )
            for ratio, measured in zip((None, 0.5), own, strict=True)
        ]

    ideal = simulated(1.14)
    gates = experiment_gates(spec, alone, together, ideal)
    assert [gates[0].status, gates[2].status] == statuses
    if num_alone == 1000:
        assert gates[0].detail == f"{p95_ms:.0f} ms together, 200 ms simulated: {p95_ms / 200:.2f} times, limit 1.5"
        assert f"{10 * rate:.0f} % of alone, 50 % simulated" in gates[2].detail
    else:
        assert gates[0].detail == "199 samples alone, 1000 together, 200 needed"
    unknown = experiment_gates(spec, alone, together)
    assert [unknown[0].status, unknown[2].status] == ["NOT RUN", "NOT RUN"], "no simulation passes nothing"
    assert "--step-costs" in unknown[2].detail
    for off in (0.8, 1.2):
        missed = experiment_gates(spec, alone, together, simulated(off))
        assert [missed[0].status, missed[2].status] == ["NOT RUN", "NOT RUN"], "a simulation that is off is no bound"
        assert "of transcription alone it gives" in missed[2].detail
    for ratio, words in ((0.0, "leaves it no throughput"), (None, "no simulated throughput alone")):
        ideal[1].throughput_ratio = ratio
        gate = experiment_gates(spec, alone, together, ideal)[2]
        assert (gate.status, words in gate.detail) == ("NOT RUN", True), gate.detail


def test_a_simulation_that_is_no_bound_gives_no_ratios() -> None:
    """Its numbers stood in the page as a bound."""
    spec = ExperimentSpec(
        name="x",
        streams=[
            StreamSpec(name="chat", task="generation", rate=2, max_simulated_p95_ratio={"first": 2}),
            StreamSpec(name="busy", task="generation", concurrency=8, min_simulated_share=0.9),
        ],
    )
    loads = [load("a", level(100.0, rate=10.0)), load("b", level(100.0, rate=10.0))]

    def page_of(alone_p95_ms: float | str) -> tuple[FleetExperiment, str]:
        latency = Distribution(n=1000, p50=50.0, p95=80.0)
        ideal: list[SimulatedStream] | str = (
            alone_p95_ms
            if isinstance(alone_p95_ms, str)
            else [
                SimulatedStream(
                    first_ms=Distribution(n=1000, p50=30.0, p95=40.0),
                    e2e_ms=latency,
                    throughput_ratio=0.5,
                    bytes_ratio=0.9,
                    flops_ratio=0.8,
                    alone_e2e_ms=Distribution(n=1000, p50=50.0, p95=alone_p95_ms),
                    alone_requests_per_s=100.0,
                    alone_busy_s=1.0,
                )
                for _ in loads
            ]
        )
        experiment = make_experiment(spec, 10.0, loads, loads, ideal)
        result = FleetLoad(
            status="complete", started="2026-01-01T00:00:00+00:00", duration_s=1, fingerprint=take_fingerprint(),
            settings={}, models=[], experiment=experiment,
        )  # fmt: skip
        return experiment, render_html(fleet_load_page(result))

    valid, html = page_of(100.0)
    assert valid.simulation_error == ""
    of_a_bound = (
        "share of its throughput alone",
        "most, by the bytes",
        "most, by the operations",
        ">first token, p95, ms",
        "2.50 x",
    )
    assert all(words in html for words in of_a_bound)
    assert "alone: outside of steps, ms" in html
    missed, html = page_of(130.0)
    assert "of chat alone it gives 130" in missed.simulation_error
    assert "The simulation is no bound: of chat alone it gives 130" in html
    assert "alone: end to end, p95, ms" in html, "what is off"
    assert not any(words in html for words in of_a_bound)
    failed, html = page_of("not simulated: time must advance")
    assert {gate.status for gate in failed.gates if "simulated" in gate.name} == {"NOT RUN"}
    assert (failed.simulated, "Not simulated: time must advance." in html) == ([], True)


def test_experiment_chooses_models_by_name() -> None:
    fleet = [model("indictrans3", languages=[]), model("gemma-3-27b"), model("qwen3-30b"), model("mt", "translation"),
             model("asr", "transcription", languages=["kn"])]  # fmt: skip
    chosen = choose_models(published_experiment(), fleet)
    assert [each.name for each in chosen] == ["qwen3-30b", "asr", "mt", "gemma-3-27b"]
    # Without such names the chat takes another one than the busy stream.
    assert len({each.name for each in choose_models(published_experiment(), [model("a"), model("b"), *fleet[3:]])}) == 4
    with pytest.raises(ConfigError, match="needs another model of the task generation for its stream chat"):
        choose_models(published_experiment(), fleet[2:])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "name: x\nstreams: [{name: a, task: translation}, {name: b, model: m, rate: 1}]",
            "a needs concurrency or rate",
        ),
        ("name: x\nstreams: [{name: a, rate: 1}, {name: b, model: m, rate: 1}]", "a needs model or task"),
        ("name: x\nstreams: [{name: a, model: m, rate: 0}, {name: b, model: m, rate: 1}]", "> 0"),
        ("name: x\nstreams: [{name: a, model: m, rat: 0}, {name: b, model: m, rate: 1}]", "unknown field `rat`"),
    ],
)
def test_invalid_experiment_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_experiment(str(tmp_path / "x.yaml"))


def test_health_counts_what_is_lost_and_holds_p95_against_limits() -> None:
    def fleet(first_ms: float, **changes: Any) -> FleetLoad:
        mixed = [
            FleetLevel(
                part="mixed",
                label=str(number),
                connections=8,
                send_s=1,
                duration_s=1,
                peak_in_flight=8,
                released_s=0,
                streams=[load("a", level(p95, **changes), refused=5, refusals=7)],
            )
            for number, p95 in enumerate((first_ms, 900.0))
        ]
        models = [ModelUnderLoad(name="a", task="generation", workload="", share=1.0)]
        result = FleetLoad(
            status="complete", started="2026-01-01T00:00:00+00:00", duration_s=1, fingerprint=take_fingerprint(),
            settings={}, models=models, levels=mixed,
        )  # fmt: skip
        result.health = fleet_health(result, {"ttft": 100.0})
        return result

    good = fleet(100.0).health[0]
    assert (good.status, "10 refused at first (0.50 %; 14 refusals)" in good.detail) == ("PASS", True)
    assert "p95 of ttft 100 ms at 8 connections, limit 100 ms, kept up to 8" in good.detail
    slow = fleet(101.0)
    assert [gate.status for gate in slow.health] == ["FAIL", "FAIL"]
    lost = fleet(100.0, failed=1, failures={"timeout": 1}).health[0]
    assert (lost.status, "2 lost" in lost.detail, "2 x timeout" in lost.detail) == ("FAIL", True, True)
    assert "p95 of ttft 101 ms" in render_html(fleet_load_page(slow))


@pytest.mark.parametrize(
    ("statuses", "level", "verdict", "reason"),
    [
        (["PASS", "PASS"], "OK", "OK", []),
        (["NOT RUN", "NOT RUN"], "OK", "UNKNOWN", ["gate 0: why 0", "gate 1: why 1"]),
        (["PASS", "NOT RUN"], "CLIENT_BOUND", "UNKNOWN", ["gate 1: why 1"]),
        (["FAIL", "NOT RUN"], "OK", "FAILED", ["gate 0: why 0"]),
        (["NOT RUN", "NOT RUN"], "FAILED", "FAILED", ["gate 0: why 0", "gate 1: why 1"]),
    ],
)
def test_experiment_whose_gates_were_not_run_is_not_ok(
    statuses: list[CheckVerdict], level: Verdict, verdict: Verdict, reason: list[str]
) -> None:
    """It ended with OK and exit code 0, though nothing was judged."""
    gates = [CheckResult(name=f"gate {at}", status=each, detail=f"why {at}") for at, each in enumerate(statuses)]
    result = FleetLoad(
        status="complete", started="2026-01-01T00:00:00+00:00", duration_s=1, fingerprint=take_fingerprint(),
        settings={}, models=[], levels=[],
    )  # fmt: skip
    result.experiment = FleetExperiment(name="x", send_s=1, alone=[], together=[], simulated=[], gates=gates)
    judge(result, {}, [level])
    assert (result.verdict, result.reasons) == (verdict, reason)
    assert MEANINGS[result.verdict].exit_code == {"OK": 0, "UNKNOWN": 3, "FAILED": 1}[verdict]


@pytest.mark.slow
def test_experiment_runs_each_stream_alone_then_all_together(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "name: x\nstreams:\n- {name: busy, model: mt, concurrency: 4, alone_s: 0.1, min_throughput_ratio: 0.01}\n"
        "- {name: speech, task: transcription, rate: 20, max_p95_ratio: {e2e: 2}}\n"
    )
    costs_path = tmp_path / "costs.json"
    needs = StepCosts(weight_bytes=[(1, 1e6)])  # as benchmarks/floors.py writes them before any measurement
    peaks = GpuStepCosts(models={"mt": needs, "ears": needs}, bytes_per_s=1e12, flops_per_s=1e12)
    write_document(costs_path, StepCostsFile(gpus={"CPU": peaks}))
    with serve_tasks(models=CARDS, delay_s=0.01, metrics=_step_metrics) as server:
        settings: dict[str, Any] = {
            "parts": ("interference",),
            "interference": str(path),
            "interference_s": 0.5,
            "step_costs": str(costs_path),
        }
        levels: list[FleetLevel] = []
        result = measure_fleet(config(server.url, **settings), [], on_level=levels.append)
    assert [level.send_s for level in levels] == [0.1, 0.5, 0.5], "busy alone, speech alone, both"
    measured = sum(stream.level.requests for level in levels for stream in level.streams)
    assert server.num_posts >= measured + 2 * NUM_WARMUPS + 10, "speech had 10 requests in a rehearsal of 0.5 s"
    assert result.experiment is not None
    assert (result.levels, result.interference) == ([], [])
    busy, speech = result.experiment.alone
    assert (busy.level.load_kind, speech.level.load_kind) == ("closed", "open")
    assert min(busy.level.requests, result.experiment.together[0].level.requests) >= 4
    assert [load.level.requests for load in (speech, result.experiment.together[1])] == [10, 10]
    statuses = {gate.name: gate.status for gate in result.experiment.gates}
    assert statuses["busy (mt): throughput"] == "PASS"
    assert statuses["speech (ears): p95 of end to end"] == "NOT RUN"
    assert (result.verdict, result.reasons) == (
        "UNKNOWN",
        ["speech (ears): p95 of end to end: 10, 10 samples, p95 needs 130"],
    )
    html = render_html(fleet_load_page(result))
    assert "Interference: x" in html
    # Each request is one step of 2 ms: the ideal scheduler batches what arrives together.
    [busy_ideal, speech_ideal] = result.experiment.simulated
    assert 0.5 < (busy_ideal.throughput_ratio or 0) < 1.1, "three steps more or less of a loop of 100"
    assert speech_ideal.throughput_ratio is None
    assert speech_ideal.e2e_ms.n == 10
    assert speech_ideal.outside_ms > 0, "the server's delay is no step"
    assert busy_ideal.bytes_ratio == 1.0, "a thousandth of the bytes that the GPU reads"
    assert busy_ideal.flops_ratio is None, "the operations of these tasks are unknown"
    assert [model.facts.get("priority") for model in result.models if model.name in ("mt", "ears")] == [
        "standard",
        None,
    ]
    assert result.step_costs["mt"].decode_s == [(1.0, pytest.approx(0.002))]
    assert speech.rows_per_step == pytest.approx(1.0)
    [gpu] = read_step_costs(costs_path).gpus.values()
    assert gpu.models["mt"].decode_s[-1] == (1.0, pytest.approx(0.002)), "the file has what was measured"
    assert gpu.models["mt"].weight_bytes == [(1, 1e6)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("interference", "last", "labels"),
    [
        ("x.yaml", "x: rehearsal", ["x: rehearsal"]),
        ("x.yaml", "x: together", ["x: busy alone", "x: speech alone", "x: together"]),
        ("pairs", "ears beside mt", ["ears alone", "ears beside mt"]),
    ],
)
def test_levels_of_an_incomplete_experiment_stay_in_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interference: str, last: str, labels: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(
        "name: x\nstreams:\n- {name: busy, model: mt, concurrency: 2}\n- {name: speech, model: ears, concurrency: 2}\n"
    )
    levels: list[FleetLevel] = []
    run_level = FleetLevels.run
    with serve_tasks(models=CARDS[2:4], delay_s=0.01) as server:

        async def run(self: FleetLevels, part: Any, label: str, *arguments: Any) -> FleetLevel:
            if label == last:
                server.behavior["drop"] = True
                server.shutdown()
                server.server_close()
            return await run_level(self, part, label, *arguments)

        monkeypatch.setattr(FleetLevels, "run", run)
        settings: dict[str, Any] = {"parts": ("interference",), "interference": interference, "interference_s": 0.1}
        result = measure_fleet(config(server.url, **settings), [], on_level=levels.append)
    assert (result.status, result.verdict, result.experiment) == ("partial", "SERVER_DIED", None)
    assert levels[-1].label == last, "a killed run leaves it too"
    assert [level.label for level in result.levels] == labels
    assert [level.streams[0].level.verdict for level in result.levels][-1] == "SERVER_DIED"
    lost = sum(stream.level.failed for stream in result.levels[-1].streams)
    sent = sum(stream.level.requests for level in levels for stream in level.streams)
    assert lost > 0
    fleet = result.health[-1].detail
    assert fleet.startswith(f"{sent:,} requests, {lost:,} lost"), "each level is counted once"
    assert last in render_html(fleet_load_page(result))


def test_step_costs_of_a_run_with_failures_are_not_kept(tmp_path: Path) -> None:
    """The first request after the warm-up is lost, so the level of mt gives no costs, and the file is not written."""
    path = tmp_path / "costs.json"
    with serve_tasks(
        models=CARDS[2:4], refuse=(2 * NUM_WARMUPS + 1,), retry_after="soon", metrics=_step_metrics
    ) as server:
        settings: dict[str, Any] = {"parts": ("per-model",), "level_s": 0.05, "step_costs": str(path)}
        result = measure_fleet(config(server.url, **settings), [])
    assert result.verdict == "FAILED"
    assert (list(result.step_costs), path.exists()) == (["ears"], False)
    assert any("mt, 2 connections: left out of the step costs: 1 of" in note for note in result.notes)
    assert f"{path} keeps its step costs: the run ended early, or a model failed" in result.notes


def _step_metrics(server: Any) -> str:
    """Counters of an engine that takes 2 ms and one step for each request."""
    names = {"steps": 1, "step_seconds": 0.002, "step_rows": 1, "step_prompt_tokens": 0}
    labels = 'phase="decode",size="1"'
    posts = Counter("ears" if "file" in each else str(each["model"]) for each in server.received)
    steps = "".join(
        f'meltcore:engine_{name}_total{{model_name="{model}",{labels}}} {posts[model] * value}\n'
        for model in ("mt", "ears")
        for name, value in names.items()
    )
    return steps + "".join(
        f'meltcore:requests_accepted_total{{model_name="{model}"}} {posts[model]}\n' for model in ("mt", "ears")
    )


def test_no_process_is_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    # One without any would wait forever, as in a warm-up of 4 requests by 6 processes.
    started: list[int] = []
    make_workers = StreamRunner._make_workers

    def make_local(self: StreamRunner, stream: LevelStream) -> Any:
        started.append(stream.num_processes)
        stream.num_processes = 0
        return make_workers(self, stream)

    monkeypatch.setattr(StreamRunner, "_make_workers", make_local)
    with serve_tasks(models=CARDS[2:3]) as server:
        settings: dict[str, Any] = {"parts": ("mixed",), "levels": (8,), "level_s": 0.1, "processes": 6}
        plans: list[str] = []
        measure_fleet(config(server.url, **settings), [], on_plan=plans.append)
        assert plans == [config(server.url, **settings).plan(1, None)]
        target = resolve_target(server.url)
        runner = FleetLevels(target, RecordFile(None), processes=6, seed=0, timeouts=Timeouts(), drain_limit_s=9.0)
        workload = "translate:src=eng_Latn,tgt=guj_Gujr"
        asyncio.run(runner.warm_up([Stream(name="a", model="mt", workload=workload, connections=256)]))
    assert started == [1, 6, NUM_WARMUPS]


def test_options_of_the_other_kind_of_load_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", "http://127.0.0.1:1", "--fleet", "--concurrency", "5"]) == 2
    assert "--concurrency is for a load on one model" in capsys.readouterr().err
    assert main(["load", "http://127.0.0.1:1", "--levels", "5"]) == 2
    assert "--levels is for --fleet" in capsys.readouterr().err


@pytest.mark.parametrize("load_kind", [{"connections": 2}, {"rate": 20.0}])
def test_answers_in_flight_are_awaited_up_to_the_drain_limit(scripted: Any, load_kind: dict[str, Any]) -> None:
    """An open loop awaited its answers without a limit."""
    server, progress = scripted("--fault", "stall"), []
    levels = FleetLevels(
        resolve_target(server.url),
        RecordFile(None),
        processes=1,
        seed=0,
        timeouts=Timeouts(),
        drain_limit_s=0.5,
        on_progress=progress.append,
    )
    stream = Stream(name="a", model="scripted", workload="random:in=8,out=8", **load_kind)
    level = asyncio.run(levels.run("mixed", "both", [stream], 0.1))
    [load] = level.streams
    assert load.level.failures == {"drain limit: still in flight 0.5 s after the last request": 2}
    assert (load.lost, load.level.verdict) == (2, "FAILED")
    assert load.level.send_s == (0.1 if "connections" in load_kind else None)
    assert [each.is_draining for each in progress[:1] + progress[-1:]] == [False, False]
    assert 2 in {each.in_flight for each in progress if each.is_draining}


@pytest.mark.parametrize(
    ("fields", "experiment_s", "words"),
    [
        ({}, None, "20 levels of 20 s; mixed: 5 levels of 20 s; interference: 16 levels of 20 s; 820 s in all"),
        ({"parts": ("mixed",), "levels": (1, 2), "level_s": 12.0}, None, "4 models; mixed: 2 levels of 12 s; 24 s in"),
        ({"parts": ("interference",)}, 75.0, "4 models; interference: an experiment of 75 s; 75 s in all"),
        ({"drain_limit_s": 7.0}, None, "after each level up to 7 s until its last answer (--drain-limit)"),
    ],
)  # fmt: skip
def test_a_run_says_what_it_will_take(fields: dict[str, Any], experiment_s: float | None, words: str) -> None:
    assert words in FleetLoadConfig(url="", **fields).plan(4, experiment_s)
