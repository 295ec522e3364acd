"""Make a bundled model from scratch: problems, tokenizer, training, checkpoint, held-out accuracy, model card.

    python scripts/make_bundled_model.py --minutes 7.3 --out src/meltcore/bundled/sums
    python scripts/make_bundled_model.py --architecture qwen3_5 --minutes 3.4 --out src/meltcore/bundled/sums-hybrid
    python scripts/make_bundled_model.py --architecture gemma3 --minutes 7.5 --out src/meltcore/bundled/sums-gemma

Needs the package on the path with its engine and test extras. On one H200 it takes the minutes given and one more.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from bundled_card import model_card
from bundled_data import GEMMA_PAGES, PageCurriculum
from bundled_evaluate import evaluate
from bundled_model import Trainee, model_config
from bundled_tokenizer import train_tokenizer, write_tokenizer
from bundled_train import train
from safetensors import safe_open


def main() -> int:
    arguments = _arguments()
    # Each worker tokenizes its own batches; threads inside the workers would only compete for the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.manual_seed(arguments.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder: Path = arguments.out
    if arguments.evaluate_only:
        training = json.loads((folder / "evaluation.json").read_text())["training"]
    else:
        folder.mkdir(parents=True, exist_ok=True)
        _make(folder, arguments, device)
        training = f"{arguments.minutes:g} minutes on {_machine(device)}, {_today()}"
    evaluation = {**_evaluation(folder, arguments, device), "training": training}
    (folder / "evaluation.json").write_text(json.dumps(evaluation, indent=2) + "\n")
    (folder / "README.md").write_text(model_card(arguments.architecture, evaluation))
    print(json.dumps(evaluation["kinds"], indent=2))
    return 0


def _make(folder: Path, arguments: argparse.Namespace, device: torch.device) -> None:
    """Make tokenizer, training and checkpoint. An interrupted training still leaves a checkpoint."""
    tokenizer = train_tokenizer(arguments.seed, thinking=arguments.architecture == "qwen3_5")
    write_tokenizer(tokenizer, folder)
    config = model_config(arguments.architecture, tokenizer)
    trainee = Trainee(config, device)
    print(
        f"{trainee.model.num_parameters():,} parameters, {tokenizer.get_vocab_size()} tokens, on {device}", flush=True
    )
    try:
        train(
            trainee,
            tokenizer,
            minutes=arguments.minutes,
            tokens=arguments.tokens,
            workers=arguments.workers,
            seed=arguments.seed,
            pages=GEMMA_PAGES if arguments.architecture == "gemma3" else PageCurriculum(),
        )
    finally:
        trainee.write(config, folder)


def _evaluation(folder: Path, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Held-out accuracy of the written folder, with the software and machine that measured it."""
    kinds = evaluate(folder, short=arguments.short, long=arguments.long, seed=arguments.seed + 2, device=device)
    return {
        "what": "greedy accuracy on held-out problems through transformers, bf16 weights computed in fp32",
        "machine": _machine(device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "command": f"python {shlex.join([sys.argv[0], *_without_out(sys.argv[1:])])}",
        "date": _today(),
        "parameters": sum(math.prod(shape) for shape in _shapes(folder)),
        "kinds": kinds,
    }


def _machine(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {platform.machine()}"


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _shapes(folder: Path) -> list[list[int]]:
    with safe_open(folder / "model.safetensors", "pt") as weights:
        return [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118 - not a dict


def _without_out(arguments: list[str]) -> list[str]:
    """The command line without --out."""
    if "--out" not in arguments:
        return arguments
    at = arguments.index("--out")
    return arguments[:at] + arguments[at + 2 :]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("src/meltcore/bundled/sums"), help="checkpoint folder")
    parser.add_argument(
        "--architecture", choices=("qwen3", "qwen3_5", "gemma3"), default="qwen3", help="default: qwen3"
    )
    parser.add_argument("--minutes", type=float, default=7.3, help="training time (default 7.3, meant for one H200)")
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens per step (default 32768)")
    parser.add_argument("--workers", type=int, default=14, help="processes that make problems (default 14)")
    parser.add_argument("--evaluate-only", action="store_true", help="measure the checkpoint in --out, train nothing")
    parser.add_argument("--short", type=int, default=1000, help="short held-out problems to evaluate")
    parser.add_argument("--long", type=int, default=500, help="long held-out problems to evaluate")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
