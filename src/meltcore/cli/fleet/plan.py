"""`meltcore plan FLEET.yaml`: show which model fits on which GPU. This needs neither a GPU nor weights."""

import argparse
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from meltcore.common.gpus.machine import Machine
    from meltcore.fleet.plan.cluster import Cluster
    from meltcore.fleet.plan.plan import Plan
    from meltcore.fleet.plan.planned import FoundPlan
    from meltcore.fleet.plan.site import OneMachine
    from meltcore.settings.fleet_spec import FleetSpec

HELP = "Say which models of a fleet fit on which GPU, what sleeps, and the nearest plan that fits."
EXAMPLES = """\
  meltcore plan fleet.yaml                        the GPUs of this machine
  meltcore plan fleet.yaml --vram 141             one GPU of 141 GiB
  meltcore plan fleet.yaml --vram 80,80           two GPUs of 80 GiB, as one fleet
  meltcore plan fleet.yaml --vram 141 --html plan.html
  meltcore plan fleet.yaml --json | jq .changes
  meltcore plan fleet.yaml --vram 80 --write fleet-80.yaml   write a fleet that fits 80 GiB
  meltcore plan fleet.yaml --ray auto             all nodes of the Ray cluster that this machine belongs to

exit status: 0 the fleet fits as it is, 1 it does not (a nearest plan is printed), 2 an error
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the file, and the options for the sizes of GPUs and for the output."""
    from meltcore.common.options import ActOption, not_empty, number, size_bytes
    from meltcore.common.sizes import GIB

    def memory(text: str, most_gib: int) -> int:
        """Return the bytes of a number of GiB, or of a size with a unit as in fleet.yaml."""
        if not text.rstrip().upper().endswith((*"BKMGT",)):
            gib: float = number(float, exclusive_minimum=0, maximum=most_gib)(text)
            return round(gib * GIB)
        if (size := size_bytes(text)) > most_gib * GIB:
            raise argparse.ArgumentTypeError(f"{text!r} is more than {most_gib} GiB")
        return size

    def sizes(text: str) -> list[int]:
        return [memory(size, 4096) for size in text.split(",")]

    parser.add_argument("fleet", metavar="FLEET", help="A fleet.yaml")
    machine = parser.add_mutually_exclusive_group()
    machine.add_argument(
        "--vram",
        action=ActOption,
        const=partial(run, find=_plan_for_sizes),
        type=sizes,
        metavar="GIB,...",
        help="Memory of each GPU in GiB, or as 512MiB (default: the GPUs of this machine).",
    )
    machine.add_argument(
        "--ray",
        action=ActOption,
        const=partial(run, find=_plan_for_cluster),
        type=not_empty,
        metavar="ADDRESS",
        help="Plan for a Ray cluster: auto, local or HOST:PORT.",
    )
    parser.add_argument(
        "--host-memory",
        type=partial(memory, most_gib=2**20),
        metavar="GIB",
        help="Host memory in GiB, or as 512MiB, for models on the CPU and weights that sleep "
        "(default: what is available; with --vram: any).",
    )
    parser.add_argument(
        "--mig", action="store_true", help="Show which MIG layouts of the first GPU would hold the same engines."
    )
    parser.add_argument("--json", action="store_true", help="Print the plan as JSON, sizes in bytes.")
    parser.add_argument("--html", metavar="FILE", help="Write the plan as a page with a picture of each GPU.")
    parser.add_argument(
        "--write",
        metavar="FILE",
        help="Write the fleet with the changes of the nearest plan, without comments, as a new file. "
        "FLEET itself is replaced where FILE names it.",
    )


def _plan_for_sizes(args: argparse.Namespace, spec: "FleetSpec") -> tuple["FoundPlan", "Machine"]:
    """Return the plan for empty GPUs of the sizes in --vram, and a machine with these GPUs.

    Keys and programs of the fleet are not checked here.
    """
    from meltcore.common.gpus.machine import Machine, VisibleGpu
    from meltcore.fleet.plan.context_memory import find_contexts
    from meltcore.fleet.plan.plan import empty_gpus, plan_fleet
    from meltcore.fleet.plan.planned import FoundPlan, check_devices, print_unplanned, without_unknown

    if not spec.gpus:
        check_devices(spec, len(args.vram))
    contexts = find_contexts(None)
    known, left_out = without_unknown(spec, print_unplanned)
    plan, nearest = plan_fleet(known, args.vram, contexts=contexts, host_bytes=args.host_memory)
    gpus = tuple(VisibleGpu(gpu.number, "", gpu.total_bytes, 0) for gpu in empty_gpus(known, args.vram, contexts))
    found = FoundPlan(spec, known, left_out, plan, nearest, None, gpus, [gpu.total_bytes for gpu in gpus], {})
    return found, Machine(gpus, "", sys.maxsize if args.host_memory is None else args.host_memory)


