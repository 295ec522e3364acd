"""Builds the page of a fleet's plan, for HTML and the console: verdict, GPUs, models and MIG layouts."""

from __future__ import annotations

from meltcore.common.sizes import GIB, size_text
from meltcore.measure.report.page.charts import NUM_COLORS, stacked_bar
from meltcore.measure.report.page.page import (
    Box,
    Cell,
    Column,
    Figure,
    Figures,
    Page,
    Row,
    Section,
    Table,
    Text,
    numeric_columns,
)
from meltcore.protocol.fleet_plan import FleetPlan, PlannedGpu, PlannedHost, PlannedModel, other_changes_text

_NOTE = "Budgets are those of the engines' own memory plans."
_MIG_NOTE = (
    "MIG cuts compute and memory bandwidth with the memory, and idle slices are not lent. Sharing with budgets keeps "
    "both whole. Tensor parallelism and MIG exclude each other on one board: a process sees one MIG device, and there "
    "is no peer access or NCCL between slices."
)


def plan_page(plan: FleetPlan, *, has_mig: bool = False) -> Page:
    """Return the page of a plan, with the MIG layouts of the first GPU if `has_mig` is true."""
    conclusion = _conclusion(plan)
    if plan.left_out:
        conclusion += f" Not in the plan, since their sizes are unknown: {', '.join(plan.left_out)}."
    sections = [Section("Models", [_models(plan)])] if plan.models else []
    if plan.gpus:
        pictures = Figures([_picture(gpu) for gpu in plan.gpus], is_full_width=True)
        usage_notes = [
            f"Other processes use {size_text(gpu.others_bytes)} of {_name(gpu)}, which the plan leaves to them."
            for gpu in plan.gpus
            if gpu.others_bytes >= GIB / 100
        ]
        note = " ".join([_NOTE, *usage_notes, plan.context_note])
        sections.insert(0, Section("GPUs", [_gpus(plan), pictures, Text(note)]))
    if plan.gpus and has_mig:
        rows = [Row([Cell(layout), Cell("fits" if fits else "does not fit")]) for layout, fits in plan.mig]
        columns = [Column("slices", align="text"), Column("all models", align="text")]
        mig = Table(columns, rows, _MIG_NOTE)
        sections.append(Section(f"MIG layouts of GPU {plan.gpus[0].number}, beside sharing with budgets", [mig]))
    if hosts := [_host_text(host) for host in plan.hosts if host.engine_bytes or host.pinned_bytes]:
        sections.append(Section("Host memory", [Text(" ".join(hosts))]))
    if plan.reason:
        sections.insert(0, Section("", [Box(style="bad", title="Reason", text=plan.reason, console=False)]))
    if plan.changes:
        lead = "Nearest plan that fits, which the tables show:"
        boxes = [Box(style="unsure", title="Changes", lead=lead, items=plan.changes)]
        if plan.other_changes:
            lead = f"Or these, {other_changes_text(plan.other_changes)}:"
            boxes.append(Box(style="unsure", title="Other changes", lead=lead, items=plan.other_changes))
        sections.insert(0, Section("", [*boxes]))
    if plan.left_out:
        reasons = [f"{name}: {reason}" for name, reason in plan.left_out.items()]
        lead = "`up` starts these models without a budget, beside the plan:"
        box = Box(style="unsure", title="Not in the plan", lead=lead, items=reasons, console=False)
        sections.insert(0, Section("", [box]))
    return Page(
        title="Fleet plan",
        name=plan.source,
        subtitle="No plan fits." if plan.reason else conclusion,
        sections=sections,
        footer="meltcore plan",
        badge="FITS" if plan.fits else "DOES NOT FIT",
        style="good" if plan.fits else "bad",
        conclusion=conclusion,
    )


def _conclusion(plan: FleetPlan) -> str:
    if plan.fits and not any(len(gpu.parts) > 1 for gpu in plan.gpus):
        return "The fleet needs no GPU."
    if plan.fits:
        sleeping_models = [model.name for model in plan.models if model.takes_turns]
        sleep_note = (
            f"; {', '.join(sleeping_models)} take turns and sleep" if sleeping_models else "; all models stay awake"
        )
        return f"The fleet fits{_gpus_text(plan)}{sleep_note}."
    if plan.reason:
        return plan.reason
    change_count = f"{len(plan.changes)} change{'s' * (len(plan.changes) != 1)}"
    return f"The fleet does not fit as it is. With {change_count} it fits{_gpus_text(plan)}."


def _gpus_text(plan: FleetPlan) -> str:
    """Return a text with the used and the idle GPUs: " on GPUs 0 to 2; GPU 3 is idle"."""
    used = [gpu for gpu in plan.gpus if not _is_idle(gpu)]
    idle = [gpu for gpu in plan.gpus if _is_idle(gpu)]
    if not used:
        return " without a GPU"
    text = f" on {_numbers_text(used)}"
    return text + (f"; {_numbers_text(idle)} {'is' if len(idle) == 1 else 'are'} idle" if idle else "")


