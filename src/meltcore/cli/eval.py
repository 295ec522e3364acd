"""`meltcore eval`: check any server's answers or API forms."""

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from meltcore.results.runfolder import RunFolder
    from meltcore.results.schema import RunResult

HELP = "Check a server's answers (arithmetic problems, GSM8K), its API forms, or its speed with both checked."
EXAMPLES = """\
  meltcore eval http://127.0.0.1:8000 conformance
  meltcore eval http://127.0.0.1:8000 problems --at-least 0.95
  meltcore eval https://example.com/v1 problems --model my-model --api-key $KEY
  meltcore eval http://127.0.0.1:8000 gsm8k --data test.jsonl
  meltcore eval http://127.0.0.1:8000 throughput --tokenizer MODEL_FOLDER
  meltcore eval http://127.0.0.1:8000 throughput --speed-only --output-tokens 277
"""

# The load client at its limit is a doubt about the numbers, not a fault of the server.
_EXIT_CODES = {"OK": 0, "CLIENT_BOUND": 0, "PARTIAL": 130}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the server's address, with or without /v1")
    parser.add_argument("what", choices=("problems", "conformance", "gsm8k", "throughput"), help="what to check")
    parser.add_argument("--model", help="the model's name (default: the first that /v1/models lists)")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--out", default="runs", metavar="DIR", help="where run folders go (default: runs)")
    answers = parser.add_argument_group("problems, gsm8k")
    answers.add_argument("--concurrency", type=int, default=8, metavar="N", help="asked at once (default: 8)")
    answers.add_argument("--at-least", type=float, metavar="SHARE", help="problems: exit 1 below this share right")
    gsm8k = parser.add_argument_group("gsm8k: chain of thought, gate 87.5 %% by flexible extraction")
    gsm8k.add_argument(
        "--data",
        default="openai/gsm8k",
        metavar="JSONL",
        help="problems: a file, meltcore/problems, or a data set of the hub (default: openai/gsm8k)",
    )
    gsm8k.add_argument(
        "--shots", metavar="FILE", help="eight worked examples, or none (default: lm-eval's, else our own)"
    )
    gsm8k.add_argument(
        "--harness", metavar="PYTHON", help="a Python with lm-eval: asks the same, compared item by item"
    )
    gsm8k.add_argument("--limit", type=int, default=200, metavar="N", help="ask the first N (default: 200)")

    _add_throughput(parser.add_argument_group("throughput: levels of load, answers and token counts checked"))


def _add_throughput(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--levels", default="1,2,4,8,16,32,64", metavar="N,...", help="requests at once (default: %(default)s)"
    )
    group.add_argument("--requests", type=int, default=64, metavar="N", help="a level (default: 64)")
    group.add_argument("--input-tokens", type=int, default=1024, metavar="N", help="of each prompt (default: 1024)")
    group.add_argument("--output-tokens", type=int, default=1024, metavar="N", help="at most (default: 1024)")
    group.add_argument("--fixed-output", action="store_true", help="exactly that many: end tokens are ignored")
    group.add_argument("--tokenizer", metavar="PATH", help="the model's tokenizer.json or its folder")
    group.add_argument("--reuse-prompts", action="store_true", help="the same 128 prompts at every level")
    group.add_argument("--seed", type=int, metavar="N", help="of the prompts (default: a new one each run)")
    group.add_argument(
        "--speed-only",
        action="store_true",
        help="token ids in, fixed output, answers unchecked; ids of --tokenizer or below 30,000",
    )


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from meltcore.report import save
    from meltcore.results.runfolder import RunFolder

    _check(args)
    console = Console()
    folder = None
    if args.what == "throughput":
        result, folder = _throughput(args, console)
    else:
        result = _gsm8k(args, console) if args.what == "gsm8k" else _answers_or_forms(args, console)
    folder = folder or RunFolder.create(args.out, "eval")
    save(folder, result)
    _print(console, result)
    console.print(f"report: {folder.report_path}", highlight=False, soft_wrap=True)
    return _EXIT_CODES.get(result.verdict, 1)


def _check(args: argparse.Namespace) -> None:
    from meltcore.errors import ConfigError

    for name in ("concurrency", "limit"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1; got {getattr(args, name)}")


def _answers_or_forms(args: argparse.Namespace, console: "Console") -> "RunResult":
    from meltcore.evals import run_eval
    from meltcore.results.progress import answers_bar, print_check

    with answers_bar(console, args.what == "problems") as on_answer:
        return run_eval(
            args.url,
            args.what,
            model=args.model,
            api_key=args.api_key,
            at_least=args.at_least,
            concurrency=args.concurrency,
            arguments=sys.argv[1:],
            on_answer=on_answer,
            on_check=lambda check: print_check(console, check),
        )


def _gsm8k(args: argparse.Namespace, console: "Console") -> "RunResult":
    from meltcore.evals import run_gsm8k
    from meltcore.results.progress import answers_bar

    with answers_bar(console, what="GSM8K") as on_answer:
        return run_gsm8k(
            args.url,
            data=args.data,
            shots=args.shots,
            limit=args.limit,
            harness=args.harness,
            model=args.model,
            api_key=args.api_key,
            concurrency=args.concurrency,
            arguments=sys.argv[1:],
            on_answer=on_answer,
        )


def _throughput(args: argparse.Namespace, console: "Console") -> "tuple[RunResult, RunFolder]":
    import secrets

    from meltcore.evals import ThroughputConfig, run_throughput
    from meltcore.evals.throughput import load_config
    from meltcore.load.config import parse_numbers
    from meltcore.load.console import level_bars
    from meltcore.results.runfolder import RunFolder

    config = ThroughputConfig(
        url=args.url,
        levels=parse_numbers(args.levels, "--levels", int),
        requests=args.requests,
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        fixed_output=args.fixed_output,
        reuse_prompts=args.reuse_prompts,
        speed_only=args.speed_only,
        tokenizer=args.tokenizer,
        seed=secrets.randbits(32) if args.seed is None else args.seed,
        model=args.model,
        api_key=args.api_key,
    )
    folder = RunFolder.create(args.out, "eval")
    with level_bars(load_config(config, "", folder.path).levels, console) as on_progress:
        return run_throughput(config, folder.path, sys.argv[1:], on_progress), folder


def _print(console: "Console", result: "RunResult") -> None:
    from meltcore.results.progress import print_check
    from meltcore.results.tables import throughput_table
    from meltcore.results.wording import evaluation_line, speed_sum_line

    if result.levels:
        console.print(throughput_table(result.levels))
    if result.speed_sum is not None:
        console.print(speed_sum_line(result.speed_sum))

    if result.evaluation is not None:
        console.print(evaluation_line(result.evaluation))
    for gate in result.gates:
        print_check(console, gate)
    for note in result.notes:
        console.print(f"note: {note}", highlight=False)
    for reason in result.reasons:
        console.print(f"[red]{result.verdict}[/]: {reason}", highlight=False)
