"""Plans of fleets: never more than a card, nothing refused that fits, monotone in context, and commands around them."""

from __future__ import annotations

import argparse
import html
import json
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import msgspec
import plan_picture
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from sized_engine import sized_engine

from meltcore.cli import main
from meltcore.cli.fleet import fleet as fleet_command
from meltcore.common.errors import ConfigError
from meltcore.common.gpus.machine import Machine, VisibleGpu
from meltcore.common.sizes import GIB, size_text
from meltcore.engine.memory.memory_needs import PlannedEngine
from meltcore.fleet.admin.operations import check_startable
from meltcore.fleet.plan import nearest as nearest_plan
from meltcore.fleet.plan import needs
from meltcore.fleet.plan.context_memory import ASSUMED, context_table, find_contexts
from meltcore.fleet.plan.first_fit import FilledGpu, place
from meltcore.fleet.plan.nearest import changed_text
from meltcore.fleet.plan.needs import named_needs
from meltcore.fleet.plan.placement import engine_config
from meltcore.fleet.plan.plan import describe_plan, plan_fleet, with_plan
from meltcore.fleet.plan.planned import FleetPlanner, does_not_fit, find_plan
from meltcore.fleet.plan.site import OneMachine
from meltcore.settings.fleet_file import load_fleet, parse_fleet
from meltcore.settings.fleet_spec import FleetSpec, ModelSection

CONTEXT_BYTES, DRIVER_BYTES = ASSUMED.process_bytes("generation"), ASSUMED.driver_bytes
# NCCL's, and of two ranks chunks of small messages, and counters, rows and sums of a long one.
RANK_BYTES = ASSUMED.nccl_bytes + 4 * 2**20 + 32 + 2 * 32 * 2**20
MODELS = """
models:
  gemma: {checkpoint: none/here, shapes: google/gemma-3-27b-it, format: q4_0, max_model_len: 4096, max_num_seqs: 4}
  qwen: {checkpoint: none/here, shapes: Qwen/Qwen3-0.6B, max_model_len: 4096, max_num_seqs: 4, residency: sleepable}
  mt: {checkpoint: none/here, shapes: ai4bharat/indictrans2-en-indic-1B, task: translation, residency: sleepable}
"""
SIZES = st.integers(CONTEXT_BYTES + 1, 40 * GIB)


@st.composite
def engines(draw: st.DrawFn) -> list[PlannedEngine]:
    count = draw(st.integers(1, 8))
    models = [f"m{draw(st.integers(0, 3))}" for _ in range(count)]
    return [
        sized_engine(model, index, draw(SIZES), draw(st.sampled_from((1, 1, 1, 2))), (), draw(st.booleans()))
        for index, model in enumerate(models)
    ]


