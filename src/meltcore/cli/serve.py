"""`meltcore serve MODEL`: the OpenAI API over one model."""

import argparse

HELP = "serve a model through the OpenAI API"
EXAMPLES = """\
  meltcore serve meltcore/sums                           the bundled model, on any machine
  meltcore serve ./my-checkpoint --port 8080 --memory 40GiB
  meltcore serve Qwen/Qwen3-0.6B --served-model-name qwen small --api-key secret
  meltcore serve ./model.gguf                            weights, tokenizer and template of one file
  meltcore serve Qwen/Qwen3-30B-A3B-GGUF:Q8_0            one GGUF file of a hub repository
  meltcore serve ./config-only --load-format dummy       random weights of the configured shapes
  meltcore serve ./my-checkpoint -tp 8                   one model on eight GPUs
  meltcore serve ./my-checkpoint -dp 8                   a replica on each of eight GPUs, one port
  meltcore serve meltcore/sums --daemon                  in the background; `meltcore stop` ends it
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, and the options of EngineConfig, ModelConfig and ServerConfig."""
    from meltcore.config import EngineConfig, ModelConfig, ServerConfig
    from meltcore.options import add_options, not_empty, number

    parser.add_argument(
        "model",
        metavar="MODEL",
        type=not_empty,
        help="a checkpoint folder, a GGUF file, a NeMo archive, a hub id, or a bundled model: "
        "meltcore/sums, meltcore/sums-hybrid, meltcore/sums-gemma, meltcore/phrases (translates), "
        "meltcore/tones (transcribes), meltcore/voice (speaks)",
    )
    for config in (EngineConfig, ModelConfig, ServerConfig):
        add_options(parser, config)
    background = parser.add_argument_group("background")
    background.add_argument("--daemon", action="store_true", help="Start, wait until ready, and leave it running.")
    background.add_argument("--log", metavar="FILE", help="Output of a --daemon (default: a new file, printed).")
    background.add_argument(
        "--start-timeout",
        type=number(float, exclusive_minimum=0),
        metavar="S",
        help="Time for a --daemon to become ready, else it is ended (default: no limit).",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal, or start a server in the background."""
    from meltcore.config import EngineConfig, ModelConfig, ServerConfig
    from meltcore.options import from_options

    model = from_options(ModelConfig, args, engine=from_options(EngineConfig, args))
    config = from_options(ServerConfig, args, models=(model,))
    if args.daemon:
        from meltcore.cli.signals import signals_as_ctrl_c
        from meltcore.fleet.daemon import start

        with signals_as_ctrl_c():  # or a half-started server would be left, in a session of its own
            return start(config, log=args.log, limit_s=args.start_timeout)
    if args.log is not None or args.start_timeout is not None:
        from meltcore.errors import ConfigError

        raise ConfigError("--log and --start-timeout are for a server in the background: add --daemon")
    from meltcore.fleet.supervisor import serve

    return serve(config)
