"""`meltcore serve MODEL`: the OpenAI API over one model."""

import argparse
import re
from typing import get_args

HELP = "serve a model through the OpenAI API"
EXAMPLES = """\
  meltcore serve meltcore/sums                           the bundled model, on what the machine has
  meltcore serve ./my-checkpoint --port 8080 --memory 40GiB
  meltcore serve Qwen/Qwen3-0.6B --served-model-name qwen small --api-key secret
  meltcore serve ./config-only --load-format dummy       random weights of the configured shapes
  meltcore serve ./my-checkpoint --tp 8                  one model on eight GPUs
  meltcore serve ./my-checkpoint --dp 8                  a replica on each of eight GPUs, one port
  meltcore serve meltcore/sums --daemon                  leave it running; `meltcore stop` ends it
"""

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?|B)?", re.IGNORECASE)


def size_bytes(text: str) -> int:
    """A size like 40GiB, 512M or 1000000. Units are powers of 1024."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it like 40GiB, 512MiB or 1000000")
    return int(float(found[1]) * _UNITS[(found[2] or "").upper()])


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def not_negative(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def seed_number(text: str) -> int:
    """A seed, as torch takes it."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**63 - 1}")
    return int(text)


def not_empty(text: str) -> str:
    """What a variable of the shell that is not set would leave empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is empty")
    return text


def seconds(text: str) -> float:
    """A finite time of at least 0 seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of at least 0")
    return value


def positive_seconds(text: str) -> float:
    """A finite time of more than 0 seconds."""
    value = seconds(text)
    if not value:
        raise argparse.ArgumentTypeError("0 seconds would end every request at once")
    return value


def port_number(text: str) -> int:
    """A TCP port; 0 lets the system pick one."""
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a checkpoint folder, a hub id, or a bundled one: meltcore/sums, meltcore/sums-hybrid",
    )
    _add_engine_arguments(parser.add_argument_group("engine"))
    _add_http_arguments(parser.add_argument_group("HTTP"))
    _add_limit_arguments(parser.add_argument_group("limits"))
    _add_daemon_arguments(parser.add_argument_group("in the background"))


def _add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    from meltcore.config import DebugSwitch

    group.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    group.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    group.add_argument(
        "--quantization",
        choices=("none", "fp8"),
        default="none",
        help="fp8: linear layers in 8 bits, quantised while loading; GPUs from compute capability 8.9 on",
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="fp8: keys and values in 8 bits, twice as many tokens; GPUs from compute capability 8.9 on",
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--max-model-len", type=positive, metavar="TOKENS", help="prompt and answer together")
    group.add_argument(
        "--max-num-seqs",
        type=positive,
        metavar="N",
        help="sequences a step (1024; CPU: 256; fewer where their recurrent states would take half of the room)",
    )
    group.add_argument(
        "--max-num-batched-tokens", type=positive, metavar="TOKENS", help="tokens a step (8192; CPU: 2048)"
    )
    group.add_argument(
        "--tp", type=int, choices=(1, 2, 4, 8), default=1, help="GPUs that share one model, each a part of it (1)"
    )
    group.add_argument(
        "--dp",
        type=positive,
        default=1,
        metavar="N",
        help="replicas behind the one port, each on GPUs of its own (1); what a dead one worked on fails, others go on",
    )
    group.add_argument("--memory", type=size_bytes, metavar="SIZE", help="all it may take of each GPU, like 40GiB")
    group.add_argument("--seed", type=seed_number, default=0, help="of dummy weights, and of requests without one")
    group.add_argument(
        "--debug",
        action="append",
        default=[],
        choices=get_args(DebugSwitch),
        help="for bisecting, the last one for benchmarks of experts on dummy weights; can be given several times",
    )


def _add_http_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--served-model-name",
        type=not_empty,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="names to be called by",
    )
    group.add_argument("--host", type=not_empty, default="127.0.0.1")
    group.add_argument("--port", type=port_number, default=8000, help="0 lets the system pick one (8000)")
    group.add_argument(
        "--fronts", type=positive, metavar="N", help="front processes on the port (1 for every 4 cores, at most 4)"
    )
    group.add_argument(
        "--api-key", type=not_empty, metavar="KEY", help="asked for everywhere but at /health, /live and /metrics"
    )
    group.add_argument(
        "--cors-origin", action="append", default=[], metavar="ORIGIN", help="a web origin to allow; several times"
    )
    group.add_argument("--log-format", choices=("text", "json"), default="text", help="of the line a request")
    group.add_argument(
        "--generation-config",
        choices=("greedy", "model"),
        default="greedy",
        help="model: take the sampling defaults of the checkpoint's generation_config.json",
    )
    group.add_argument("--profile-dir", metavar="DIR", help="enables /start_profile and /stop_profile")


def _add_limit_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-queue", type=not_negative, default=16_384, metavar="N", help="requests waiting (16384)")
    group.add_argument(
        "--max-queue-tokens", type=positive, default=16_777_216, metavar="TOKENS", help="prompt tokens waiting (2^24)"
    )
    group.add_argument(
        "--request-timeout", type=positive_seconds, default=600.0, metavar="S", help="for one answer (600)"
    )
    group.add_argument("--drain-timeout", type=seconds, default=30.0, metavar="S", help="after SIGTERM or SIGHUP (30)")
    group.add_argument("--max-body", type=size_bytes, default=8 * 2**20, metavar="SIZE", help="of a request (8MiB)")


def _add_daemon_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--daemon", action="store_true", help="start it, wait until it is ready, leave it running")
    group.add_argument("--log", metavar="FILE", help="its output (default: a file of its own, which is printed)")
    group.add_argument(
        "--start-timeout",
        type=positive_seconds,
        metavar="S",
        help="until it must be ready, else it is ended (no limit)",
    )


def run(args: argparse.Namespace) -> int:
    from meltcore.config import EngineConfig, ServerConfig

    engine = EngineConfig(
        model=args.model,
        load_format=args.load_format,
        dtype=args.dtype,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        device=args.device,
        tp=args.tp,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        memory_bytes=args.memory,
        seed=args.seed,
        debug=tuple(args.debug),
    )
    config = ServerConfig(
        engine=engine,
        served_model_names=tuple(args.served_model_name),
        host=args.host,
        port=args.port,
        dp=args.dp,
        fronts=args.fronts,
        max_queue=args.max_queue,
        max_queue_tokens=args.max_queue_tokens,
        request_timeout_s=args.request_timeout,
        drain_timeout_s=args.drain_timeout,
        api_key=args.api_key,
        max_body_bytes=args.max_body,
        cors_origins=tuple(args.cors_origin),
        log_format=args.log_format,
        generation_config=args.generation_config,
        profile_dir=args.profile_dir,
    )
    if args.daemon:
        from meltcore.cli.ending import signals_as_ctrl_c
        from meltcore.server.daemon import start

        with signals_as_ctrl_c():  # or a server that is half started would be left, in a session of its own
            return start(config, log=args.log, limit_s=args.start_timeout)
    if args.log is not None or args.start_timeout is not None:
        from meltcore.errors import ConfigError

        raise ConfigError("--log and --start-timeout are for a server in the background: add --daemon")
    from meltcore.server.run import serve

    return serve(config)
