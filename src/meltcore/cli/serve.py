"""`meltcore serve MODEL`: serve one model through the OpenAI API."""

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meltcore.common.tasks import Task
    from meltcore.settings.fleet_spec import ModelSection

HELP = "Serve a model through the OpenAI API."
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
_READ_FROM_FILES = "the format is read from the checkpoint's files; leave it out"
# Options and values of vLLM that are refused, each with the reason.
REFUSED = {
    **dict.fromkeys(
        [f"--quantization {each}" for each in ("awq", "awq_marlin", "gptq", "gptq_marlin", "gguf")], _READ_FROM_FILES
    ),
    **dict.fromkeys([f"--load-format {each}" for each in ("safetensors", "gguf", "hf")], _READ_FROM_FILES),
    "--dtype half": "its name here is float16",
    "--dtype float": "its name here is float32",
    "--kv-cache-dtype fp8_e4m3": "its name here is fp8",
    "--block-size": "a page of the KV cache has 64 tokens, which is the one size; leave it out",
    "--revision": "the hub's main revision is served; for another one, serve the folder that "
    "`hf download MODEL --revision REVISION` prints",
    "--trust-remote-code": "no code of a checkpoint is ever run; leave it out",
}

_NOTICE_S, _READ_LIMIT_S = 3.0, 600.0  # for a checkpoint that is no download; seconds are usual


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the model, and the options for its engine, its server and its limits."""
    from meltcore.cli.start_options import add_daemon_options
    from meltcore.common.options import add_options, not_empty, number
    from meltcore.settings.config import ENGINE_GROUP
    from meltcore.settings.fleet_spec import HTTP_GROUP, LimitsSection, ModelSection, ServerSection, TimeoutsSection

    parser.add_argument(
        "model",
        metavar="MODEL",
        type=not_empty,
        help="A checkpoint folder, a GGUF file, a NeMo archive, a hub id, or a bundled model: "
        "meltcore/sums, meltcore/sums-hybrid, meltcore/sums-gemma, meltcore/phrases (translates), "
        "meltcore/tones (transcribes), meltcore/voice (speaks)",
    )
    engine_group = parser.add_argument_group(ENGINE_GROUP)  # in this order
    group = parser.add_argument_group(HTTP_GROUP)
    group.add_argument(
        "--served-model-name",
        nargs="+",
        action="extend",
        type=not_empty,
        metavar="NAME",
        help="Names in the API (default: MODEL). The first stands in metrics and logs.",
    )
    group.add_argument(
        "--api-key",
        type=not_empty,
        metavar="KEY",
        help="Bearer token that requests must send, except to /, /docs, /openapi.json, /health, /v1/health and /live "
        "(default: the environment variable MELTCORE_API_KEY).",
    )
    group.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="Accepted as vLLM's, and not needed: a model whose calls can be read always takes tools.",
    )
    for section in (ModelSection, ServerSection, LimitsSection, TimeoutsSection):
        add_options(parser, section)
    engine_group.add_argument(
        "--gpu-memory-utilization",
        type=number(float, exclusive_minimum=0, maximum=1),
        metavar="F",
        help="Memory of an engine as a fraction of the GPU's, instead of --memory; of the smallest if GPUs differ.",
    )
    add_daemon_options(parser)


def _fraction_bytes(fraction: float, model: "ModelSection") -> int:
    """Return the bytes of --gpu-memory-utilization. Raises ConfigError beside --memory, and without a GPU to use."""
    from meltcore.common.errors import ConfigError
    from meltcore.fleet.plan.machine import read_gpus

    if model.memory is not None:
        raise ConfigError("--gpu-memory-utilization and --memory are both the memory of an engine: give one of them")
    gpus = () if model.device == "cpu" else read_gpus()[0]
    if isinstance(model.device, tuple):
        gpus = tuple(gpu for gpu in gpus if gpu.number in model.device) or gpus
    if not gpus or any(gpu.problem for gpu in gpus):
        reason = next((gpu.problem for gpu in gpus), "there is no GPU to use")
        raise ConfigError(
            f"--gpu-memory-utilization {fraction:g} is a fraction of a GPU's memory, and {reason}; "
            "give the memory in bytes, like --memory 4GiB"
        )
    return int(fraction * min(gpu.total_bytes for gpu in gpus))


def _check_in_time(model: "ModelSection") -> "Task":
    """Return the task of a model that can be served. Raises the errors of `check_servable`.

    Raises ConfigError too if a local checkpoint is not read within _READ_LIMIT_S, such as one on a server that is gone.
    Downloads from the hub have limits of their own.
    """
    from concurrent.futures import Future, wait

    from meltcore.common.errors import ConfigError
    from meltcore.common.process import loading_modules, start_call
    from meltcore.models.checkpoints.checkpoint import is_on_hub

    with loading_modules():
        from meltcore.serve.tasks.generation.servable import check_servable

    on_hub, check = start_call(lambda: is_on_hub(model.model)), start_call(lambda: check_servable(model))
    calls: list[Future[Any]] = [on_hub, check]
    if wait(calls, _NOTICE_S).not_done and not (on_hub.done() and on_hub.result()):
        print(f"meltcore: reading {model.model}", file=sys.stderr, flush=True)
        if wait(calls, _READ_LIMIT_S - _NOTICE_S).not_done:
            raise ConfigError(
                f"{model.model} was not read within {_READ_LIMIT_S:g} s: see whether its file system answers"
            )
    return check.result()


def _flag(name: str, path: str) -> str:
    """Return the flag of the setting at a path of a fleet whose one model has the name `name`."""
    from meltcore.common.options import flag_of
    from meltcore.settings.fleet_spec import LimitsSection, ModelSection, ServerSection

    if path == f"models.{name}":
        return f"--served-model-name {name}"
    if path.startswith(f"models.{name}.aliases["):
        return "--served-model-name"
    section, _, key = path.removeprefix(f"models.{name}.").rpartition(".")
    return flag_of({"limits": LimitsSection, "server": ServerSection}.get(section, ModelSection), key)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal, or start a server in the background."""
    import msgspec

    from meltcore.cli.start_options import start_daemon
    from meltcore.common.errors import ConfigError
    from meltcore.common.options import from_options
    from meltcore.common.process import loading_modules
    from meltcore.fleet.daemon import OneModel
    from meltcore.fleet.plan.placement import PlacedFleet
    from meltcore.settings.config import SharingSection
    from meltcore.settings.fleet_checks import FleetError, check_fleet
    from meltcore.settings.fleet_spec import (
        FleetSpec,
        KeySection,
        LimitsSection,
        ModelSection,
        ServerSection,
        TimeoutsSection,
    )

    with loading_modules():
        from meltcore.fleet.run.engines import place_replicas
        from meltcore.serve.requests.keys import DEFAULT_NAME, hash_key

    name, *aliases = dict.fromkeys(args.served_model_name or [args.model])
    model = from_options(ModelSection, args, checkpoint=args.model, aliases=tuple(aliases))
    if isinstance(model.device, tuple):  # the first of its ranks
        if model.replicas > 1:
            raise ConfigError(
                f"--device cuda:{model.device[0]} is one GPU, and --data-parallel-size {model.replicas} needs one or "
                "more for each replica"
            )
        gpus = range(model.device[0], model.device[0] + model.tensor_parallel_size)
        model = msgspec.structs.replace(model, device=tuple(gpus))
    if args.gpu_memory_utilization is not None:
        model = msgspec.structs.replace(model, memory=_fraction_bytes(args.gpu_memory_utilization, model))
    task = _check_in_time(model)  # before a process starts
    model = msgspec.structs.replace(model, task=task.name)
    if args.enable_auto_tool_choice:
        print("meltcore: --enable-auto-tool-choice is not needed: tools are always taken", file=sys.stderr)
    spec = FleetSpec(
        models={name: model},
        server=from_options(ServerSection, args),
        keys=() if args.api_key is None else (KeySection(name=DEFAULT_NAME, sha256=hash_key(args.api_key)),),
        limits=from_options(LimitsSection, args),
        timeouts=from_options(TimeoutsSection, args),
        sharing=SharingSection(means="none"),
    )
    fleet = PlacedFleet(spec)
    try:
        check_fleet(spec, is_planned=False)
        place_replicas(fleet, name)
    except FleetError as error:
        raise ConfigError(error.text(partial(_flag, name))) from error
    if (status := start_daemon(args, fleet, OneModel())) is not None:
        return status
    with loading_modules():
        from meltcore.fleet.supervisor import serve

    return serve(fleet)
