"""`meltcore eval`: check any server's answers or API forms."""

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from meltcore.results.schema import RunResult

HELP = "Check a server's answers (arithmetic problems, GSM8K) or its API forms. Any OpenAI-compatible server."
EXAMPLES = """\
  meltcore eval http://127.0.0.1:8000 conformance
  meltcore eval http://127.0.0.1:8000 problems --at-least 0.95
  meltcore eval https://example.com/v1 problems --model my-model --api-key $KEY
  meltcore eval http://127.0.0.1:8000 gsm8k --data test.jsonl
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the server's address, with or without /v1")
    parser.add_argument("what", choices=("problems", "conformance", "gsm8k"), help="what to check")
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
    gsm8k.add_argument("--limit", type=int, default=200, metavar="N", help="ask the first N (default: 200)")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from meltcore.report import save
    from meltcore.results.runfolder import RunFolder

    _check(args)
    console = Console()
    result = _gsm8k(args, console) if args.what == "gsm8k" else _answers_or_forms(args, console)
    folder = RunFolder.create(args.out, "eval")
    save(folder, result)
    _print(console, result)
    console.print(f"report: {folder.report_path}", highlight=False, soft_wrap=True)
    return 0 if result.verdict == "OK" else 1


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
            model=args.model,
            api_key=args.api_key,
            concurrency=args.concurrency,
            arguments=sys.argv[1:],
            on_answer=on_answer,
        )


def _print(console: "Console", result: "RunResult") -> None:
    from meltcore.results.progress import print_check
    from meltcore.results.wording import evaluation_line

    if result.evaluation is not None:
        console.print(evaluation_line(result.evaluation))
    for gate in result.gates:
        print_check(console, gate)
    for note in result.notes:
        console.print(f"note: {note}", highlight=False)
    for reason in result.reasons:
        console.print(f"[red]{result.verdict}[/]: {reason}", highlight=False)
