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
    """Add the model, and the options of its engine, its server and its limits."""
    from meltcore.cli.start_options import add_daemon_options
    from meltcore.common.options import add_options, not_empty
    from meltcore.settings.config import EngineConfig
    from meltcore.settings.fleet_spec import HTTP_GROUP, LimitsSection, ServerSection, TimeoutsSection
    from meltcore.settings.server_config import ModelConfig

    parser.add_argument(
        "model",
        metavar="MODEL",
        type=not_empty,
        help="a checkpoint folder, a GGUF file, a NeMo archive, a hub id, or a bundled model: "
        "meltcore/sums, meltcore/sums-hybrid, meltcore/sums-gemma, meltcore/phrases (translates), "
        "meltcore/tones (transcribes), meltcore/voice (speaks)",
    )
    add_options(parser, EngineConfig)
    parser.add_argument_group(HTTP_GROUP).add_argument(
        "--api-key",
        type=not_empty,
        metavar="KEY",
        help="Bearer token that requests must send, except to /, /docs, /openapi.json, /health and /live (default: the "
        "environment variable MELTCORE_API_KEY).",
    )
    for config in (ModelConfig, ServerSection, LimitsSection, TimeoutsSection):
        add_options(parser, config)
    add_daemon_options(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal, or start a server in the background."""
    from meltcore.cli.start_options import start_daemon
    from meltcore.common.options import from_options
    from meltcore.common.process import loading_modules
    from meltcore.fleet.daemon import OneModel
    from meltcore.settings.config import EngineConfig
    from meltcore.settings.fleet_spec import KeySection, LimitsSection, ServerSection, TimeoutsSection
    from meltcore.settings.server_config import ModelConfig, ServerConfig

    with loading_modules():
        from meltcore.serve.requests.keys import DEFAULT_NAME, hash_key
        from meltcore.serve.tasks.generation.servable import check_servable

    limits = from_options(LimitsSection, args)
    engine = from_options(EngineConfig, args, model=args.model)
    model = from_options(ModelConfig, args, engine=engine, limits=limits)
    config = ServerConfig(
        models=(model,),
        server=from_options(ServerSection, args),
        keys=() if args.api_key is None else (KeySection(name=DEFAULT_NAME, sha256=hash_key(args.api_key)),),
        limits=limits,
        timeouts=from_options(TimeoutsSection, args),
    )
    check_servable(model)  # before a process starts, and before anything is printed
    if (status := start_daemon(args, config, OneModel())) is not None:
        return status
    with loading_modules():
        from meltcore.fleet.supervisor import serve

    return serve(config)
