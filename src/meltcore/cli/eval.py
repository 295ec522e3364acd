"""`meltcore eval`: evaluate a server's answers, API conformance and throughput, and score the server."""

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from meltcore.measure.documents.runfolder import RunFolder
    from meltcore.measure.documents.schema import RunResult

HELP = """\
Evaluate a server's answers (arithmetic problems, GSM8K), API conformance and throughput, and score it: throughput at
concurrency 1 to 64, weighted 1, 1, 2, 2, 4, 4, 8, and zero where too few answers are correct."""
EXAMPLES = """\
  meltcore eval http://127.0.0.1:8000                    conformance
  meltcore eval problems http://127.0.0.1:8000 --min-accuracy 0.95
  meltcore eval gsm8k https://example.com/v1 --data test.jsonl --model my-model --api-key $KEY
  meltcore eval throughput http://127.0.0.1:8000 --tokenizer Qwen/Qwen3-0.6B
  meltcore eval throughput http://127.0.0.1:8000 --speed-only --output-len 277
  meltcore eval all http://127.0.0.1:8000 --data test.jsonl --tokenizer MODEL_FOLDER
  meltcore eval score runs/GSM8K_RUN runs/THROUGHPUT_RUN
  meltcore eval baseline http://127.0.0.1:8001 --data test.jsonl --tokenizer MODEL_FOLDER \\
      --command '/opt/vllm/bin/vllm serve MODEL_FOLDER --port 8001'
"""

DEFAULT_SUBCOMMAND = "conformance"  # of an address alone

