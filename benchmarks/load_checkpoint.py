"""Speed and host memory of loading weights: a synthetic sharded checkpoint of a published layout.

The checkpoint has as many whole layers of the model as its size allows (of a hybrid, whole periods of its layer
types), in shards as published, with random weights. Each load runs in a process of its own: first with the
files dropped from the page cache (the disk's speed), then with them in it (ours), each beside a plain read of the same
files into one small buffer. Files in a memory file system, such as /dev/shm, cannot be dropped and are read once.
Host memory is anonymous memory beyond what the process held before; on a CPU the weights are part of it. Pages of the
files do not count: the kernel can reclaim them at any time.

    python benchmarks/load_checkpoint.py --folder /dev/shm/synthetic --model Qwen/Qwen3.5-35B-A3B --fused
    python benchmarks/load_checkpoint.py --folder /tmp/synthetic --model Qwen/Qwen3-0.6B --size-gb 1 --device cpu
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from bench_output import Row, need_gpu, write_result

from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from meltcore.models.loader import build_model, load_weights

GB = 1e9
ITEM_BYTES = 2  # bfloat16
BLOCK_BYTES = 16 * 2**20  # of random weights, repeated in the files
SAMPLE_S = 0.01


# --- the synthetic checkpoint


def shorten(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The configuration of the same model with fewer layers."""
    shorter = copy.deepcopy(config)
    text = shorter.get("text_config", shorter)
    text["num_hidden_layers"] = layers
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:layers]
    return shorter


def tensors_of(config: dict[str, Any], fused: bool) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, experts one by one or `fused` into two per layer."""
    model = build_model(Checkpoint("synthetic", Path(), config, {}), torch.bfloat16, torch.device("meta"))
    shapes = {name: tuple(place.shape) for name, place in model.checkpoint_tensors().items()}
    for name, (place, checkpoint_names) in (model.fused_tensors() if fused else {}).items():
        shapes[name] = tuple(place.shape)
        for part in checkpoint_names:
            del shapes[part]
    return shapes


def size_of(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values()) * ITEM_BYTES


def fit(config: dict[str, Any], size_bytes: float, fused: bool) -> dict[str, Any]:
    """The configuration with as many layers, in whole periods of their types, as fit into `size_bytes`."""
    text = config.get("text_config", config)
    a_round = text.get("full_attention_interval") or 1
    one, two = (size_of(tensors_of(shorten(config, rounds * a_round), fused)) for rounds in (1, 2))
    rounds = min(text["num_hidden_layers"] // a_round, 1 + int((size_bytes - one) // (two - one)))
    if rounds < 1:
        sys.exit(f"a checkpoint of {a_round} layers takes {one / GB:.2f} GB already; give a larger --size-gb")
    return shorten(config, rounds * a_round)


def write_checkpoint(folder: Path, config: dict[str, Any], fused: bool, shard_bytes: float) -> int:
    """Write config.json, the shards and their index. Returns the bytes of weights."""
    shapes = tensors_of(config, fused)
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * ITEM_BYTES
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    block = torch.randn(BLOCK_BYTES // ITEM_BYTES).mul_(0.02).bfloat16().view(torch.uint8).numpy().tobytes()
    index: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_shard(folder / file, {name: shapes[name] for name in names}, block)
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    return size_of(shapes)


def write_shard(path: Path, shapes: dict[str, tuple[int, ...]], block: bytes) -> None:
    """A safetensors file (github.com/huggingface/safetensors, format), written in slices of a fixed size."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * ITEM_BYTES
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for start in range(0, end, len(block)):
            file.write(block[: end - start])
        file.flush()
        os.fsync(file.fileno())


def read_s(folder: Path, buffer_bytes: int = BLOCK_BYTES) -> float:
    """Seconds of a plain read of all shards, the lower bound of every loader."""
    buffer = bytearray(buffer_bytes)
    started_s = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started_s


