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

_STEPS = 4  # moments of a program's run at which telemetry is read

Measured = Callable[[Question, tuple[int, ...]], Answer | None]
Program = Callable[[Sequence[str], Mapping[str, str]], Ran]


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

    def telemetry(self, path: Path, gpus: Sequence[Gpu]) -> Telemetry:
        self._telemetry.append(_FakeTelemetry(self, gpus))
        return self._telemetry[-1]

    def _answers(self, questions: Sequence[Question]) -> list[Answer]:
        pairs = [(question, target) for question in questions for target in question.targets()]
        found = (self.measured(question, target) for question, target in pairs)
        return [answer for answer in found if answer is not None]

    def _advance(self, seconds: float) -> None:
        for _ in range(_STEPS):
            for telemetry in self._telemetry:
                telemetry.take()
            self._now_s += seconds / _STEPS
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