def _plan_for_machine(args: argparse.Namespace, spec: "FleetSpec") -> tuple["FoundPlan", "Machine"]:
    """Return the plan that `meltcore up` would follow now, and this machine."""
    from meltcore.fleet.admin.operations import check_startable_fleet
    from meltcore.fleet.plan.machine import read_machine
    from meltcore.fleet.plan.site import OneMachine

    machine = read_machine()
    if args.host_memory:
        machine = machine._replace(host_bytes=args.host_memory)
    found = _plan_for_site(OneMachine.of(machine), spec)
    check_startable_fleet(spec)  # after the plan, which waits for no checkpoint without a limit
    return found


def _plan_for_cluster(args: argparse.Namespace, spec: "FleetSpec") -> tuple["FoundPlan", "Machine"]:
    """Return the plan that `meltcore up --ray` would follow now, and the cluster as one machine."""
    from meltcore.common.errors import ConfigError
    from meltcore.fleet.plan.cluster import cluster_reader

    if args.host_memory:
        raise ConfigError("--host-memory: the nodes of a Ray cluster have their own; leave it out with --ray")
    return _plan_for_site(cluster_reader(args.ray)(spec), spec)


def _plan_for_site(site: "Cluster | OneMachine", spec: "FleetSpec") -> tuple["FoundPlan", "Machine"]:
    from meltcore.fleet.plan.planned import find_plan, print_unplanned

    wants_gpus = any(model.kind != "url" and model.device != "cpu" for model in spec.models.values())
    if wants_gpus and not site.machine.gpus and not site.machine.problem:
        print_unplanned(
            f"{site.title} has no NVIDIA GPU, so this is the plan of its CPUs; "
            "name the memory of a GPU in GiB to plan for one, as --vram 141"
        )
    return find_plan(spec, site, print_unplanned), site.machine


def run(
    args: argparse.Namespace,
    find: "Callable[[argparse.Namespace, FleetSpec], tuple[FoundPlan, Machine]]" = _plan_for_machine,
) -> int:
    """Print the plan, by default for this machine. Returns 0 if the file fits as it is, else 1."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # a plan downloads nothing: headers that are here, or published shapes
    from pathlib import Path

    import msgspec
    from rich.console import Console

    from meltcore.common.errors import ConfigError
    from meltcore.fleet.plan.plan import describe_plan
    from meltcore.fleet.plan.planned import does_not_fit
    from meltcore.measure.report.nodes.fleet_plan import plan_page
    from meltcore.measure.report.page.console import print_blocks, print_conclusion
    from meltcore.measure.report.page.html import write_page
    from meltcore.settings.fleet_file import load_fleet

    spec = load_fleet(args.fleet)
    if args.write is not None:
        _check_writable(args)
    found, machine = find(args, spec)
    if not found.known.models:
        raise ConfigError("no model is in the plan, since the sizes of all are unknown")
    shown = found.plan or found.nearest
    reason = "" if shown else does_not_fit(found, machine)
    document = describe_plan(
        found.known,
        shown,
        source=args.fleet,
        fits=found.plan is not None,
        reason=reason[:1].upper() + reason[1:],
        others_bytes=found.others_bytes,
    )
    document = msgspec.structs.replace(document, left_out=found.left_out)
    page = plan_page(document, has_mig=args.mig)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    else:
        console = Console()
        print_conclusion(page, console)  # above all tables, which may be longer than a screen
        print_blocks(page.sections, console)
    written = sys.stderr if args.json else sys.stdout
    if args.html is not None:
        print(f"written: {write_page(Path(args.html), page)}", file=written)
    if args.write is not None:
        print(_write_fleet(args, shown), file=written)
    return 0 if found.plan is not None else 1


def _check_writable(args: argparse.Namespace) -> None:
    """Raise ConfigError if --write names an existing file that is not the fleet itself."""
    from pathlib import Path

    from meltcore.common.errors import ConfigError

    file = Path(args.write)
    if file.is_file() and not file.samefile(args.fleet):
        raise ConfigError(f"--write: {file} exists already; name a new file, or {args.fleet} itself to replace it")


def _write_fleet(args: argparse.Namespace, plan: "Plan | None") -> str:
    """Write the fleet.yaml, changed as its plan requires, to the file of --write. If there is no plan, write nothing.

    Returns a line for the user that says what was done.
    """
    from pathlib import Path

    from meltcore.common.files import write_atomic
    from meltcore.fleet.plan.nearest import changed_text

    if plan is None:
        return f"not written: {args.write}, since no plan fits"
    file = Path(args.write)
    text = changed_text(Path(args.fleet).read_text(encoding="utf-8"), plan.changes)
    write_atomic(file, text.encode(), overwrite=file.is_file(), hint="name another file")
    return f"written: {file}"