def only_in_memory(folder: Path) -> bool:
    """Whether the folder's file system has no disk below it."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [(len(point), kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(above)[1] in ("tmpfs", "ramfs")


def drop_from_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- one load, in a process of its own


class PeakMemory:
    """The most anonymous memory of this process beyond what it has now, in bytes."""

    def __init__(self) -> None:
        self._before = anonymous_bytes()
        self.bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.bytes = max(self.bytes, anonymous_bytes() - self._before)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        self.bytes = max(self.bytes, anonymous_bytes() - self._before)


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def load_once(folder: Path, device: torch.device, tp: int) -> dict[str, float]:
    """Load the first rank's share. Seconds, and bytes of its weights and of host memory at the peak."""
    checkpoint = open_checkpoint(str(folder), files="all")
    torch.zeros(1, device=device)  # the device's own start is not loading
    memory, started_s = PeakMemory(), time.perf_counter()
    model = build_model(checkpoint, torch.bfloat16, device, group=TensorParallelGroup(0, tp) if tp > 1 else None)
    load_weights(model, checkpoint, lambda _stage, _share: None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    load_s = time.perf_counter() - started_s
    memory.stop()
    weights = sum(weight.nbytes for weight in model.parameters())
    return {"load_s": load_s, "weight_bytes": weights, "peak_bytes": memory.bytes}


def load_in_process(args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--folder", str(args.folder), "--device", args.device, "--tp", str(args.tp)]
    done = subprocess.run([*command, "--load-only"], stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


# --- the benchmark


def measure(args: argparse.Namespace, size: int) -> list[Row]:
    rows = []
    works = [("files not in memory", False), ("files in memory", True)]
    for work, in_memory in works[only_in_memory(args.folder) :]:
        if not in_memory:
            drop_from_cache(args.folder)
        plain = size / read_s(args.folder) / GB
        if not in_memory:
            drop_from_cache(args.folder)
        found = load_in_process(args)
        rate = found["weight_bytes"] / found["load_s"] / GB
        rows += [
            Row(
                work=work,
                unit="GB/s of weights loaded",
                value=rate,
                peer="plain read",
                peer_value=plain,
                ratio=rate / plain,
            ),
            Row(work=work, unit="s", value=found["load_s"]),
            Row(work=work, unit="GB of peak host memory", value=found["peak_bytes"] / GB),
        ]
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="New folder for the checkpoint; removed afterwards.")
    parser.add_argument(
        "--model",
        default="Qwen/Qwen3-30B-A3B",
        help="Model whose layout the checkpoint has; only its configuration is read.",
    )
    parser.add_argument("--size-gb", type=float, default=10.0, help="Largest size of the checkpoint (default: 10).")
    parser.add_argument("--shard-gb", type=float, default=4.0, help="Largest size of a file (default: 4).")
    parser.add_argument("--fused", action="store_true", help="Store the experts as two tensors per layer.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--tp", type=int, default=1, help="Tensor-parallel size; the first rank's shard is loaded (default: 1)."
    )
    parser.add_argument("--load-only", action="store_true", help="Load the files in the folder once and print JSON.")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.load_only:
        print(json.dumps(load_once(args.folder, torch.device(args.device), args.tp)))
        return
    if args.device.startswith("cuda"):
        need_gpu()
    config = fit(open_checkpoint(args.model, files="config").config, args.size_gb * GB, args.fused)
    args.folder.mkdir(parents=True)  # never into a folder that holds something: it is removed afterwards
    try:
        size = write_checkpoint(args.folder, config, args.fused, args.shard_gb * GB)
        shards = len(list(args.folder.glob("*.safetensors")))
        layers = config.get("text_config", config)["num_hidden_layers"]
        rank = f", rank 0 of {args.tp}" if args.tp > 1 else ""
        note = f"{args.model}, layers: {layers}, {size / GB:.2f} GB in {shards} shards, to {args.device}{rank}"
        rows = measure(args, size)
    finally:
        shutil.rmtree(args.folder)
    versions = {name: metadata.version(name) for name in ("torch", "safetensors")}
    write_result(rows, versions, [note], gpus=0 if args.device == "cpu" else max(args.tp, 1))


if __name__ == "__main__":
    main()
