"""What the sampler writes: one JSON line at the start, one a sample and GPU, one at the end.

Times are `time.monotonic()` seconds, one clock for all processes of a machine, so samples line up with whatever another
process measured meanwhile.
"""

from pathlib import Path
from typing import Literal

import msgspec

from meltcore.errors import ConfigError
from meltcore.hardware.metrics import Absent, Value
from meltcore.hardware.products import Product


class GpuInfo(msgspec.Struct, kw_only=True, frozen=True):
    """One GPU, or one MIG slice of a GPU. `index`: its board, as nvidia-smi numbers it."""

    index: int
    name: str
    uuid: str
    architecture: int | None
    mig: bool = False

    @property
    def product(self) -> Product:
        return Product(self.name, self.architecture, self.mig)

    @property
    def label(self) -> str:
        return f"GPU {self.index}" + (f" {self.uuid[:12]}" if self.mig else "")


class Start(msgspec.Struct, kw_only=True, tag="start"):
    """`started` is UTC in ISO 8601, read at `t_s` of the monotonic clock."""

    t_s: float
    started: str
    interval_s: float
    driver: str
    gpus: list[GpuInfo]


class Sample(msgspec.Struct, kw_only=True, tag="sample"):
    """One GPU at one moment.

    `gpu` is a position in Start.gpus. `t_s` is before the first reading, `read_s` is what all of them took.
    `clock_reasons` are throttle.py's words. `xids` are the critical errors since the sample before. `gpm_window_s` is
    the time that the GPM values are the mean of. `lost`: the GPU has fallen off the bus; this is its last sample.
    """

    t_s: float
    gpu: int
    read_s: float
    values: dict[str, Value]
    clock_reasons: list[str] | Absent
    xids: list[int] | Absent
    gpm_window_s: float | None = None
    lost: bool = False


class End(msgspec.Struct, kw_only=True, tag="end"):
    """The sampler left in order, having used `cpu_s` of processor time.

    `late`: moments without a sample, because the readings before took longer than the interval.
    """

    t_s: float
    late: int
    cpu_s: float
    why: Literal["asked", "every GPU lost"]


Line = Start | Sample | End
encode_line = msgspec.json.Encoder().encode
decode_line = msgspec.json.Decoder(Line).decode


class Recording(msgspec.Struct, kw_only=True):
    """A whole file. `end` is None where the sampler died or still runs."""

    start: Start
    samples: list[Sample]
    end: End | None = None

    def of(self, gpu: int, from_s: float = float("-inf"), to_s: float = float("inf")) -> list[Sample]:
        """Samples of one GPU (a position in start.gpus), taken within a time."""
        return [sample for sample in self.samples if sample.gpu == gpu and from_s <= sample.t_s <= to_s]


def read_recording(path: Path | str) -> Recording:
    """Read a sampler's file; a last line cut short by a crash is left out. Raises ConfigError for another file."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    try:
        lines = [decode_line(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no recording of meltcore monitor: {error}") from error
    if not lines or not isinstance(lines[0], Start):
        raise ConfigError(f"{path} is no recording of meltcore monitor: it has no start")
    ends = [line for line in lines if isinstance(line, End)]
    samples = [line for line in lines if isinstance(line, Sample)]
    return Recording(start=lines[0], samples=samples, end=ends[-1] if ends else None)