def _is_idle(gpu: PlannedGpu) -> bool:
    return len(gpu.parts) <= 1  # the driver's alone


def _numbers_text(gpus: list[PlannedGpu]) -> str:
    """Return GPU numbers as text, by node: "GPU 0", "GPUs 0 to 3, 5", "a GPU 0, b GPUs 0, 1"."""
    by_node: dict[str, list[int]] = {}
    for gpu in gpus:
        by_node.setdefault(gpu.node, []).append(gpu.number)
    texts = []
    for node, numbers in by_node.items():
        ranges: list[list[int]] = []
        for number in sorted(numbers):
            if ranges and number == ranges[-1][-1] + 1:
                ranges[-1].append(number)
            else:
                ranges.append([number])
        parts = [f"{each[0]} to {each[-1]}" if len(each) > 2 else ", ".join(map(str, each)) for each in ranges]
        texts.append(f"{node} GPU{'s' * (len(numbers) > 1)} {', '.join(parts)}".strip())
    return ", ".join(texts)


def _gpus(plan: FleetPlan) -> Table:
    rows = []
    for gpu in plan.gpus:
        sizes = (gpu.total_bytes, gpu.used_bytes, gpu.total_bytes - gpu.used_bytes)
        rows.append(Row([Cell(_name(gpu) + (", idle" if _is_idle(gpu) else "")), *map(_gib, sizes)]))
    return Table([Column("GPU", align="text"), *numeric_columns("GiB", "planned", "free")], rows)


def _name(gpu: PlannedGpu) -> str:
    return f"{gpu.node} GPU {gpu.number}".strip()


def _picture(gpu: PlannedGpu) -> Figure:
    parts = [
        (part.name, float(part.size_bytes), "v-none" if part.name == "driver" else f"bar c{index % NUM_COLORS + 1}")
        for index, part in enumerate(gpu.parts)
    ]
    idle = ", idle" if _is_idle(gpu) else ""
    title = f"{_name(gpu)}{idle}: {size_text(gpu.used_bytes)} of {size_text(gpu.total_bytes)}"
    legend = ", ".join(f"{part.name} {size_text(part.size_bytes)}" for part in gpu.parts)
    return Figure(title, stacked_bar(parts, float(gpu.total_bytes), title), caption=legend)


def _host_text(host: PlannedHost) -> str:
    """Return a sentence about the host memory of a machine."""
    parts = [(host.engine_bytes, "for models on the CPU"), (host.pinned_bytes, "pinned for weights that sleep")]
    text = " and ".join(f"{size_text(size)} {purpose}" for size, purpose in parts if size)
    available_note = "" if host.total_bytes is None else f", of {size_text(host.total_bytes)} that are available"
    return f"{host.node or 'Host memory'}: {text}{available_note}."


def _models(plan: FleetPlan) -> Table:
    columns = [
        *(Column(name, align="text") for name in ("model", "task", "place")),
        Column("sizes from", console=None, align="text"),
        *numeric_columns("context"),
        *numeric_columns("concurrency", console="seqs"),
        *numeric_columns("weights", "caches"),
        *numeric_columns("other", console=None),  # with these 80 columns hold names of 23 characters
        *numeric_columns("GiB"),
    ]
    note = " ".join(map(_step_text, (model for model in plan.models if model.max_num_seqs)))
    return Table(columns, [_model_row(model) for model in plan.models], note)


def _step_text(model: PlannedModel) -> str:
    """Return a sentence about a model whose step holds fewer sequences than its `max_num_seqs`."""
    return (
        f"A step of {model.name} is full with {model.concurrency} at a time: of max_num_seqs {model.max_num_seqs:,} "
        "the others wait, and get no more memory."
    )


def _model_row(model: PlannedModel) -> Row:
    sizes = {part.name: part.size_bytes for part in model.parts}
    caches = sum(sizes.get(name, 0) for name in ("KV pages", "recurrent states", "slots", "activations", "requests"))
    weights = sizes.get("weights", 0)
    is_known = bool(model.parts)
    return Row(
        [
            Cell(model.name),
            Cell(model.task),
            Cell(model.place + (", sleeps" if model.takes_turns else "")),
            Cell(model.source),
            Cell(f"{model.max_model_len:,}" if model.max_model_len else "–"),
            Cell(str(model.concurrency) if model.concurrency else "–"),
            _gib(weights) if is_known else Cell("–"),
            _gib(caches) if is_known else Cell("–"),
            _gib(model.budget_bytes - weights - caches) if is_known else Cell("–"),
            _gib(model.budget_bytes) if model.budget_bytes else Cell("–"),
        ]
    )


def _gib(size_bytes: int) -> Cell:
    return Cell(f"{size_bytes / GIB:,.2f}")
