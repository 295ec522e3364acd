"""`meltcore plan FLEET.yaml`: what fits on which GPU, without torch, a GPU or weights."""

import argparse
import os

HELP = "say which models of a fleet fit on which GPU, what sleeps, and the nearest plan that fits"
EXAMPLES = """\
  meltcore plan fleet.yaml                        the GPUs of this machine
  meltcore plan fleet.yaml --vram 141             one GPU of 141 GiB
  meltcore plan fleet.yaml --vram 80,80           two GPUs of 80 GiB, as one fleet
  meltcore plan fleet.yaml --vram 141 --html plan.html
  meltcore plan fleet.yaml --ray auto             all nodes of the Ray cluster that this machine belongs to

exit status: 0 the fleet fits as it is, 1 it does not (a nearest plan is printed), 2 an error
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file, the sizes of GPUs and the page."""
    from meltcore.options import number

    def sizes(text: str) -> list[float]:
        return [number(float, exclusive_minimum=0, maximum=4096)(size) for size in text.split(",")]

    parser.add_argument("fleet", metavar="FLEET", help="a fleet.yaml")
    machine = parser.add_mutually_exclusive_group()
    machine.add_argument(
        "--vram", type=sizes, metavar="GIB,...", help="Memory of each GPU in GiB (default: the GPUs of this machine)."
    )
    machine.add_argument("--ray", metavar="ADDRESS", help="Plan for a Ray cluster: auto, local or HOST:PORT.")
    parser.add_argument(
        "--host-memory",
        type=number(float, exclusive_minimum=0, maximum=2**20),
        metavar="GIB",
        help="Host memory for models on the CPU and weights that sleep (default: what is available; with --vram: any).",
    )
    parser.add_argument("--html", metavar="FILE", help="Write the plan as a page with a picture of each GPU.")


def run(args: argparse.Namespace) -> int:
    """Print the plan; returns 0 where the file fits as it is, else 1."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # a plan downloads nothing: headers that are here, or published shapes
    from pathlib import Path
    from typing import Any

    from rich.console import Console

    from meltcore.errors import ConfigError
    from meltcore.fleet.cluster import Cluster
    from meltcore.fleet.context_memory import find_contexts
    from meltcore.fleet.from_spec import server_config
    from meltcore.fleet.machine import read_gpus
    from meltcore.fleet.operations import check_config, check_startable
    from meltcore.fleet.plan import describe_plan, plan_fleet
    from meltcore.fleet.planned import check_devices, check_gpus
    from meltcore.host_memory import host_available_bytes
    from meltcore.protocol.fleet_file import load_fleet
    from meltcore.report.console import print_page
    from meltcore.report.fleet_plan import plan_page
    from meltcore.report.html import write_page

    spec = load_fleet(args.fleet)
    if args.vram or args.ray:  # for another machine: its keys, programs and GPUs are not looked for here
        check_config(server_config(spec))
    cluster = Cluster.read(args.ray) if args.ray else None
    gpus, driver = ((), "") if args.vram else read_gpus() if cluster is None else cluster.machine[:2]
    gpu_bytes = [round(size * 2**30) for size in args.vram or ()] or [gpu.total_bytes for gpu in gpus]
    if not args.vram and cluster is None:
        check_startable(server_config(spec))
    num_gpus = len(gpu_bytes)
    if spec.gpus and not args.vram:
        check_gpus(spec, num_gpus)
        gpu_bytes = [gpu_bytes[gpu.id] for gpu in spec.gpus]
    if not gpu_bytes and any(model.device != "cpu" and model.kind != "url" for model in spec.models.values()):
        place = "this machine" if cluster is None else "the cluster"
        raise ConfigError(f"{place} has no NVIDIA GPU; name the memory of one in GiB, as --vram 141")
    if not args.vram or not spec.gpus:
        check_devices(spec, num_gpus)
    contexts = find_contexts(gpus[0].name if gpus else None, driver)
    nodes: dict[str, Any] = {}
    if args.host_memory:
        if cluster is not None:
            raise ConfigError("--host-memory: the nodes of a Ray cluster have their own; leave it out with --ray")
        nodes = {"host_bytes": round(args.host_memory * 2**30)}
    elif not args.vram and cluster is None:
        nodes = {"host_bytes": host_available_bytes()}
    if cluster is not None:
        nodes = {"gpu_nodes": cluster.gpu_nodes, "host_bytes": cluster.host_bytes}
    plan, nearest = plan_fleet(spec, gpu_bytes, contexts=contexts, **nodes)
    page = plan_page(describe_plan(spec, plan or nearest, source=args.fleet, fits=plan is not None))
    print_page(page, Console())
    if args.html is not None:
        print(f"written: {write_page(Path(args.html), page)}")
    return 0 if plan is not None else 1
