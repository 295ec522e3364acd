"""A document of every kind, of one machine, as small as each can be."""

from pathlib import Path
from typing import Any

from sample_certificates import certificate
from sample_results import sample_level, sample_run
from sample_scores import sample_device, sample_scored_run

from meltcore.measure.documents.comparison import ComparisonResult, StartSet
from meltcore.measure.documents.gaps import GapReport, GapTotal, GpuProfile
from meltcore.measure.documents.node import Certificate, Snapshot
from meltcore.measure.documents.schema import CheckResult, EvalScore, Fingerprint, RunResult
from meltcore.measure.documents.score import SM_ACTIVE, ScoredRun
from meltcore.measure.documents.tuning import Tuning, TuningPoint
from meltcore.measure.documents.values.documents import Content, DocumentFile
from meltcore.measure.report.comparisons.compare_starts import compare_starts

LOAD: dict[str, Any] = {"workload": "random:in=64,out=64", "concurrency": [32], "seed": 0}
SHIPPED, FASTER = "serve model --port {port}", "serve model --port {port} --max-num-seqs 64"
_SPREAD = (0.0, 0.004, -0.004, 0.002, -0.002, 0.006)


def fingerprint() -> Fingerprint:
    return sample_run([]).fingerprint


def scripted_certificate(folder: Path, **changes: Any) -> Certificate:
    """Of a scripted node, said to be on the samples' machine."""
    found = certificate(folder, "quick", gpus=2, **changes)
    found.snapshot.fingerprint = fingerprint()
    found.started = "2026-11-21T12:10:00+00:00"
    return found


def evaluation(**changes: Any) -> RunResult:
    settings = {"what": "all", "model": "meltcore/sums"}
    gates = [CheckResult(name="GSM8K", status="PASS", detail="91 % right")]
    score = EvalScore(total_tokens_per_s=191.0, output_tokens_per_s=60.0)
    found = {"settings": settings, "gates": gates, "eval_score": score, **changes}
    levels = found.pop("levels", [sample_level(1), sample_level(4)])
    return sample_run(levels, command="eval", **found)


def benchmark(**changes: Any) -> ScoredRun:
    device = sample_device(**changes)
    if device.sustained is not None:
        device.sustained.utilization = {SM_ACTIVE: 95.0}
    return sample_scored_run([device])


def tuning(rates: tuple[float, float] = (1000.0, 1250.0), **changes: Any) -> Tuning:
    """Default settings, and one setting."""
    points = [
        TuningPoint(settings={}, ok=True, ready_s=1.0, output_tokens_per_s=rates[0]),
        TuningPoint(
            settings={"max_num_seqs": 64},
            args=["--max-num-seqs", "64"],
            ok=True,
            ready_s=1.0,
            output_tokens_per_s=rates[1],
        ),
    ]
    told = {"kind": "batching", "finding": "64 sequences is the fastest.", "command": f"{SHIPPED} {{args}}"}
    told |= {"taken": "2026-11-21T12:30:00+00:00", "load": LOAD, "points": points, "best": 1, "knee": 1}
    return Tuning(fingerprint=fingerprint(), **{**told, **changes})


def precisions() -> Tuning:
    """Default settings, one precision that is faster, and one that did not run."""
    points = [
        TuningPoint(settings={}, ok=True, ready_s=1.0, output_tokens_per_s=1000.0),
        TuningPoint(settings={"precision": "fp8-cache"}, args=["--kv-cache-dtype", "fp8"], ok=True, ready_s=1.0,
                    output_tokens_per_s=1400.0),
        TuningPoint(settings={"precision": "fp8"}, args=["--quantization", "fp8"], ok=False, reason="needs sm_89"),
    ]  # fmt: skip
    return tuning(kind="precision", points=points, best=None, knee=None)


def comparison(rate: float = 1240.0, starts: int = 6, new_command: str = FASTER, load: Any = None) -> ComparisonResult:
    def taken(name: str, command: str, rate: float) -> StartSet:
        runs = [sample_run([sample_level(32, output_tokens_per_s=rate * (1 + s))]) for s in _SPREAD[:starts]]
        moment = "2026-11-21T13:00:00+00:00"
        return StartSet(name=name, command=command, taken=moment, load=load or LOAD, starts=runs)

    control = taken("control", SHIPPED, 1000.0)
    return compare_starts(taken("A", SHIPPED, 1000.0), taken("B", new_command, rate), control=control, order="ABBA")


def profile(untrusted: tuple[str, ...] = ()) -> GpuProfile:
    report = GapReport(
        device=0,
        window_us=1000.0,
        computing_us=900.0,
        busy_us=900.0,
        kernels=10,
        streams=1,
        by_cause=[GapTotal(name="late launch", count=5, total_us=100.0)],
        by_size=[],
        pairs=[],
        recoverable_share=0.1,
        untrusted=list(untrusted),
    )
    return GpuProfile(source="trace.json", taken="2026-11-21T12:40:00+00:00", reports=[report])


def document(content: Content, name: str = "run") -> DocumentFile:
    names = {Snapshot: "machine.json", Certificate: "certificate.json", Tuning: "tuning.json", GpuProfile: "gaps.json",
             ComparisonResult: "comparison.json"}  # fmt: skip
    return DocumentFile(Path(name) / names.get(type(content), "result.json"), content)


def whole_node(folder: Path) -> list[DocumentFile]:
    """Everything a card can hold, all of it good."""
    certified = scripted_certificate(folder)
    contents = [certified.snapshot, certified, benchmark(), evaluation(), tuning(), profile(), comparison()]
    return [document(each, f"run-{place}") for place, each in enumerate(contents)]
