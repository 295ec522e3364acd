"""`meltcore eval`: check any server's answers, API forms and speed, and score it."""

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from meltcore.evals import ThroughputConfig
    from meltcore.results.runfolder import RunFolder
    from meltcore.results.schema import RunResult

HELP = """\
Check a server's answers (arithmetic problems, GSM8K), its API forms and its speed, and score it: throughput at 1 to 64
requests at once, weighted 1, 1, 2, 2, 4, 4, 8, and zero where too few answers are right."""
EXAMPLES = """\
  meltcore eval conformance http://127.0.0.1:8000
  meltcore eval problems http://127.0.0.1:8000 --at-least 0.95
  meltcore eval gsm8k https://example.com/v1 --data test.jsonl --model my-model --api-key $KEY
  meltcore eval throughput http://127.0.0.1:8000 --tokenizer MODEL_FOLDER
  meltcore eval throughput http://127.0.0.1:8000 --speed-only --output-tokens 277
  meltcore eval all http://127.0.0.1:8000 --data test.jsonl --tokenizer MODEL_FOLDER
  meltcore eval score runs/GSM8K_RUN runs/THROUGHPUT_RUN
  meltcore eval baseline http://127.0.0.1:8001 --data test.jsonl --tokenizer MODEL_FOLDER \\
      --command '/opt/vllm/bin/vllm serve MODEL_FOLDER --port 8001'
"""

# The load client at its limit is a doubt about the numbers, not a fault of the server.
_EXIT_CODES = {"OK": 0, "CLIENT_BOUND": 0, "PARTIAL": 130}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, text, parts in (
        ("conformance", "the API's forms and errors, PASS or FAIL each", (_add_server,)),
        ("problems", "200 held-out arithmetic problems", (_add_server, _add_asking, _add_problems)),
        ("gsm8k", "GSM8K with chain of thought, gate 87.5 %%", (_add_server, _add_asking, _add_gsm8k, _add_harness)),
        ("throughput", "levels of load, answers and token counts checked", (_add_server, _add_levels, _add_load)),
        ("all", "conformance, gsm8k, throughput and the score", (_add_server, _add_asking, _add_gsm8k, _add_load)),
        (
            "baseline",
            "all of it, of another server that a command starts",
            (_add_server, _add_asking, _add_gsm8k, _add_load, _add_command),
        ),
        ("score", "the score of runs that were made one by one", (_add_runs,)),
    ):
        kind = kinds.add_parser(name, help=text, description=text, allow_abbrev=False)
        for add in (*parts, _add_out):
            add(kind)


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the server's address, with or without /v1")
    parser.add_argument("--model", help="the model's name (default: the first that /v1/models lists)")
    parser.add_argument("--api-key", help="sent as a bearer token")


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="runs", metavar="DIR", help="where run folders go (default: runs)")


def _add_asking(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--concurrency", type=int, default=8, metavar="N", help="problems asked at once (default: 8)")


def _add_problems(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--at-least", type=float, metavar="SHARE", help="exit 1 below this share right")


def _add_gsm8k(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        default="openai/gsm8k",
        metavar="JSONL",
        help="GSM8K's problems: a file or its folder, meltcore/problems, or one of the hub (default: openai/gsm8k)",
    )
    parser.add_argument(
        "--shots", metavar="FILE", help="eight worked examples, or none (default: lm-eval's, else our own)"
    )
    parser.add_argument("--limit", type=int, default=200, metavar="N", help="ask the first N problems (default: 200)")


def _add_harness(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--harness", metavar="PYTHON", help="a Python with lm-eval: asks the same, compared item by item"
    )


def _add_levels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--levels", default="1,2,4,8,16,32,64", metavar="N,...", help="requests at once (default: %(default)s)"
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="a level (default: 64)")
    parser.add_argument("--input-tokens", type=int, default=1024, metavar="N", help="of each prompt (default: 1024)")
    parser.add_argument("--output-tokens", type=int, default=1024, metavar="N", help="at most (default: 1024)")
    parser.add_argument("--fixed-output", action="store_true", help="exactly that many: end tokens are ignored")
    parser.add_argument("--tokenizer", metavar="PATH", help="the model's tokenizer.json or its folder")
    parser.add_argument("--reuse-prompts", action="store_true", help="the same 128 prompts at every level")
    parser.add_argument(
        "--no-stream", action="store_true", help="whole answers, as the public harness asks: no TTFT, no ITL"
    )
    parser.add_argument(
        "--no-continuous-usage", action="store_true", help="do not ask for token counts with every chunk"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the prompts (default: a new one each run)")
    parser.add_argument(
        "--speed-only",
        action="store_true",
        help="token ids in, fixed output, answers unchecked and no score; ids of --tokenizer or below 30,000",
    )


def _add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--command", required=True, metavar="CMD", help="starts the server that will be at URL, and stays while it runs"
    )
    parser.add_argument(
        "--start-limit", type=float, default=900.0, metavar="S", help="until it must be ready (default: 900)"
    )


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders: gsm8k's and throughput's, or all's")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from meltcore.cli.ending import signals_as_ctrl_c
    from meltcore.report import save
    from meltcore.results.runfolder import RunFolder

    _check(args)
    console = Console()
    measure = {"throughput": _throughput, "all": _whole, "baseline": _whole}.get(args.what, _short)
    # Ended by `timeout`, a job's end or a dropped session, no server and no harness may be left behind.
    with signals_as_ctrl_c(), RunFolder.kept_if_used(args.out, "eval") as folder:
        result = measure(args, console, folder)
        save(folder, result)
    _print(console, result)
    console.print(f"report: {folder.report_path}", highlight=False, soft_wrap=True)
    return _EXIT_CODES.get(result.verdict, 1)


def _check(args: argparse.Namespace) -> None:
    from meltcore.errors import ConfigError

    for name in ("concurrency", "limit"):
        if getattr(args, name, 1) < 1:
            raise ConfigError(f"--{name} must be at least 1; got {getattr(args, name)}")
    share = getattr(args, "at_least", None)
    if share is not None and not 0 <= share <= 1:
        raise ConfigError(f"--at-least is a share from 0 to 1, such as 0.95; got {share:g}")
    if not getattr(args, "start_limit", 1) > 0:
        raise ConfigError(f"--start-limit is a number of seconds above 0; got {args.start_limit:g}")


def _short(args: argparse.Namespace, console: "Console", folder: "RunFolder") -> "RunResult":
    """What puts no load on a server."""
    if args.what == "score":
        from meltcore.evals import score_runs

        return score_runs(args.runs)
    return _gsm8k(args, console, folder) if args.what == "gsm8k" else _answers_or_forms(args, console)


def _answers_or_forms(args: argparse.Namespace, console: "Console") -> "RunResult":
    from meltcore.evals import run_eval
    from meltcore.evals.problems import CONCURRENCY
    from meltcore.results.progress import answers_bar, print_check

    with answers_bar(console, args.what == "problems") as on_answer:
        return run_eval(
            args.url,
            args.what,
            model=args.model,
            api_key=args.api_key,
            at_least=getattr(args, "at_least", None),
            concurrency=getattr(args, "concurrency", CONCURRENCY),
            arguments=sys.argv[1:],
            on_answer=on_answer,
            on_check=lambda check: print_check(console, check),
        )


def _gsm8k(args: argparse.Namespace, console: "Console", folder: "RunFolder") -> "RunResult":
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
            folder=folder.path,
        )