def place_plainly(engines: Sequence[PlannedEngine], gpus: Sequence[FilledGpu]) -> tuple[FilledGpu, ...] | None:
    """First-fit that looks at every GPU for every engine."""
    placed = list(gpus)
    there = {(gpu.node, engine.model, engine.replica) for gpu in gpus for engine in gpu.engines}
    replicas = Counter((node, model) for node, model, _ in there)
    for engine in sorted(engines, key=lambda each: (-each.size_bytes * each.gpus, each.model, each.replica)):
        fitting = [
            index
            for index, gpu in enumerate(placed)
            if (not engine.only or gpu.number in engine.only)
            and gpu._replace(engines=(*gpu.engines, engine)).used_bytes <= gpu.total_bytes
        ]
        fitting.sort(key=lambda index: any(other.model == engine.model for other in placed[index].engines))
        by_node: dict[str, list[int]] = {}
        for index in fitting:
            by_node.setdefault(placed[index].node, []).append(index)
        nodes = [node for node, indices in by_node.items() if len(indices) >= engine.gpus]
        if not nodes:
            return None
        chosen = min(nodes, key=lambda node: replicas[node, engine.model])
        replicas[chosen, engine.model] += 1
        for index in by_node[chosen][: engine.gpus]:
            placed[index] = placed[index]._replace(engines=(*placed[index].engines, engine))
    return tuple(placed)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_engines_are_placed_as_if_each_looked_at_every_card(data: st.DataObject) -> None:
    sizes = st.integers(1, 6)
    cards = data.draw(st.lists(st.tuples(st.integers(4, 20), st.sampled_from("abc")), min_size=1, max_size=10))
    gpus = [
        FilledGpu(number, size * GIB, (), GIB // 2, node if data.draw(st.booleans()) else "a")
        for number, (size, node) in enumerate(cards)
    ]
    found = []
    for model in data.draw(st.lists(st.sampled_from("mnop"), max_size=4, unique=True)):
        size, ranks, sleeps = data.draw(st.tuples(sizes, st.sampled_from((1, 1, 2)), st.booleans()))
        for replica in range(data.draw(st.integers(1, 6))):
            only = data.draw(st.sampled_from([(), (), tuple(range(0, len(gpus), 2))]))
            found.append(sized_engine(model, replica, size * GIB, ranks, only, sleeps, GIB // 2))
    stay, to_place = found[::5], [each for at, each in enumerate(found) if at % 5]
    for each in stay:
        at = data.draw(st.integers(0, len(gpus) - 1))
        gpus[at] = gpus[at]._replace(engines=(*gpus[at].engines, each))
    assert place(to_place, gpus) == place_plainly(to_place, gpus)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(engines(), st.lists(st.integers(10 * GIB, 150 * GIB), min_size=1, max_size=4))
def test_placed_engines_never_take_more_than_a_card(found: list[PlannedEngine], cards: list[int]) -> None:
    gpus = place(found, [FilledGpu(number, size) for number, size in enumerate(cards)])
    if gpus is None:
        resident = sum(each.size_bytes * each.gpus for each in found)
        # On one card nothing that fits is refused; on several, not what the largest card alone would hold.
        assert any(each.gpus > len(cards) for each in found) or resident + DRIVER_BYTES > max(cards) or len(cards) > 1
        return
    for gpu in gpus:
        awake = [each.size_bytes - CONTEXT_BYTES for each in gpu.engines if each.sleeps]
        always = sum(each.size_bytes for each in gpu.engines if not each.sleeps)
        assert DRIVER_BYTES + always + len(awake) * CONTEXT_BYTES + max(awake, default=0) <= gpu.total_bytes
    for each in found:
        assert sum(each in gpu.engines for gpu in gpus) == each.gpus


def test_replicas_go_to_different_cards_and_named_ones_where_the_file_says() -> None:
    cards = [FilledGpu(0, 80 * GIB), FilledGpu(1, 80 * GIB)]
    twins = [sized_engine("a", replica, 20 * GIB, 1, (), False) for replica in range(2)]
    placed = place([*twins, sized_engine("b", 0, 10 * GIB, 1, (1,), False)], cards)
    assert placed is not None
    assert [sorted(each.model for each in gpu.engines) for gpu in placed] == [["a"], ["a", "b"]]


def test_sleepable_models_take_turns_only_where_all_do_not_fit() -> None:
    spec = parse_fleet(MODELS)
    plan, nearest = plan_fleet(spec, [80 * GIB])
    assert plan is not None
    assert (plan.sleeping, nearest) == ((), None)
    plan, _ = plan_fleet(spec, [34 * GIB])
    assert plan is not None
    assert plan.sleeping == ("qwen", "mt")


def test_weights_that_sleep_are_counted_in_host_memory() -> None:
    spec = parse_fleet(MODELS)
    plan, _ = plan_fleet(spec, [34 * GIB], host_bytes=64 * GIB)
    assert plan is not None
    rows = {name: {row.name: row.size_bytes for row in plan.needs[name].rows} for name in plan.sleeping}
    pinned = sum(sizes["weights"] + sizes["rounding"] for sizes in rows.values())
    assert [host.pinned_bytes for host in plan.hosts] == [pinned]
    assert plan_fleet(spec, [34 * GIB], host_bytes=pinned)[0] is not None
    assert plan_fleet(spec, [34 * GIB], host_bytes=pinned - 1)[0] is None
    assert plan_fleet(spec, [80 * GIB], host_bytes=1)[0] is not None, "all stay awake"
    dropped, _ = plan_fleet(parse_fleet("residency: {keep: disk}" + MODELS), [34 * GIB], host_bytes=1)
    assert dropped is not None
    on_cpu = parse_fleet(MODELS + "  sums: {checkpoint: meltcore/sums, device: cpu, memory: 2GiB}")
    plan, _ = plan_fleet(on_cpu, [34 * GIB], host_bytes=pinned + 3 * GIB)
    assert plan is not None
    assert plan.hosts[0].free_bytes == GIB // 4
    assert plan_fleet(on_cpu, [34 * GIB], host_bytes=pinned + 2 * GIB)[0] is None


@pytest.mark.parametrize("keep", ["host", "disk"])
def test_sleepable_models_on_the_cpu_take_turns_in_host_memory(keep: str) -> None:
    text = "  %s: {checkpoint: meltcore/sums, device: cpu, memory: 2GiB, residency: %s}\n"
    lines = [text % (name, "sleepable") for name in "abc"]
    spec = parse_fleet(f"residency: {{keep: {keep}}}\nmodels:\n{''.join(lines)}")
    process, asleep, weights = 3 * GIB // 4, 64 * 2**20, 0
    awake, _ = plan_fleet(spec, [])
    assert awake is not None
    assert (awake.sleeping, awake.hosts[0].engine_bytes) == ((), 3 * (2 * GIB + process))
    # At run time the largest bounds what is awake on the CPU, so the page does not say that all stay awake.
    assert [model.takes_turns for model in describe_plan(spec, awake, source="", fits=True).models] == [True] * 3
    alone = msgspec.structs.replace(spec, models={"a": spec.models["a"]})
    assert not describe_plan(alone, awake, source="", fits=True).models[0].takes_turns
    if keep == "host":
        weights = sum(row.size_bytes for row in awake.needs["a"].rows if row.name == "weights")
        assert weights > 0
    assert awake.needs["a"].asleep_bytes >= asleep
    needed = 2 * GIB + 3 * (process + awake.needs["a"].asleep_bytes + weights)
    plan, _ = plan_fleet(spec, [], host_bytes=needed)
    assert plan is not None
    assert (plan.sleeping, plan.hosts[0].engine_bytes) == (("a", "b", "c"), needed)
    assert plan_fleet(spec, [], host_bytes=needed - 1)[0] is None
    machine = Machine((), "", needed - 1)
    reason = does_not_fit(find_plan(spec, OneMachine.of(machine), print), machine)
    assert f"its models on the CPU need {size_text(needed)} of host memory in turns" in reason
    resident = msgspec.structs.replace(
        spec, models=spec.models | {"c": msgspec.structs.replace(spec.models["c"], residency="always_on")}
    )
    needed += 2 * GIB - awake.needs["a"].asleep_bytes - weights
    assert plan_fleet(resident, [], host_bytes=needed)[0] is not None
    assert plan_fleet(resident, [], host_bytes=needed - 1)[0] is None


def test_ranks_of_tensor_parallelism_have_a_budget_each_and_memory_for_reductions() -> None:
    text = "models: {a: {checkpoint: none/here, shapes: google/gemma-3-27b-it, max_model_len: 4096, max_num_seqs: 4%s}}"
    cards = [80 * GIB, 80 * GIB]
    alone, halves = (
        plan_fleet(parse_fleet(text % more), cards)[0] for more in ("", ", tensor_parallel_size: 2, device: [0, 1]")
    )
    assert alone is not None
    assert halves is not None
    budget = halves.needs["a"].budget_bytes
    assert 0.45 < budget / alone.needs["a"].budget_bytes < 0.6
    assert {gpu.used_bytes for gpu in halves.gpus} == {DRIVER_BYTES + CONTEXT_BYTES + RANK_BYTES + budget}
    assert alone.gpus[0].used_bytes == DRIVER_BYTES + CONTEXT_BYTES + alone.needs["a"].budget_bytes


def test_nearest_plan_fits_and_says_its_changes() -> None:
    plan, nearest = plan_fleet(parse_fleet(MODELS), [24 * GIB])
    assert plan is None
    assert nearest is not None
    assert "models.gemma.residency: sleepable (was always_on)" in nearest.changes
    assert all(gpu.used_bytes <= gpu.total_bytes for gpu in nearest.gpus)
    assert plan_fleet(parse_fleet(MODELS), [4 * GIB], host_bytes=16 * GIB) == (None, None)


def test_search_for_the_nearest_plan_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole = plan_fleet(parse_fleet(MODELS), [24 * GIB], host_bytes=64 * GIB)
    monkeypatch.setattr(nearest_plan, "SEARCH_LIMIT_S", -1.0)
    _, cut = plan_fleet(parse_fleet(MODELS), [24 * GIB], host_bytes=64 * GIB)
    assert whole is not None
    assert cut is not None
    assert (whole.is_cut, cut.is_cut) == (False, True)
    assert len(cut.changes) > len(whole.changes)
    assert cut.other_changes == ()
    assert plan_fleet(parse_fleet(changed(MODELS, cut.changes)), [24 * GIB], host_bytes=64 * GIB)[0] is not None
    card = VisibleGpu(0, "x", 24 * GIB, 0)
    reported: list[str] = []
    found = find_plan(parse_fleet(MODELS), OneMachine.of(Machine((card,), "", 64 * GIB)), reported.append)
    assert any("the search for the nearest plan was ended after" in line for line in reported)
    assert ", as far as a search of" in does_not_fit(found, Machine((card,), "", 64 * GIB))


def changed(text: str, lines: Sequence[str]) -> str:
    """The file with the lines of a plan written into it, as a person would."""
    fleet = yaml.safe_load(text)
    for line in lines:
        path, value = line.split(": ", 1)
        *keys, last = path.split(".")
        section = fleet
        for key in keys:
            section = section.setdefault(key, {})
        section[last] = yaml.safe_load(value.partition(" (was ")[0])
    return str(yaml.safe_dump(fleet, sort_keys=False))


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(st.integers(17, 33), st.sampled_from([1, 4, 8, 64]))
def test_changes_of_the_nearest_plan_are_enough_and_none_is_in_vain(card: int, host: int) -> None:
    def fits(text: str) -> bool:
        plan, _ = plan_fleet(parse_fleet(text), [card * GIB], host_bytes=host * GIB)
        return plan is not None

    plan, found = plan_fleet(parse_fleet(MODELS), [card * GIB], host_bytes=host * GIB)
    if found is None:
        assert plan is not None or card < 22
        return
    for lines in filter(None, (found.changes, found.other_changes)):
        assert fits(changed(MODELS, lines))
        assert changed_text(MODELS, lines).endswith(changed(MODELS, lines))
        for line in lines:
            assert not fits(changed(MODELS, [each for each in lines if each != line])), f"{line} is not needed"
    if any(".max_" in line for line in found.changes):
        assert not any(".max_" in line for line in found.other_changes)


def kept(spec: FleetSpec, changes: Sequence[str]) -> list[float]:
    """What a nearest plan keeps, the most important first: GPUs, contexts, concurrency, models awake; by class."""
    after = parse_fleet(changed(str(yaml.safe_dump(msgspec.to_builtins(spec))), changes)).models
    classes = ("interactive", "standard", "batch")
    names = sorted(after, key=lambda name: (classes.index(after[name].priority), after[name].task == "generation"))
    return [
        *(after[name].device != "cpu" for name in names),
        *(after[name].max_model_len or 0 for name in names),
        *(after[name].max_num_seqs or 0 for name in names),
        *(after[name].residency == "always_on" for name in names),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("host_bytes", [None, 40 * GIB])
def test_nearest_plan_of_the_written_fleet_keeps_no_less_on_a_larger_card(
    host_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: dict[str, PlannedEngine] = {}

    def known_needs(name: str, model: ModelSection) -> PlannedEngine:
        if (key := f"{name} {model}") not in known:
            known[key] = named_needs(name, model)
        return known[key]

    monkeypatch.setattr(needs, "named_needs", known_needs)  # the sizes of the grid need the same engines
    spec = parse_fleet((resources.files("meltcore.fleet") / "examples" / "fleet.yaml").read_text(encoding="utf-8"))
    before: list[float] = []
    for size in range(24, 100, 8):
        plan, found = plan_fleet(spec, [size * GIB], contexts=context_table()[0], host_bytes=host_bytes)
        if plan is None and found is None:
            assert not before
            continue
        now = kept(spec, found.changes if found is not None else ())
        assert now >= before, f"{size} GiB"
        before = now
    assert before == kept(spec, ())


def test_context_above_the_models_is_refused_as_by_its_engine() -> None:
    """The plan lowered it without a word."""
    text = "models: {a: {checkpoint: none/here, shapes: Qwen/Qwen3-0.6B, max_num_seqs: 4, max_model_len: 65536%s}}"
    with pytest.raises(ConfigError, match=r"models\.a: max_model_len: got 65536; must be at most the 40960 tokens"):
        plan_fleet(parse_fleet(text % ""), [80 * GIB])
    rope = "{rope_type: yarn, factor: 2.0, original_max_position_embeddings: 40960}"
    plan, _ = plan_fleet(parse_fleet(text % f", hf_overrides: {{rope_parameters: {rope}}}"), [80 * GIB])
    assert plan is not None
    assert plan.needs["a"].max_model_len == 65536


@pytest.mark.slow
def test_written_fleet_takes_turns_before_it_gets_smaller() -> None:
    """Within 36 GiB it had 1 of 8 sequences of 2,048 of 8,192 tokens, and four models on the CPU."""
    spec = parse_fleet((resources.files("meltcore.fleet") / "examples" / "fleet.yaml").read_text(encoding="utf-8"))
    _, found = plan_fleet(spec, [36 * GIB], contexts=context_table()[0])
    assert found is not None
    assert [engine.model for host in found.hosts for engine in host.engines] == ["qwen3-30b-a3b"]
    assert not any(".max_" in line for line in found.changes)
    assert any(".max_num_seqs" in line for line in found.other_changes)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_plan_writes_the_changed_fleet(is_replaced: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fleet.yaml"
    text = MODELS.replace("  qwen: {", "  qwen2.5: &small {").replace("4, residency: sleepable}", "4}")
    file.write_text(f"# mine\n{text}  twin: *small\n")
    target = file if is_replaced else tmp_path / "smaller.yaml"
    options = ["--vram", "26", "--host-memory", "64"]
    assert main.main(["plan", str(file), *options, "--write", str(target)]) == 1
    assert f"written: {target}" in capsys.readouterr().out.replace("\n", " ").replace("  ", " ")
    assert main.main(["plan", str(target), *options]) == 0
    written, spec = load_fleet(target), parse_fleet(f"{text}  twin: *small\n")
    _, found = plan_fleet(spec, [26 * GIB], host_bytes=64 * GIB)
    assert found is not None
    assert found.changes
    assert written == parse_fleet(changed_text(f"{text}  twin: *small\n", found.changes))
    assert written != spec
    assert "# mine" not in target.read_text()
    assert all(f": {line}\n" in target.read_text() for line in found.changes)


def test_plan_writes_no_other_file_that_exists_and_none_where_nothing_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, other = tmp_path / "fleet.yaml", tmp_path / "other.yaml"
    file.write_text(MODELS)
    other.write_text("mine")
    assert main.main(["plan", str(file), "--vram", "26", "--write", str(other)]) == 2
    assert "other.yaml exists already; name a new file, or" in capsys.readouterr().err
    assert other.read_text() == "mine"
    assert main.main(["plan", str(file), "--vram", "4", "--host-memory", "16", "--write", str(tmp_path / "no")]) == 1
    assert "since no plan fits" in capsys.readouterr().out
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("options", [("--vram", "6,4", "--host-memory", "16"), ()])
def test_reason_is_the_same_as_text_as_json_and_on_the_page_where_nothing_fits(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "fleet.yaml", tmp_path / "plan.html"
    file.write_text(f"gpus: [{{id: 1}}, {{id: 0, memory: 5GiB}}]\n{MODELS}")
    there = Machine((VisibleGpu(0, "GPU", 6 * GIB, 0), VisibleGpu(1, "GPU", 4 * GIB, 0)), "1.0", 16 * GIB)
    monkeypatch.setattr("meltcore.fleet.plan.machine.read_machine", lambda: there)
    assert main.main(["plan", str(file), *options, "--json", "--html", str(page)]) == 1
    output = capsys.readouterr()
    reason = json.loads(output.out)["reason"]
    assert reason.startswith("The fleet does not fit: on GPUs it needs gemma 20.")
    assert "GiB, and there is GPU 1 " in reason
    assert reason.endswith("remove a model or add a GPU.")
    assert "written: " in output.err
    assert reason in html.unescape(page.read_text())
    assert main.main(["plan", str(file), *options]) == 1
    printed = capsys.readouterr()
    assert printed.out == f"DOES NOT FIT {reason}\n"
    assert printed.err == ""


@pytest.mark.slow
@pytest.mark.parametrize(("vram", "sleeping", "on_cpu"), [(80, 3, 0), (32, 2, 2)])
def test_small_cards_get_plans_that_sleep_and_offload_and_that_start(
    vram: int, sleeping: int, on_cpu: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    file = tmp_path / "fleet.yaml"
    assert main.main(["fleet", "init", str(file)]) == 0
    text = file.read_text()
    row = context_table()[0]
    there = Machine((VisibleGpu(0, row.gpu, vram * GIB, row.driver_bytes),), row.driver, 128 * GIB)
    with pytest.raises(ConfigError, match=r"Or, with (context and concurrency as|smaller settings, and fewer)"):
        FleetPlanner(file, lambda _: OneMachine.of(there)).config()
    _, found = plan_fleet(load_fleet(file), [vram * GIB], contexts=row, host_bytes=there.host_bytes)
    assert found is not None
    whole = [each for each in (found.changes, found.other_changes) if not any(".max_" in line for line in each)]
    for lines in (found.changes, found.other_changes, *whole):
        file.write_text(changed(text, lines))
        assert main.main(["plan", str(file), "--vram", str(vram), "--host-memory", "128"]) == 0
        config = FleetPlanner(file, lambda _: OneMachine.of(there)).config()
    engines = config.spec.engines
    budgets = {name: (model.memory or 0) for name, model in engines.items()}
    asleep = {name for name, model in engines.items() if model.is_sleepable}
    hosted = {name for name, model in engines.items() if model.device == "cpu"}
    assert len(asleep) >= sleeping
    assert len(hosted) >= on_cpu
    assert all(engine_config(model).enable_sleep_mode == (name in asleep) for name, model in engines.items())
    awake = sum(size for name, size in budgets.items() if name not in asleep | hosted)
    room = config.room_bytes["0"]
    contexts = sum(row.process_bytes(load_fleet(file).models[name].task) for name in budgets if name not in hosted)
    assert room >= max(budgets[name] for name in asleep)
    plan, _ = plan_fleet(load_fleet(file), [vram * GIB], contexts=row, host_bytes=there.host_bytes)
    assert plan is not None
    held_asleep = sum(plan.needs[name].asleep_bytes for name in asleep)
    assert held_asleep >= 64 * 2**20 * len(asleep)
    assert awake + room + contexts + held_asleep + row.driver_bytes == vram * GIB
    sizes = {name: (model.max_num_seqs, model.max_model_len) for name, model in parse_fleet(text).models.items()}
    assert {n: (m.max_num_seqs, m.max_model_len) for n, m in load_fleet(file).models.items()} == sizes


def test_what_fits_with_a_longer_context_fits_with_a_shorter_one() -> None:
    fits = []
    for length in (512, 2048, 8192, 32_768, 131_072):
        text = MODELS.replace("max_model_len: 4096", f"max_model_len: {length}", 1)
        fits.append(plan_fleet(parse_fleet(text), [45 * GIB])[0] is not None)
    assert fits == sorted(fits, reverse=True)
    assert fits[0]
    assert not fits[-1]


def test_engines_get_the_memory_that_the_plan_gives() -> None:
    spec = parse_fleet(MODELS)
    plan, _ = plan_fleet(spec, [80 * GIB])
    assert plan is not None
    models = check_startable(with_plan(spec, plan)).models.values()
    assert [model.memory for model in models] == [needs.budget_bytes for needs in plan.needs.values()]
    assert {model.device for model in models} == {(0,)}
    assert [engine_config(model).max_num_seqs for model in models] == [4, 4, None]


@pytest.mark.slow
@pytest.mark.parametrize(("vram", "status"), [("96", 0), ("80", 1)])
def test_written_fleet_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], vram: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = str(tmp_path / "fleet.yaml")
    assert main.main(["fleet", "init", path]) == 0
    capsys.readouterr()
    assert main.main(["plan", path, "--vram", vram, "--html", str(tmp_path / "plan.html")]) == status
    output = capsys.readouterr().out
    assert output.startswith("DOES NOT FIT The fleet" if status else "FITS The fleet")
    page = (tmp_path / "plan.html").read_text()
    assert "gemma-3-27b" in page
    assert "MIG" not in output + page
    assert main.main(["plan", path, "--vram", vram, "--mig"]) == status
    assert "Tensor parallelism and MIG exclude each other" in " ".join(capsys.readouterr().out.split())


def test_plan_for_sizes_leaves_out_models_of_unknown_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("models:\n  gone: {checkpoint: /none}\n  sums: {checkpoint: meltcore/sums}\n")
    assert main.main(["plan", str(path), "--vram", "24"]) == 0
    printed = capsys.readouterr()
    left_out = "Not in the plan, since their sizes are unknown: gone."
    assert printed.out.startswith(f"FITS The fleet fits on GPU 0; all models stay awake. {left_out}")
    assert "models.gone is not in the plan: /none" in printed.err
    page = tmp_path / "plan.html"
    for gib, status in (("24", 0), ("0.001", 1)):  # also where no plan fits
        assert main.main(["plan", str(path), "--vram", gib, "--json", "--html", str(page)]) == status
        left_out = json.loads(capsys.readouterr().out)["left_out"]
        assert list(left_out) == ["gone"]
        assert left_out["gone"].startswith("/none")
        assert f"gone: {left_out['gone']}" in page.read_text()
    path.write_text("models:\n  gone: {checkpoint: /none}\n")
    assert main.main(["plan", str(path), "--vram", "24"]) == 2
    assert "no model is in the plan, since the sizes of all are unknown" in capsys.readouterr().err


def test_plan_says_what_it_takes_of_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(MODELS + "  sums: {checkpoint: meltcore/sums, device: cpu, memory: 2GiB}\n")
    assert main.main(["plan", str(path), "--vram", "34", "--host-memory", "8"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "Host memory: 2.75 GiB for models on the CPU and 3.4" in output
    assert "pinned for weights that sleep, of 8 GiB that are available." in output
    assert "NCCL, assumed" not in output
    assert main.main(["plan", str(path), "--vram", "34", "--host-memory", "6"]) == 1
    capsys.readouterr()
    assert main.main(["plan", str(path), "--vram", "34816M", "--host-memory", "8 GiB"]) == 0, "as fleet.yaml has them"
    assert " ".join(capsys.readouterr().out.split()) == output
    for size, reason in (
        ("8TB", "'8TB' is more than 4096 GiB"),
        ("8 apples", "'8 apples' is not a number of more than"),
    ):
        with pytest.raises(SystemExit):
            main.main(["plan", str(path), "--vram", size])
        assert reason in capsys.readouterr().err
    path.write_text(MODELS + "  big: {checkpoint: x, shapes: Qwen/Qwen3-0.6B, tensor_parallel_size: 2}\n")
    assert main.main(["plan", str(path), "--vram", "80,80"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "takes 1 GiB more for NCCL, assumed, and 68 MiB of two ranks to 80 MiB of eight" in output


def test_plan_shows_the_concurrency_that_a_step_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.yaml"
    model = "{checkpoint: none/here, shapes: ai4bharat/IndicF5, task: synthesis, max_num_seqs: %d}"
    path.write_text(f"models:\n  small: {model % 4}\n  large: {model % 65_536}\n")
    assert main.main(["plan", str(path), "--vram", "34"]) == 0
    output = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in output.splitlines() if " synthesis " in line}
    assert rows["large"] == rows["small"], "the same memory, and the same number"
    assert "A step of large is full with 4 at a time: of max_num_seqs 65,536 the others wait" in " ".join(
        output.split()
    )
    assert "A step of small" not in output


def test_picture_of_the_documents_is_that_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert plan_picture.PICTURE.read_text(encoding="utf-8") == plan_picture.picture(), "run scripts/plan_picture.py"


def test_tiny_fleet_of_bundled_models_needs_no_gpu_and_says_what_it_substitutes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiny.yaml"
    assert main.main(["fleet", "init", "--tiny", str(path)]) == 0
    assert "kan_Knda stands for made-up languages" in capsys.readouterr().out
    spec = load_fleet(path)
    assert spec.languages.substitute["kan_Knda"] == ("guj_Gujr", "hin_Deva")
    plan, _ = plan_fleet(spec, [])
    assert plan is not None
    assert {engine.model for host in plan.hosts for engine in host.engines} == set(spec.models)


def test_file_that_exists_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"fleet\.yaml exists already; name another file"):
        fleet_command.run(argparse.Namespace(path=str(path), tiny=False))
    assert path.read_text() == "mine"


def test_checkpoint_without_sizes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"models\.a: /none: "):
        plan_fleet(parse_fleet("models: {a: {checkpoint: /none}}"), [GIB])


def test_measured_contexts_are_used_for_their_gpu_and_driver() -> None:
    row = context_table()[0]
    assert find_contexts(row.gpu, row.driver) == row
    assert "were measured on NVIDIA H200 with driver" in row.note
    other = find_contexts(row.gpu, "1.0")
    assert other.processes == row.processes
    assert other.note.endswith("; this machine has another one.")
    assert find_contexts(None) == row, "a GPU that is pretended"
    assert find_contexts("NVIDIA L4") == ASSUMED
    assert "are assumed, not measured" in ASSUMED.note
    sizes = [plan_fleet(parse_fleet(MODELS), [80 * GIB], contexts=each)[0] for each in (row, ASSUMED)]
    measured, assumed = (plan.gpus[0].used_bytes for plan in sizes if plan is not None)
    beside = row.driver_bytes + sum(row.process_bytes(task) for task in ("generation", "generation", "translation"))
    assert measured - assumed == beside - 3 * CONTEXT_BYTES - DRIVER_BYTES


@pytest.mark.parametrize(
    ("vram", "text"),
    [
        ("80", "The fleet fits on GPU 0; all models stay awake."),
        ("80,80,80,80,80", "The fleet fits on GPU 0; GPUs 1 to 4 are idle; all models stay awake."),
    ],
)
def test_plan_names_used_and_idle_gpus(
    vram: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "fleet.yaml", tmp_path / "plan.html"
    file.write_text("models: {sums: {checkpoint: meltcore/sums}}")
    assert main.main(["plan", str(file), "--vram", vram, "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert text in printed
    assert text in page.read_text()
    assert printed.count(", idle") == vram.count(",")


@pytest.mark.parametrize(
    ("model", "sections", "message"),
    [
        ("url: http://127.0.0.1:9, upstream_key_env: NO_SUCH_KEY", "", "NO_SUCH_KEY"),
        ("command: 'no-such-program --port {port}', device: cpu", "", "no-such-program"),
        ("checkpoint: meltcore/sums, device: cpu", "keys: [{name: a, env: NO_SUCH_KEY}]", "NO_SUCH_KEY"),
        ("checkpoint: meltcore/sums, device: cpu", "keys: [{name: a, file: /no/such/file}]", "/no/such/file"),
    ],
)
def test_plan_refuses_what_up_refuses(
    model: str, sections: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(f"models: {{a: {{{model}}}}}\n{sections}\n")
    errors = []
    for command in ("plan", "up"):
        assert main.main([command, str(file)]) == 2
        errors.append(capsys.readouterr().err.removeprefix(f"meltcore {command}: "))
    assert message in errors[0]
    assert errors[0] == errors[1]
    assert main.main(["plan", str(file), "--vram", "80"]) == 0, "for another machine"
