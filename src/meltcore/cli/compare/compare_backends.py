"""`meltcore compare-backends`: measure the same load on several servers, each in its own Python environment."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meltcore.measure.experiments.compare.backend_plan import BackendsPlan
    from meltcore.measure.experiments.compare.starts import StartOptions

HELP = (
    "Measure the same work on ours, vLLM, SGLang, llama.cpp and TensorRT-LLM, one after another: several sessions, "
    "a quantized model, batching, data parallel, a split model, load balanced. Each is started from its template with "
    "equal settings, loaded with the same prompts, and ended. What is missing or does not start is "
    '"not measured", with its reason; failed requests are shown with their share and reason. The best of each set-up '
    "and model is named, with nine aspects."
)
EXAMPLES = """\
  meltcore compare-backends Qwen/Qwen3-0.6B --python vllm=/opt/vllm/bin/python
  meltcore compare-backends Qwen/Qwen3-0.6B --backends meltcore,llama.cpp --checkpoint llama.cpp=qwen3.gguf
  meltcore compare-backends Qwen/Qwen3-0.6B --quantized qwen3-q8_0.gguf --set-ups quantized
  meltcore compare-backends Qwen/Qwen3-0.6B --add theirs=http://10.0.0.5:8000 --set-ups sessions,batching

exit status: 0 something was measured, 1 nothing was, 2 could not run, 130 interrupted
"""
METRICS = ("output_tokens_per_s", "ttft_ms", "itl_ms")
LEVELS, WORKLOAD = "1,16,64,256", "random:in=128-1024,out=128"
EXIT_NOTHING = 1
_PAIRS = {  # by flag: metavar, help
    "--checkpoint": ("NAME=PATH", "The model's file for one backend, such as a GGUF file for llama.cpp."),
    "--python": ("NAME=PATH", "Python interpreter of the environment that has the backend."),
    "--command": (
        "NAME=TEXT",
        "Command line in place of the template's, with {checkpoint}, {port} and {name}; {args} stands for its flags.",
    ),
    "--args": ("NAME=TEXT", "Arguments added to a backend's command."),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the model, and the options for the backends, their settings and the load."""
    from meltcore.common.options import add_options, number
    from meltcore.measure.load.config import LoadConfig, parse_numbers
    from meltcore.settings.server_templates import TEMPLATES

    parser.add_argument("model", metavar="MODEL", help="Checkpoint of the model: a folder, a file or a hub id.")
    group = parser.add_argument_group("backends")
    group.add_argument(
        "--backends",
        default=",".join(TEMPLATES),
        metavar="NAME,...",
        help=f"Backends to start (default: {','.join(TEMPLATES)}).",
    )
    group.add_argument(
        "--add", action="append", default=[], metavar="NAME=URL", help="Measure a server that runs already, too."
    )
    for flag, (metavar, text) in _PAIRS.items():
        group.add_argument(flag, action="append", default=[], metavar=metavar, help=text)
    group.add_argument(
        "--env", action="append", default=[], metavar="NAME=VAR=VALUE", help="Environment variable of a backend."
    )
    group.add_argument(
        "--start-timeout",
        type=number(float, exclusive_minimum=0),
        default=900.0,
        metavar="S",
        help="Time limit from the start of a server to its first answer (default: 900).",
    )
    group = parser.add_argument_group("set-ups")
    group.add_argument("--set-ups", metavar="NAME,...", help="Set-ups to measure (default: all six).")
    group.add_argument(
        "--skip", action="append", default=[], metavar="NAME=SET-UP", help="Leave a backend out of a set-up."
    )
    group.add_argument(
        "--quantized",
        action="append",
        default=[],
        metavar="[NAME=]PATH",
        help="Quantized checkpoint, of all backends or of one.",
    )
    group.add_argument(
        "--sessions",
        type=number(int, minimum=1),
        default=16,
        metavar="N",
        help="Highest concurrency that counts as several sessions; above it is batching (default: 16).",
    )
    group = parser.add_argument_group("equal settings")
    for flag, text in (
        ("--max-model-len", "Context length in tokens (default: 2048)."),
        ("--max-num-seqs", "Sequences per step (default: the highest concurrency)."),
        ("--max-num-batched-tokens", "Tokens per step (default: 8192)."),
        ("--api-server-count", "API server processes (default: one per four cores, at most 4)."),
    ):
        group.add_argument(flag, type=number(int, minimum=1), metavar="N", help=text)
    group.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights.")
    add_options(
        parser,
        LoadConfig,
        *("concurrency", "num_prompts", "workload", "max_tokens", "seed", "processes"),
        group="load",
        defaults={"concurrency": parse_numbers(LEVELS, "--concurrency", int), "workload": WORKLOAD},
    )
    group = parser.add_argument_group("output")
    group.add_argument("--out", default="runs", metavar="DIR", help="Parent of the run folder (default: runs).")
    group.add_argument("--json", action="store_true", help="Print the result as JSON instead of tables.")


