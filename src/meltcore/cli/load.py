"""`meltcore load`: loads an OpenAI-compatible server and measures it."""

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from meltcore.load.config import LoadConfig
    from meltcore.results.runfolder import RunFolder
    from meltcore.results.schema import RunResult

HELP = "load an OpenAI-compatible server and measure throughput and latency"

EXAMPLES = """\
  meltcore load http://127.0.0.1:8000 --concurrency 10,100,400
  meltcore load http://127.0.0.1:8000 --concurrency 10000 --requests 10000 --processes 2
  meltcore load http://127.0.0.1:8000 --rate 5,10,20 --arrivals poisson --slo ttft:2000,tpot:100
  meltcore load http://127.0.0.1:8000 --workload random:in=128-1024,out=128 --requests 500
  meltcore load http://127.0.0.1:8000 --concurrency 1,32 --monitor
  meltcore load https://api.example.com --model NAME --api-key KEY --workload prompts.jsonl

workloads:
  problems:short|long|mixed      the bundled arithmetic problems; answers are marked
  random:in=128-1024,out=128     random token ids (vocab=N: ids below N; eos=1: let the model end early)
  FILE.jsonl                     one object a line: prompt, messages or prompt_token_ids; max_tokens, answer,
                                 temperature, ignore_eos, skip_special_tokens
"""

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
GPU_FILE = "gpus.jsonl"  # in the run folder: every sample of --monitor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="address of the server, with or without /v1")
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--concurrency", default="10", metavar="N,...", help="closed-loop levels (default: 10)")
    level.add_argument("--rate", metavar="R,...", help="open-loop levels, requests a second")
    parser.add_argument("--arrivals", choices=("poisson", "constant"), default="poisson", help="of an open loop")
    parser.add_argument("--requests", metavar="N,...", help="requests a level: one number for all, or one each")
    parser.add_argument("--warmup", type=int, metavar="N", help="requests before each level, kept out of its results")
    parser.add_argument("--workload", default="problems:short", help="what to ask (default: problems:short)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="output limit of prompts that name none")
    parser.add_argument("--model", help="default: the first one in /v1/models")
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument("--slo", metavar="ttft:MS,tpot:MS", help="limits of a good request; also itl, e2e")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="client processes (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default: 0)")
    parser.add_argument("--timeout", type=float, metavar="S", help="limit of one request (default: 1800 s)")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json to re-count a sample of answers with")
    parser.add_argument("--extra-body", metavar="JSON", help="fields for every request")
    parser.add_argument(
        "--no-continuous-usage", action="store_true", help="do not ask for token counts with every chunk"
    )
    parser.add_argument("--record-chunks", action="store_true", help="keep every chunk's time in requests.jsonl")
    parser.add_argument(
        "--monitor", action="store_true", help="GPU activity, power and memory under the latencies, on one clock"
    )
    parser.add_argument(
        "--gpu", metavar="ID,...", help="of --monitor: indices or UUIDs (default: what this job may use)"
    )
    parser.add_argument("--out", default="runs", metavar="DIR", help="where the run folder goes (default: runs)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    import msgspec
    from rich.console import Console

    from meltcore.cli.ending import signals_as_ctrl_c
    from meltcore.errors import ConfigError
    from meltcore.report import save
    from meltcore.results.runfolder import RunFolder
    from meltcore.results.tables import levels_table
    from meltcore.results.wording import reasons_to_distrust

    config = _config(args)
    if args.gpu is not None and not args.monitor:
        raise ConfigError("--gpu says which GPUs --monitor records: add --monitor")
    console = Console(stderr=args.json)
    with signals_as_ctrl_c(), RunFolder.kept_if_used(args.out, "load") as folder:
        result = _monitored(args, config, folder, console) if args.monitor else _measured(config, folder, console)
    save(folder, result)
    for reason in reasons_to_distrust(result):
        console.print(reason, style="yellow", markup=False, highlight=False)
    console.print(f"report: {folder.report_path}", highlight=False, soft_wrap=True)
    if args.json:
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    else:
        console.print(levels_table(result.levels))
    if result.verdict == "PARTIAL":
        return EXIT_INTERRUPTED
    return 0 if result.verdict in ("OK", "CLIENT_BOUND") else EXIT_FAILED


def _measured(config: "LoadConfig", folder: "RunFolder", console: "Console") -> "RunResult":
    from dataclasses import replace

    from meltcore.load.console import level_bars
    from meltcore.load.run import measure

    with level_bars(config.levels, console) as on_progress:
        return measure(replace(config, records_path=folder.requests_path), sys.argv[1:], on_progress)


def _monitored(args: argparse.Namespace, config: "LoadConfig", folder: "RunFolder", console: "Console") -> "RunResult":
    """As `_measured`, with the GPUs recorded meanwhile. Raises NoDriverError where there is nothing to record."""
    from meltcore.errors import MeltcoreError
    from meltcore.hardware.monitor import Monitor
    from meltcore.hardware.recording import read_recording
    from meltcore.hardware.sampler import Setup
    from meltcore.hardware.under_load import attach

    path = folder.path / GPU_FILE
    try:
        monitor = Monitor(Setup(path=str(path), gpus=args.gpu))
    except MeltcoreError:
        path.unlink(missing_ok=True)  # nothing was measured
        raise
    with monitor:
        result = _measured(config, folder, console)
        monitor.stop()
    result.notes += attach(result.levels, read_recording(path))
    return result


def _config(args: argparse.Namespace) -> "LoadConfig":
    """Raises ConfigError for a value out of its form or range."""
    from meltcore.load.config import LoadConfig, Timeouts, parse_extra_body, parse_numbers, parse_slo
    from meltcore.load.workload import check_workload

    check_workload(args.workload, max_tokens=args.max_tokens)
    requests = None if args.requests is None else parse_numbers(args.requests, "--requests", int)
    return LoadConfig(
        url=args.url,
        concurrency=parse_numbers(args.concurrency, "--concurrency", int),
        rates=() if args.rate is None else parse_numbers(args.rate, "--rate", float),
        arrivals=args.arrivals,
        requests=requests[0] if requests is not None and len(requests) == 1 else requests,
        warmup=args.warmup,
        workload=args.workload,
        max_tokens=args.max_tokens,
        model=args.model,
        api_key=args.api_key,
        seed=args.seed,
        slo_ms={} if args.slo is None else parse_slo(args.slo),
        processes=args.processes,
        timeouts=Timeouts() if args.timeout is None else Timeouts(total_s=args.timeout),
        continuous_usage=not args.no_continuous_usage,
        extra_body={} if args.extra_body is None else parse_extra_body(args.extra_body),
        tokenizer=args.tokenizer,
        record_chunks=args.record_chunks,
    )
