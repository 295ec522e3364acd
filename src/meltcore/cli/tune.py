"""`meltcore tune`: find a server's limits and good settings by restarting it."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from meltcore.load.config import LoadConfig
    from meltcore.results.runfolder import RunFolder
    from meltcore.results.tuning import Tuning, TuningPoint
    from meltcore.tune.attempt import Bench

HELP = (
    "Restart a server with one setting after another and measure each. context: the largest context and the most "
    "sequences before memory runs out, beside the arithmetic. batching: sequences and token budgets, with the knee "
    "marked. precision: speed and answers of float16, bfloat16, fp8 weights and fp8 caches. Gains are counted from the "
    "server as it is shipped."
)
EXAMPLES = """\
  meltcore tune batching meltcore/sums --seqs 8,16,32,64 --tokens 1024,4096
  meltcore tune batching --run vllm.cmd --seqs 64,128,256 --concurrency 256 --slo ttft:2000,itl:50
  meltcore tune context ./my-checkpoint --length 4096
  meltcore tune precision ./my-checkpoint --gsm8k test.jsonl

vllm.cmd holds a command line, {args} where the settings go (the end, if it is not there):
  vllm serve ./my-checkpoint --port {port} {args}
Servers with other words for them: --flag seqs=-np --flag length=-c --flag tokens=-b
"""

EXIT_NOTHING = 1  # nothing ran, or nothing met the limits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from meltcore.cli.trial_options import add_load_options

    parser.add_argument("what", choices=("context", "batching", "precision"))
    parser.add_argument("checkpoint", nargs="?", metavar="MODEL", help="served by our engine")
    parser.add_argument("--run", metavar="FILE", help="command file of another server, with {port} and {args} in it")
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="more options of our engine, in one word")
    parser.add_argument("--flag", action="append", default=[], metavar="NAME=OPTION", help="another server's words")
    parser.add_argument("--out", default="runs", metavar="DIR", help="where the run folder goes (default: runs)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    batching = parser.add_argument_group("batching")
    batching.add_argument("--seqs", default="8,16,32,64,128,256", metavar="N,...", help="sequences at once to try")
    batching.add_argument("--tokens", default="", metavar="N,...", help="tokens a step to try (the server's own)")
    batching.add_argument("--slo", metavar="ttft:MS,itl:MS", help="limits that a setting must keep")
    context = parser.add_argument_group("context")
    context.add_argument("--length", type=int, default=2048, metavar="TOKENS", help="of the sequences counted (2048)")
    context.add_argument("--least", type=int, default=1024, metavar="TOKENS", help="shortest context tried (1024)")
    context.add_argument("--most", type=int, metavar="TOKENS", help="longest context tried (what the server says)")
    context.add_argument("--step", type=int, default=1024, metavar="TOKENS", help="how fine the search is (1024)")
    context.add_argument("--most-seqs", type=int, default=1024, metavar="N", help="most sequences tried (1024)")
    context.add_argument(
        "--config", metavar="FILE", help="config.json for the arithmetic (of MODEL, if it is a folder)"
    )
    context.add_argument("--kv-bytes", type=int, default=2, metavar="N", help="bytes of a cached number (2; fp8: 1)")
    precision = parser.add_argument_group("precision")
    precision.add_argument("--dtypes", default="float16,bfloat16", metavar="NAME,...", help="also float32, or none: ''")
    precision.add_argument("--no-fp8", action="store_true", help="do not try fp8 weights and caches")
    precision.add_argument(
        "--questions", type=int, default=200, metavar="N", help="bundled problems asked (200); 0: speed alone"
    )
    precision.add_argument("--gsm8k", metavar="FILE", help="items of GSM8K asked beside them, 200 at most")
    add_load_options(parser, concurrency="64")


def run(args: argparse.Namespace) -> int:
    import sys

    import msgspec
    from rich.console import Console

    from meltcore.cli.ending import signals_as_ctrl_c
    from meltcore.report.tune_output import print_tuning
    from meltcore.results.runfolder import RunFolder
    from meltcore.tune.run import save_tuning

    console = Console(stderr=args.json)
    _check(args)
    load = _load(args)
    seek = {"context": _context, "batching": _batching, "precision": _precision}[args.what]
    with signals_as_ctrl_c(), RunFolder.kept_if_used(args.out, f"tune-{args.what}") as folder:
        found = seek(args, _bench(args, console, folder), load)
    save_tuning(folder, found)
    console.print(f"report: {folder.report_path}", highlight=False, soft_wrap=True)
    if args.json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        print_tuning(found, console)
    return 0 if found.answered else EXIT_NOTHING


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError for a number that no start could come of."""
    from meltcore.errors import ConfigError
    from meltcore.load.config import parse_numbers
    from meltcore.tune.context import LEAST_LENGTH

    least = {"length": 2, "least": LEAST_LENGTH, "step": 1, "most_seqs": 1, "kv_bytes": 1, "questions": 0}
    if args.most is not None:
        least["most"] = LEAST_LENGTH
    for name, smallest in least.items():
        if getattr(args, name) < smallest:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} must be at least {smallest}; got {getattr(args, name)}")
    for name in ("seqs", "tokens"):
        text = getattr(args, name)
        if text and min(parse_numbers(text, f"--{name}", int)) < 1:
            raise ConfigError(f"--{name} must each be at least 1; got {text}")


