"""`meltcore quantize`: write a checkpoint with quantized weights."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from meltcore.models.checkpoints.checkpoint import Checkpoint, Progress
    from meltcore.models.writers.rounding_loss import RoundingLoss

HELP = (
    "Write a checkpoint with quantized weights: a GGUF file in llama.cpp's layout (q8_0, q4_0), or a folder in the "
    "layout of compressed-tensors (fp8). It reads a folder with safetensors files, or a GGUF file, piece by piece and "
    "without a GPU."
)
EXAMPLES = """\
  meltcore quantize Qwen/Qwen3-0.6B --to q8_0            writes Qwen3-0.6B-Q8_0.gguf
  meltcore quantize ./my-llama --to q4_0 --out small.gguf
  meltcore quantize Qwen/Qwen3.5-35B-A3B --to fp8        writes the folder Qwen3.5-35B-A3B-FP8
  meltcore quantize model-F16.gguf --to q8_0             writes model-F16-Q8_0.gguf
  meltcore quantize model-IQ2_XXS.gguf --to q8_0 --allow-requantize
  meltcore quantize Qwen/Qwen3-8B-AWQ --to q4_0 --allow-requantize
  meltcore serve Qwen3-0.6B-Q8_0.gguf

exit status: 0 written, 2 refused or wrong usage; an interrupted run leaves nothing
"""
_FORMATS = ("q8_0", "q4_0", "fp8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the model, and the options for the output."""
    parser.add_argument("model", metavar="MODEL", help="A checkpoint folder, a GGUF file, a hub id, or a bundled model")
    parser.add_argument("--to", choices=_FORMATS, required=True, help="Format of the matrices")
    parser.add_argument(
        "--out", metavar="PATH", help="GGUF file or folder to write (default: named after model and format, here)"
    )
    parser.add_argument(
        "--allow-requantize",
        action="store_true",
        help="Take a GGUF file, or a folder in AWQ, GPTQ or FP8, that is quantized already: its rounded values are "
        "rounded again",
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace PATH if it exists")


def run(args: argparse.Namespace) -> int:
    """Write the quantized checkpoint and print its size. Raises ConfigError if the checkpoint cannot be quantized."""
    from pathlib import Path

    from rich.console import Console

    from meltcore.cli.signals import signals_as_ctrl_c
    from meltcore.common.errors import ConfigError
    from meltcore.common.sizes import size_text
    from meltcore.measure.documents.values.progress import progress_bar, stop_progress
    from meltcore.models.checkpoints.checkpoint import find_gguf, open_checkpoint

    console = Console(highlight=False)
    gguf_path = find_gguf(args.model, "all")
    source = open_checkpoint(args.model, files="all") if gguf_path is None else gguf_path
    stem = Path(args.model).resolve().name if gguf_path is None else gguf_path.stem
    name = f"{stem}-{args.to.upper()}"
    path = Path(args.out).expanduser() if args.out else Path(name if args.to == "fp8" else f"{name}.gguf")
    if args.to != "fp8" and path.suffix != ".gguf":
        raise ConfigError(f"--out {path}: the name of a GGUF file ends with .gguf")
    progress = progress_bar(console)
    task = progress.add_task("quantizing", total=100, note="")

    def show(stage: str, fraction: float) -> None:
        progress.start()
        progress.update(task, description=stage, completed=round(100 * fraction))

    with signals_as_ctrl_c(), stop_progress(progress):
        if isinstance(source, Path):
            loss = _requantize(source, path, args.to, show, overwrite=args.overwrite, allow=args.allow_requantize)
        else:
            loss = _write(source, path, args.to, show, overwrite=args.overwrite, allow=args.allow_requantize)
    read = [source] if isinstance(source, Path) else source.weight_files
    written = [path] if path.is_file() else list(path.iterdir())
    before, after = (size_text(sum(file.stat().st_size for file in files)) for files in (read, written))
    sizes = f"{after}, from weights of {before}"
    console.print(
        f"{path}: {sizes}, whose values moved by {loss.relative_error:.2%} (RMS)", markup=False, soft_wrap=True
    )
    return 0


def _requantize(
    source: "Path", path: "Path", to: str, progress: "Progress", *, overwrite: bool, allow: bool
) -> "RoundingLoss":
    from meltcore.common.errors import ConfigError
    from meltcore.models.checkpoints.gguf.gguf_file import GGUFModel
    from meltcore.models.writers.gguf_requantize import check_requantizable, requantize
    from meltcore.models.writers.gguf_writer import GGUF_FORMATS

    if to not in GGUF_FORMATS:
        raise ConfigError(
            f"--to {to} reads a folder; {source} is a GGUF file, whose weights "
            f"`meltcore serve {source} --quantization {to}` quantizes while it loads them"
        )
    model = GGUFModel(source)
    check_requantizable(model, allow_requantize=allow)
    return requantize(model, path, GGUF_FORMATS[to], progress, overwrite=overwrite)


def _write(
    checkpoint: "Checkpoint", path: "Path", to: str, progress: "Progress", *, overwrite: bool, allow: bool
) -> "RoundingLoss":
    from functools import partial

    from meltcore.models.writers.fp8_writer import write_fp8
    from meltcore.models.writers.gguf_writer import GGUF_FORMATS, write_gguf
    from meltcore.text.gguf_vocabulary import check_tokenizer, tokenizer_metadata

    if to == "fp8":
        return write_fp8(checkpoint, path, progress, overwrite=overwrite, allow_requantize=allow)
    return write_gguf(
        checkpoint,
        path,
        GGUF_FORMATS[to],
        partial(tokenizer_metadata, checkpoint),
        partial(check_tokenizer, checkpoint),
        progress,
        overwrite=overwrite,
        allow_requantize=allow,
    )
