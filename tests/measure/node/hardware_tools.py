"""Samples made by hand, and a fake GPU read in this process."""

from collections.abc import Mapping
from typing import Any

from fake_gpu import HEALTHY, FakeGpu, FakeNvml

from meltcore.common.gpus.metrics import METRICS, Value
from meltcore.common.gpus.reader import GpuReader, Sample
from meltcore.common.gpus.select import GpuDevice, select_gpus
from meltcore.common.gpus.xid import XidWatch

NOT_SUPPORTED, NO_PERMISSION, NO_FUNCTION, LOST = 3, 4, 13, 15

INTERVAL_S = 0.1


def sample(index: int = 0, values: Mapping[str, Value] | None = None, **others: Any) -> Sample:
    """The sample `index` intervals after the first, of a healthy GPU but for what is given."""
    healthy: dict[str, Value] = {metric.key: HEALTHY[metric.key] for metric in METRICS}
    fields: dict[str, Any] = {"gpu": 0, "read_s": 0.001, "clock_reasons": [], "xids": [], "t_s": index * INTERVAL_S}
    return Sample(values={**healthy, **(values or {})}, **{**fields, **others})


def run_of(count: int, **others: Any) -> list[Sample]:
    return [sample(index, **others) for index in range(count)]


class FakeReader:
    """One fake GPU, read in this process."""

    def __init__(self, requested: str | None = None, **gpu: Any) -> None:
        self.gpu = FakeGpu(**gpu)
        self.nvml = FakeNvml([self.gpu])
        self.chosen: GpuDevice = select_gpus(self.nvml, requested, {})[0]
        self.reader = GpuReader(self.nvml, self.chosen)
        self.watch = XidWatch(self.nvml, [self.chosen])

    def read(self) -> Sample:
        return self.reader.read(0, self.watch.take()[0])