def _load(args: argparse.Namespace) -> "LoadConfig":
    import dataclasses

    from meltcore.cli.trial_options import plan_of
    from meltcore.errors import ConfigError
    from meltcore.load.config import parse_slo

    load = plan_of(args, ()).load
    if len(load.levels) != 1:
        raise ConfigError("tune loads every setting alike: give one --concurrency")
    return dataclasses.replace(load, slo_ms={} if args.slo is None else parse_slo(args.slo))


def _bench(args: argparse.Namespace, console: "Console", folder: "RunFolder") -> "Bench":
    import shlex
    import sys

    from rich.markup import escape

    from meltcore.errors import ConfigError
    from meltcore.report.tune_rows import setting_of
    from meltcore.results.wording import number
    from meltcore.trials.command import parse_command, read_command
    from meltcore.tune.attempt import Bench, flags_of

    if (args.checkpoint is None) == (args.run is None):
        raise ConfigError("tune takes a MODEL for our engine, or --run FILE for another server")
    if args.run is not None:
        command = read_command(args.run)
    else:
        own = [sys.executable, "-m", "meltcore.cli.main", "serve", args.checkpoint]
        command = parse_command(f"{shlex.join(own)} --port {{port}} {args.serve} {{args}}", "--serve")

    def on_point(point: "TuningPoint") -> None:
        told = f"{number(point.output_tokens_per_s)} tok/s" if point.ok else point.why
        console.print(f"{escape(setting_of(point))}: {escape(told)}", highlight=False)

    return Bench(
        command=command,
        folder=folder.path,
        say=lambda text: console.print(escape(text), style="yellow", highlight=False),
        on_point=on_point,
        flags=flags_of(args.flag),
        arguments=tuple(sys.argv[1:]),
        start_limit_s=args.start_timeout,
    )


def _batching(args: argparse.Namespace, bench: "Bench", load: "LoadConfig") -> "Tuning":
    from meltcore.load.config import parse_numbers
    from meltcore.tune.batching import Sweep, best_and_knee, finding, sweep
    from meltcore.tune.run import tuning

    seqs = parse_numbers(args.seqs, "--seqs", int)
    tokens = parse_numbers(args.tokens, "--tokens", int) if args.tokens else ()
    points = sweep(bench, Sweep(seqs=seqs, tokens=tokens, load=load))
    return tuning("batching", bench, load, points, finding(points, *best_and_knee(points)))


def _context(args: argparse.Namespace, bench: "Bench", load: "LoadConfig") -> "Tuning":
    from pathlib import Path

    from meltcore.tune.arithmetic import cache_bytes_per_token, read_config
    from meltcore.tune.context import Wanted, facts, finding, search_context
    from meltcore.tune.run import tuning

    place = Path(args.config or args.checkpoint or "")
    config = read_config(place) if args.config or (args.checkpoint and place.is_dir()) else None
    wanted = Wanted(
        load=load,
        least_length=args.least,
        most_length=args.most,
        step=args.step,
        length=args.length,
        most_seqs=args.most_seqs,
        vocabulary=None if config is None else config.get("text_config", config).get("vocab_size"),
        bytes_per_token=None if config is None else cache_bytes_per_token(config, args.kv_bytes),
    )
    found = search_context(bench, wanted)
    return tuning("context", bench, load, found.points, finding(found, wanted), facts(found, wanted))


def _precision(args: argparse.Namespace, bench: "Bench", load: "LoadConfig") -> "Tuning":
    from pathlib import Path

    from meltcore.tune.precision import FP8_VARIANTS, bundled_questions, finding, gsm8k_questions, try_variants
    from meltcore.tune.run import tuning

    variants: dict[str, tuple[str, ...]] = {name: ("--dtype", name) for name in args.dtypes.split(",") if name}
    if not args.no_fp8:
        variants |= FP8_VARIANTS
    questions = bundled_questions(args.questions)
    if args.gsm8k is not None:
        questions += gsm8k_questions(Path(args.gsm8k), 200)
    points = try_variants(bench, variants, load, questions)
    return tuning("precision", bench, load, points, finding(points))
