"""From a checkpoint folder to a model with its weights on the device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meltcore.config import Quantization
from meltcore.errors import ConfigError
from meltcore.layers.destination import Destination
from meltcore.layers.group import Group
from meltcore.layers.pieces import Index, Pieces
from meltcore.models.checkpoint import Checkpoint
from meltcore.models.config_fields import Fields
from meltcore.models.decoder import Decoder
from meltcore.models.quantization import hold_in_fp8
from meltcore.models.qwen2 import Qwen2
from meltcore.models.qwen3 import Qwen3
from meltcore.models.qwen3_5 import Qwen3_5
from meltcore.models.qwen3_moe import Qwen3Moe
from meltcore.models.room import require_room
from meltcore.models.shard import Entry, Shard

Progress = Callable[[str, float], None]
ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], Decoder]] = {
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3_5MoeForCausalLM": Qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": Qwen3_5,
    "Qwen3MoeForCausalLM": Qwen3Moe,
}
# The spread that published models are initialised with (initializer_range in their configurations).
DUMMY_WEIGHT_STD = 0.02
_NAMES_SHOWN = 5
# Threads that read, each some tens of megabytes at a time: one copies out of the page cache at 4 GB/s, and a disk wants
# to be asked for more than one thing.
_READERS = 4
_PART_BYTES = 32 * 2**20


def build_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization = "none",
    group: Group | None = None,
) -> Decoder:
    """The network that config.json names, its weights allocated on `device` and not yet filled.

    With a group it is one rank's share of it. Raises ConfigError as `outline_model`.
    """
    return outline_model(checkpoint, dtype, device, quantization, group).to_empty(device=device)


def outline_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization = "none",
    group: Group | None = None,
) -> Decoder:
    """`build_model` for `device`, but on the meta device: every shape, and no memory.

    Raises ConfigError for an architecture that we do not have, or that cannot be quantised or shared out as asked, for
    a checkpoint that is quantised already, and where `device` has too little memory.
    """
    config = Fields(checkpoint.config)
    names = config.optional("architectures", [])
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        asked = ", ".join(names) or "nothing"
        raise ConfigError(f"{checkpoint.name}: config.json names {asked}; we have {', '.join(ARCHITECTURES)}")
    _refuse_quantised(config)
    with torch.device("meta"), _default_dtype(dtype):
        model = ARCHITECTURES[known[0]](checkpoint.config)
        if group is not None:
            model.divide(group)
        if quantization == "fp8":
            if model.config.experts is not None:
                raise ConfigError(f"--quantization fp8 does not compute routed experts, which {checkpoint.name} has")
            hold_in_fp8(model, device)
    require_room(
        checkpoint.name, sum(weight.nbytes for weight in model.parameters()), device, group.size if group else 1
    )
    return model


def _refuse_quantised(config: Fields) -> None:
    """Its weights mean nothing without their scales, which we do not read."""
    for place in (config, config.part("text_config")):
        if place.has("quantization_config"):
            method = place.part("quantization_config").optional("quant_method", "that has no name")
            raise place.refused(
                "quantization_config",
                f"says that weights are quantised, quant_method {method}; an unquantised checkpoint is needed here "
                "(--quantization fp8 quantises it while loading)",
            )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What is allocated has this type unless it names another: so some things stay float32 in any model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def load_weights(model: Decoder, checkpoint: Checkpoint, progress: Progress) -> None:
    """Copy every tensor of the safetensors shards into the model, converting types on the way.

    Of a tensor that is shared out among ranks only our part is read. All shards are opened and what they hold is
    checked before anything is read, which may take minutes.

    Raises ConfigError naming the tensors that are missing, unexpected, given twice, or of another shape or type than
    we can take, or the unreadable shard.
    """
    files = checkpoint.weight_files
    if not files:
        raise ConfigError(f"{checkpoint.folder} holds no *.safetensors files (--load-format dummy needs none)")
    with ExitStack() as opened:
        shards = [opened.enter_context(Shard(path)) for path in files]
        parts = _plan(model, checkpoint.folder, shards)
        pinned = model.embedding.device.type == "cuda"  # what a GPU copies from by itself, without the driver's buffer
        buffers = [torch.empty(_PART_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(_READERS + 1)]
        pool = opened.enter_context(ThreadPoolExecutor(_READERS))
        for number, (shard, own) in enumerate(zip(shards, parts, strict=True)):
            for part, values in _read_ahead(shard, own, pool, buffers):
                if not part.holds(values):
                    part.target.copy_(values)
            progress("loading weights", (number + 1) / len(files))


def _plan(model: Decoder, folder: Path, shards: Sequence[Shard]) -> list[list[_Part]]:
    """What is read of each shard. Raises ConfigError where they do not hold what the model has, all of it and once."""
    table, fused = model.checkpoint_tensors(), model.fused_tensors()
    given: dict[str, tuple[str, Path]] = {}  # ours, and the tensor and file that each is read from
    unexpected: list[str] = []
    parts: list[list[_Part]] = [[] for _ in shards]
    stands_for: tuple[str, ...]
    for shard, own in zip(shards, parts, strict=True):
        for name, entry in shard.entries.items():
            if name in table:
                target, stands_for = table[name], (name,)
            elif name in fused:
                target, stands_for = fused[name]
            else:
                unexpected += [] if model.ignored_tensor(name) else [name]
                continue
            for each in stands_for:
                if each in given:
                    other, path = given[each]
                    raise ConfigError(
                        f"{folder}: {name} of {shard.path.name} stands in {path.name} too"
                        + (f", as {other}" if other != name else "")
                    )
                given[each] = name, shard.path
            own += _parts(name, entry, target, shard)
    missing = sorted(table.keys() - given.keys())
    problems = [_listed("missing", missing), _listed("unexpected", sorted(unexpected))]
    if any(problems):
        raise ConfigError(f"{folder}: {'; '.join(filter(None, problems))}")
    return parts


def fill_dummy_weights(model: Decoder, seed: int) -> None:
    """Random weights of the configured shapes: the speed of the real ones, and answers that mean nothing.

    Ranks draw the whole of a tensor and keep their part, so that together they hold the same weights as one alone.
    """
    generator = torch.Generator(device=model.embedding.device).manual_seed(seed)
    for name, target in model.checkpoint_tensors().items():
        values = torch.empty(target.shape, dtype=model.embedding.dtype, device=model.embedding.device)
        if values.dim() == 1:
            target.copy_(values.fill_(0.0 if name.endswith(".bias") else 1.0))
        else:
            target.copy_(values.normal_(0.0, DUMMY_WEIGHT_STD, generator=generator))


class _Part(NamedTuple):
    """What is read at once: of the tensor `name` what is `within`, and where it goes."""

    name: str
    within: Index
    target: Destination

    def own_memory(self, dtype: torch.dtype) -> torch.Tensor | None:
        """[bytes] uint8: the memory of the target, where it can be read into as it is."""
        target = self.target
        if isinstance(target, torch.Tensor) and target.device.type == "cpu" and target.dtype == dtype:
            return target.detach().view(-1).view(torch.uint8) if target.is_contiguous() else None
        return None

    def holds(self, values: torch.Tensor) -> bool:
        """Whether they were read to where they go."""
        return isinstance(self.target, torch.Tensor) and self.target.data_ptr() == values.data_ptr()


def _parts(name: str, entry: Entry, target: Destination, shard: Shard) -> Iterator[_Part]:
    """What we hold of a tensor, in parts of a bounded size where it goes into memory as it is."""
    dtype = shard.dtype(name)
    if entry.shape != tuple(target.shape):
        shapes = f"{list(entry.shape)}; the configuration asks for {list(target.shape)}"
        raise ConfigError(f"{shard.path.name}: {name} has shape {shapes}")
    for index, place in target.pieces if isinstance(target, Pieces) else (((), target),):
        rows = place.shape[0] if place.shape else 1
        at_once = max(1, _PART_BYTES // max(1, math.prod(entry.shape[1:]) * dtype.itemsize))
        if not isinstance(place, torch.Tensor) or rows <= at_once:
            yield _Part(name, index, place)
            continue
        start = (index[0].start or 0) if index else 0
        for first in range(0, rows, at_once):
            last = min(rows, first + at_once)
            yield _Part(name, (slice(start + first, start + last), *index[1:]), place[first:last])


def _read_ahead(
    shard: Shard, parts: Iterable[_Part], pool: ThreadPoolExecutor, buffers: Sequence[torch.Tensor]
) -> Iterator[tuple[_Part, torch.Tensor]]:
    """Parts in their order with what was read, which is good until the next; meanwhile the next few are being read.

    What goes to the host's memory unchanged is read there at once, else into one of the buffers.
    """
    free = list(buffers)
    pending: deque[tuple[_Part, torch.Tensor, Future[torch.Tensor]]] = deque()
    for part in (*parts, *[None] * len(buffers)):
        if len(pending) == len(buffers) or (part is None and pending):
            ready, buffer, values = pending.popleft()
            yield ready, values.result()
            free.append(buffer)
        if part is not None:
            buffer = free.pop()
            place = part.own_memory(shard.dtype(part.name))
            into = buffer if place is None else place
            pending.append((part, buffer, pool.submit(shard.read, part.name, part.within, into)))


def _listed(word: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{len(names)} {word} tensors: {', '.join(names[:_NAMES_SHOWN])}{more}"