def _throughput(args: argparse.Namespace, console: "Console", folder: "RunFolder") -> "RunResult":
    from meltcore.evals import run_throughput
    from meltcore.evals.throughput import load_config
    from meltcore.load.config import parse_numbers
    from meltcore.load.console import level_bars
    from meltcore.results.progress import quietly

    config = _throughput_config(args, levels=parse_numbers(args.levels, "--levels", int))
    with level_bars(load_config(config, "", folder.path).levels, console) as on_progress:
        return run_throughput(config, folder.path, sys.argv[1:], on_progress, say=quietly(console))


def _throughput_config(args: argparse.Namespace, **settings: "tuple[int, ...]") -> "ThroughputConfig":
    import secrets

    from meltcore.evals import ThroughputConfig

    return ThroughputConfig(
        url=args.url,
        requests=args.requests,
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        fixed_output=args.fixed_output,
        reuse_prompts=args.reuse_prompts,
        speed_only=args.speed_only,
        stream=not args.no_stream,
        continuous_usage=not args.no_continuous_usage,
        tokenizer=args.tokenizer,
        seed=secrets.randbits(32) if args.seed is None else args.seed,
        model=args.model,
        api_key=args.api_key,
        **settings,
    )


def _whole(args: argparse.Namespace, console: "Console", folder: "RunFolder") -> "RunResult":
    from meltcore.evals import WholeConfig, run_baseline, run_whole

    config = WholeConfig(
        throughput=_throughput_config(args),
        data=args.data,
        shots=args.shots,
        limit=args.limit,
        concurrency=args.concurrency,
    )
    config.check()
    if args.what == "all":
        return run_whole(config, folder.path, console, sys.argv[1:])
    return run_baseline(config, args.command, folder.path, console, sys.argv[1:], args.start_limit)


def _print(console: "Console", result: "RunResult") -> None:
    from rich.markup import escape

    from meltcore.results.progress import print_check
    from meltcore.results.tables import throughput_table
    from meltcore.results.wording import eval_score_line, evaluation_line, levels_to_distrust, speed_sum_line

    if result.levels:
        console.print(throughput_table(result.levels))
    if result.evaluation is not None:
        console.print(evaluation_line(result.evaluation))
    for gate in result.gates:
        print_check(console, gate)
    for note in result.notes:
        console.print(f"note: {escape(note)}", highlight=False)
    for reason in result.reasons:
        console.print(f"[red]{result.verdict}[/]: {escape(reason)}", highlight=False)
    for reason in levels_to_distrust(result.levels):
        console.print(reason, style="yellow", markup=False, highlight=False)
    if result.speed_sum is not None:
        console.print(speed_sum_line(result.speed_sum), highlight=False)
    if result.eval_score is not None:
        console.print(eval_score_line(result.eval_score), highlight=False, markup=False)
