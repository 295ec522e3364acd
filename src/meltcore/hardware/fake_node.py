"""A scripted node: fake GPUs, a clock that only programs move, and programs that answer as told.

The clock of the fake GPUs and of the samples is the node's, so whatever a script says happens during a check happens
in that check.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meltcore.hardware.fake import FakeGpu, FakeNvml
from meltcore.hardware.measures import Answer, Question, decode_job, encode
from meltcore.hardware.node import Node, Ran, Telemetry
from meltcore.hardware.reader import GpuReader
from meltcore.hardware.recording import Sample
from meltcore.hardware.select import Gpu, select_gpus
from meltcore.hardware.xid import XidWatch

_STEPS = 4  # moments of a short program's run at which telemetry is read; of a long one every second

# What H200 SXM GPUs gave, or where none was measured would give; by the beginning of a key, the first that fits.
H200_FIGURES: tuple[tuple[str, float], ...] = (
    ("product/bf16/8192x8192", 792.0),
    ("product/bf16/4096x4096x", 735.0),
    ("product/bf16/4096x14336", 672.0),
    ("product/bf16", 691.0),
    ("product/fp16", 780.0),
    ("product/tf32", 400.0),
    ("product/fp8", 1500.0),
    ("memory/copy", 4280.0),
    ("memory/read", 4400.0),
    ("memory/write", 4300.0),
    ("host/to-device", 54.5),
    ("host/to-host", 55.0),
    ("peers/one-way", 386.5),
    ("peers/both-ways", 775.0),
    ("sustained", 690.0),
    ("corruption", 900.0),
    ("collectives/all_reduce/2/64MiB", 270.0),
    ("collectives/all_reduce/2", 328.0),
    ("collectives", 362.0),
)

Measured = Callable[[Question, tuple[int, ...]], Answer | None]
Program = Callable[[Sequence[str], Mapping[str, str]], Ran]


def healthy_answer(question: Question, gpus: tuple[int, ...]) -> Answer:
    """With a percent of spread between GPUs and between samples, as real ones have."""
    figure = next(figure for start, figure in H200_FIGURES if question.key.startswith(start))
    level = figure * (1 + 0.004 * (sum(gpus) % 4))
    marks: dict[str, str | int] = {"wrong": 0, "compared": 9000, "digest": "5eed"}
    return Answer(
        key=question.key, gpus=gpus, samples=[level * (1 + 0.003 * step) for step in (-1, 0, 1, 0)], marks=marks
    )


@dataclass
class FakeNode(Node):
    """`measured` answers each target of each question of a probe, None for no answer. `hung`: probes that never end.

    `program` stands in for any other command. A probe that ends takes `probe_s` of the clock, a hung one its limit.
    """

    fakes: list[FakeGpu]
    measured: Measured
    program: Program = lambda command, environment: Ran(127, b"", b"no such program")
    hung: set[str] = field(default_factory=set)
    crashed: dict[str, str] = field(default_factory=dict)
    probe_s: float = 2.0
    files: dict[str, str] = field(default_factory=dict)
    ran: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._now_s = 0.0
        self._telemetry: list[_FakeTelemetry] = []
        super().__init__(FakeNvml(self.fakes, clock=self.now_s))

    def gpus(self, wanted: str | None = None) -> list[Gpu]:
        return select_gpus(self.nvml, wanted, {})

    def now_s(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds

    def read(self, path: Path) -> str | None:
        return self.files.get(str(path))

    def run(self, command: Sequence[str], stdin: bytes, environment: Mapping[str, str], limit_s: float) -> Ran:
        if "meltcore.hardware.probes" not in command:
            self._advance(self.probe_s)
            return self.program(command, environment)
        name = command[-1]
        self.ran.append((name, dict(environment)))
        hung = name in self.hung
        self._advance(limit_s if hung else self.probe_s)
        if name in self.crashed:
            return Ran(1, b"", self.crashed[name].encode())
        answers = [] if hung else self._answers(decode_job(stdin).questions)
        return Ran(None if hung else 0, b"".join(encode(answer) + b"\n" for answer in answers), b"")

    def telemetry(self, path: Path, gpus: Sequence[Gpu], interval_s: float) -> Telemetry:
        self._telemetry.append(_FakeTelemetry(self, gpus))
        return self._telemetry[-1]

    def _answers(self, questions: Sequence[Question]) -> list[Answer]:
        pairs = [(question, target) for question in questions for target in question.targets()]
        found = (self.measured(question, target) for question, target in pairs)
        return [answer for answer in found if answer is not None]

    def _advance(self, seconds: float) -> None:
        steps = max(_STEPS, round(seconds))
        for _ in range(steps):
            for telemetry in self._telemetry:
                telemetry.take()
            self._now_s += seconds / steps
        for telemetry in self._telemetry:
            telemetry.take()


class _FakeTelemetry:
    def __init__(self, node: FakeNode, gpus: Sequence[Gpu]) -> None:
        self._node = node
        self._readers = [GpuReader(node.nvml, gpu) for gpu in gpus]
        self._watch = XidWatch(node.nvml, gpus)
        self._samples: list[list[Sample]] = [[] for _ in gpus]

    def take(self) -> None:
        news = self._watch.take()
        for position, reader in enumerate(self._readers):
            sample = reader.read(position, news[position])
            sample.t_s = self._node.now_s()
            self._samples[position].append(sample)

    def since(self, from_s: float) -> list[list[Sample]] | None:
        return [[sample for sample in mine if sample.t_s >= from_s] for mine in self._samples]

    def close(self) -> None:
        pass