def run(args: argparse.Namespace) -> int:
    """Make all runs, print the result, and return the exit status."""
    import sys

    import msgspec
    from rich.console import Console

    from meltcore.cli.signals import signals_as_ctrl_c
    from meltcore.measure.documents.runfolder import RunFolder
    from meltcore.measure.experiments.compare.backend_runs import run_backends
    from meltcore.measure.report.comparisons.backends import backends_page
    from meltcore.measure.report.page.console import print_page

    plan, options = _plan(args)
    console = Console(stderr=True)
    with signals_as_ctrl_c(), RunFolder.create_or_remove(args.out, "compare-backends") as folder:
        comparison = run_backends(plan, options, folder, console)
    if args.json:
        sys.stdout.write(msgspec.json.encode(comparison).decode() + "\n")
    else:
        print_page(backends_page(comparison), Console())
    console.print(f"report: {folder.report_path}", highlight=False, soft_wrap=True)
    return 0 if any(made.levels for made in comparison.runs) else EXIT_NOTHING


def _plan(args: argparse.Namespace) -> "tuple[BackendsPlan, StartOptions]":
    """Return the plan that the command line describes, and the load of each run.

    Raises ConfigError for invalid names and values, and if a workload cannot be opened.
    """
    import os
    import sys
    from typing import get_args

    from meltcore.common.errors import ConfigError
    from meltcore.common.gpus.machine import visible_gpus
    from meltcore.common.options import from_options
    from meltcore.measure.documents.backends import SetUp
    from meltcore.measure.documents.fingerprint import take_fingerprint
    from meltcore.measure.experiments.compare.backend_plan import BackendsPlan, EqualSettings, parse_pair, read_options
    from meltcore.measure.experiments.compare.starts import StartOptions
    from meltcore.measure.load.config import LoadConfig
    from meltcore.measure.load.tasks.task import check_workload

    known = get_args(SetUp)
    set_ups = tuple(args.set_ups.split(",")) if args.set_ups is not None else known
    for set_up in set_ups:
        if set_up not in known:
            raise ConfigError(f"--set-ups: {set_up!r} is unknown; there are {', '.join(known)}")
    backends = tuple(name for name in args.backends.split(",") if name)
    gpus = take_fingerprint().gpus
    cores = len(os.sched_getaffinity(0))
    common = [text for text in args.quantized if text.partition("=")[0] not in backends]
    if len(common) > 1:
        raise ConfigError(f"--quantized is given twice for all backends: {common[0]} and {common[1]}")
    # Of each backend, which the text names, as in vllm=VALUE.
    values_by_flag = {
        flag: getattr(args, flag.removeprefix("--")) for flag in (*_PAIRS, "--quantized", "--env", "--skip")
    }
    values_by_flag["--quantized"] = [text for text in args.quantized if text not in common]
    plan = BackendsPlan(
        model=args.model,
        quantized=common[0] if common else None,
        backends=backends,
        running=dict(parse_pair(text, "--add") for text in args.add),
        set_ups=set_ups,
        settings=EqualSettings(
            max_model_len=args.max_model_len or 2048,
            max_num_seqs=args.max_num_seqs or max(args.concurrency),
            max_num_batched_tokens=args.max_num_batched_tokens or 8192,
            api_server_count=args.api_server_count or min(4, max(1, cores // 4)),
            load_format=args.load_format,
        ),
        options=read_options(values_by_flag, backends),
        gpus=tuple(visible_gpus()),
        max_session_concurrency=args.sessions,
        gpu_memory_bytes=min((gpu.memory_bytes for gpu in gpus), default=None),
    )
    if len(set(args.concurrency)) != len(args.concurrency):
        raise ConfigError(f"--concurrency: each level once; got {','.join(map(str, args.concurrency))}")
    # Token counts come once, at the end of an answer: with every event they would cost some servers more than others.
    load = from_options(LoadConfig, args, url="", model=None, continuous_usage=False)
    check_workload(load)
    return plan, StartOptions(load=load, start_limit_s=args.start_timeout, arguments=tuple(sys.argv[1:]))