_EVALUATION_HELP = {
    "conformance": "Check the API: PASS or FAIL per check.",
    "problems": "Ask 200 held-out arithmetic problems.",
    "gsm8k": "Ask GSM8K with chain of thought; the gate is 87.5 %.",
    "throughput": "Run levels of load; answers and token counts are checked.",
    "all": "Run conformance, gsm8k and throughput, and compute the score.",
    "baseline": "Run all of it against another server, which a command starts.",
    "score": "Compute the score of runs that were made one by one.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand per evaluation, with its options."""
    evaluations = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, help_text in _EVALUATION_HELP.items():
        subparser = evaluations.add_parser(
            name, help=help_text.replace("%", "%%"), description=help_text, allow_abbrev=False
        )
        _add_options(subparser, name)
        subparser.add_argument("--out", default="runs", metavar="DIR", help="Parent of the run folder (default: runs).")


def _add_options(parser: argparse.ArgumentParser, evaluation: str) -> None:
    from meltcore.common.options import add_options, number
    from meltcore.measure.experiments.evals.config import Gsm8kConfig, ThroughputConfig

    if evaluation == "score":
        parser.add_argument("runs", nargs="+", metavar="RUN", help="Run folders: of gsm8k and throughput, or of all.")
        return
    parser.add_argument("url", metavar="URL", help="Address of the server, with or without /v1.")
    if evaluation in ("throughput", "all", "baseline"):
        add_options(parser, ThroughputConfig, defaults={"seed": None})
    else:
        add_options(parser, ThroughputConfig, "model", "api_key")
    if evaluation == "problems":
        add_options(parser, Gsm8kConfig, "concurrency", group="problems")
        parser.add_argument(
            "--min-accuracy",
            type=number(float, minimum=0, maximum=1),
            metavar="RATIO",
            help="Exit 1 below this accuracy.",
        )
    if evaluation in ("gsm8k", "all", "baseline"):
        add_options(parser, Gsm8kConfig)
    if evaluation == "gsm8k":
        parser.add_argument(
            "--harness", metavar="PYTHON", help="A Python with lm-eval: asks the same, compared item by item."
        )
    if evaluation == "baseline":
        parser.add_argument(
            "--command", required=True, metavar="CMD", help="Starts the server at URL, and runs as long as it does."
        )
        parser.add_argument(
            "--start-timeout",
            type=number(float, exclusive_minimum=0),
            default=900.0,
            metavar="S",
            help="Time limit for the server to become ready in seconds (default: 900).",
        )


def run(args: argparse.Namespace) -> int:
    """Run an evaluation, save and print the result, and return the exit status."""
    from rich.console import Console

    from meltcore.cli.signals import signals_as_ctrl_c
    from meltcore.measure.documents.runfolder import RunFolder
    from meltcore.measure.report.render import save_document

    console = Console()
    # Ended by `timeout`, a job's end or a hang-up, it must leave no server and no harness behind.
    with signals_as_ctrl_c(), RunFolder.create_or_remove(args.out, f"eval-{args.what}") as folder:
        result = _measure(args, console, folder)
        try:
            save_document(folder.result_path, result)
        finally:  # if the disk is full, the terminal still shows the result
            _print_result(console, result)
    console.print(f"report: {folder.report_path}", highlight=False, soft_wrap=True)
    # Answers without text are a load, and no evaluation.
    return 1 if result.verdict == "NO_TEXT" else result.exit_code


def _measure(args: argparse.Namespace, console: "Console", folder: "RunFolder") -> "RunResult":
    """Run the chosen evaluation, and show its progress."""
    import secrets

    from meltcore.common.options import from_options
    from meltcore.measure.documents.values.progress import answer_progress, print_check
    from meltcore.measure.experiments.evals.config import CONCURRENCY, EvaluationConfig, Gsm8kConfig, ThroughputConfig
    from meltcore.measure.experiments.evals.evaluation import check_config, run_baseline, run_evaluation, score_runs
    from meltcore.measure.experiments.evals.gsm8k import run_gsm8k
    from meltcore.measure.experiments.evals.run import run_eval
    from meltcore.measure.experiments.evals.throughput import run_throughput

    arguments = sys.argv[1:]
    if args.what == "score":
        return score_runs(args.runs)
    if args.what in ("conformance", "problems"):
        with answer_progress(console, args.what == "problems") as on_answer:
            return run_eval(
                args.url,
                args.what,
                model=args.model,
                api_key=args.api_key,
                min_accuracy=getattr(args, "min_accuracy", None),
                concurrency=getattr(args, "concurrency", CONCURRENCY),
                arguments=arguments,
                on_answer=on_answer,
                on_check=lambda check: print_check(console, check),
            )
    if args.what == "gsm8k":
        with answer_progress(console, description="GSM8K") as on_answer:
            return run_gsm8k(
                args.url,
                from_options(Gsm8kConfig, args),
                harness=args.harness,
                model=args.model,
                api_key=args.api_key,
                arguments=arguments,
                on_answer=on_answer,
                folder=folder.path,
            )
    args.tokenizer = _tokenizer(args, console)
    seed = secrets.randbits(32) if args.seed is None else args.seed
    throughput = from_options(ThroughputConfig, args, seed=seed)
    if args.what == "throughput":
        return run_throughput(throughput, folder.path, arguments, console)
    config = from_options(EvaluationConfig, args, throughput=throughput)
    check_config(config)
    if args.what == "all":
        return run_evaluation(config, folder.path, console, arguments)
    return run_baseline(config, args.command, folder.path, console, arguments, args.start_timeout)


def _tokenizer(args: argparse.Namespace, console: "Console") -> str | None:
    """Return the path of the tokenizer: of --tokenizer, or else of the served model if its name leads to one."""
    from meltcore.common.errors import ConfigError
    from meltcore.measure.experiments.servers import Api
    from meltcore.models.checkpoints.checkpoint import find_tokenizer

    if args.tokenizer is not None:
        return find_tokenizer(args.tokenizer)
    if args.speed_only:
        return None
    model, _ = Api(args.url, api_key=args.api_key).resolve_model(args.model)
    try:
        path = find_tokenizer(model)
    except ConfigError as error:
        raise ConfigError(
            f"give --tokenizer, or --speed-only: none is found by the served model's name: {error}"
        ) from error
    console.print(f"tokenizer: the one of the served model, {model}", style="dim", highlight=False)
    return path


def _print_result(console: "Console", result: "RunResult") -> None:
    from rich.markup import escape

    from meltcore.measure.documents.values.formatting import (
        caution_lines,
        eval_score_line,
        evaluation_line,
        level_warnings,
        weighted_throughput_line,
    )
    from meltcore.measure.documents.values.progress import print_check
    from meltcore.measure.report.load.levels import throughput_table
    from meltcore.measure.report.page.console import print_table

    if result.levels:
        print_table(throughput_table(result.levels), console)
    if result.evaluation is not None:
        console.print(evaluation_line(result.evaluation))
    for gate in result.gates:
        print_check(console, gate)
    for note in result.notes:
        console.print(f"note: {escape(note)}", highlight=False)
    for reason in result.reasons:
        console.print(f"[red]{result.verdict}[/]: {escape(reason)}", highlight=False)
    for reason in [*level_warnings(result.levels), *caution_lines(result.levels)]:
        console.print(reason, style="yellow", markup=False, highlight=False)
    if result.weighted_throughput is not None:
        console.print(weighted_throughput_line(result.weighted_throughput), highlight=False)
    if result.eval_score is not None:
        console.print(eval_score_line(result.eval_score), highlight=False, markup=False)
