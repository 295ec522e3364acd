"""Runs `meltcore load --fleet` once: finds the models, runs the parts, and returns the result with its gates."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from meltcore.common.errors import ConfigError
from meltcore.common.files import write_document
from meltcore.measure.documents.fingerprint import take_fingerprint
from meltcore.measure.documents.schema import (
    FleetLevel,
    FleetLoad,
    Interference,
    ModelUnderLoad,
    Part,
    SimulatedStream,
    StreamLoad,
)
from meltcore.measure.documents.served_model import model_facts, model_notes
from meltcore.measure.documents.step_costs import GpuStepCosts, StepCosts
from meltcore.measure.documents.verdicts import SCORED, Verdict, worst_verdict
from meltcore.measure.load.fleet.bound import MeasuredStream, simulate_experiment
from meltcore.measure.load.fleet.fleet_config import PAIRS, FleetLoadConfig, shares_of, split_connections
from meltcore.measure.load.fleet.fleet_gates import (
    NOT_SIMULATED,
    ExperimentSpec,
    choose_models,
    fleet_health,
    load_experiment,
    make_experiment,
    measured_loads,
)
from meltcore.measure.load.fleet.fleet_streams import FleetLevels, Stream
from meltcore.measure.load.fleet.simulation import Job
from meltcore.measure.load.fleet.step_costs import (
    AloneSteps,
    ModelCounters,
    StepCostsFile,
    alone_error,
    counted_between,
    fit_step_costs,
    merge_step_costs,
    read_counters,
    read_step_costs,
)
from meltcore.measure.load.record import RecordFile
from meltcore.measure.load.run.runner import check_limits
from meltcore.measure.load.run.streams import OnProgress
from meltcore.measure.load.tasks.task import ServedModel, default_task, find_task, tasks
from meltcore.measure.load.wire.connection import HttpRequestError, Target, request, resolve_target, run_coroutine
from meltcore.measure.load.wire.probe import PROBE_TIMEOUT_S
from meltcore.measure.load.wire.response import BadJsonError, decode_json
from meltcore.protocol.step_sums import StepSums, total_steps

# For so long at most an experiment runs all streams together before it measures. A step whose shape an engine meets for
# the first time took up to 0.6 s (IndicConformer, H200, 2026-11-30), which is no step cost and no latency alone.
REHEARSAL_S = 10.0
# Called with each level once it is over: what a killed run leaves behind.
OnFleetLevel = Callable[[FleetLevel], None]


@dataclass(kw_only=True)
class _Plan:
    """The plan of a run: the models with their workloads, and the experiment on interference."""

    models: list[ModelUnderLoad]
    experiment: ExperimentSpec | None = None
    experiment_streams: list[Stream]


def measure_fleet(
    config: FleetLoadConfig,
    arguments: Sequence[str],
    *,
    records_path: Path | None = None,
    on_progress: OnProgress | None = None,
    on_level: OnFleetLevel | None = None,
    on_plan: Callable[[str], None] = lambda _text: None,
) -> FleetLoad:
    """Run the parts of `config` and return the result. Raises ConfigError if the run cannot start.

    `on_plan` receives a sentence that says what the run will send, and how long it takes, before it starts.
    `arguments` is the command line, which the fingerprint stores. After the first Ctrl-C, or if the server dies, the
    current level ends as PARTIAL and the other levels are skipped.
    """
    started, start_s = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    run = _FleetRun(config, records_path, on_progress, on_level, on_plan)
    run_coroutine(run.run(), uvloop.new_event_loop)
    result = FleetLoad(
        status="partial" if run.has_ended_early else "complete",
        started=started,
        duration_s=time.monotonic() - start_s,
        fingerprint=take_fingerprint(arguments, config.seed),
        settings=config.settings,
        models=run.plan.models,
        interference=run.interference,
        notes=run.notes,
        gpu_note="GPUs were not measured: the server is on another machine, or there is no NVIDIA driver.",
    )
    result.step_costs = run.add_step_costs()
    if run.plan.experiment is not None and len(run.experiment_loads) == 2:
        alone, together = run.experiment_loads
        simulated = run.simulate(run.plan.experiment)
        result.experiment = make_experiment(run.plan.experiment, config.interference_s, alone, together, simulated)
    shown = {id(load) for load in measured_loads(result)}  # in complete pairs or a complete experiment
    result.levels = [level for level in run.levels if not shown.issuperset(map(id, level.streams))]
    verdicts: list[Verdict] = [stream.level.verdict for level in run.levels for stream in level.streams]
    judge(result, config.p95_limits_ms, [*verdicts, "PARTIAL"] if run.has_ended_early else verdicts)
    run.save_step_costs(result)
    return result


def judge(result: FleetLoad, p95_limits_ms: dict[str, float], verdicts: Sequence[Verdict]) -> None:
    """Set the health lines, the verdict and its reasons in the result.

    An experiment with a gate that was not run is UNKNOWN, since that gate has not passed.
    """
    result.health = fleet_health(result, p95_limits_ms)
    experiment_gates = [] if result.experiment is None else result.experiment.gates
    failed = [gate for gate in (*result.health, *experiment_gates) if gate.status == "FAIL"]
    not_run = [gate for gate in experiment_gates if gate.status == "NOT RUN"]
    result.reasons = [f"{gate.name}: {gate.detail}" for gate in failed or not_run]
    result.verdict = worst_verdict([*verdicts, "FAILED"] if failed else verdicts, "PARTIAL")
    if not_run and result.verdict in SCORED:
        result.verdict = "UNKNOWN"


class _FleetRun:
    def __init__(
        self,
        config: FleetLoadConfig,
        records_path: Path | None,
        on_progress: OnProgress | None,
        on_level: OnFleetLevel | None,
        on_plan: Callable[[str], None],
    ) -> None:
        self._config = config
        self._records_path = records_path
        self._on_progress = on_progress
        self._on_level = on_level
        self._on_plan = on_plan
        self._runner: FleetLevels
        self.plan: _Plan
        self.levels: list[FleetLevel] = []
        self.interference: list[Interference] = []
        self.experiment_loads: list[list[StreamLoad]] = []
        self.notes: list[str] = []
        self._steps_alone: dict[str, AloneSteps] = {}  # by model
        self._experiment_jobs: tuple[list[list[Job]], list[list[Job]]] = ([], [])  # alone and together, by stream
        self._known_costs = StepCostsFile() if config.step_costs is None else read_step_costs(Path(config.step_costs))

    @property
    def has_ended_early(self) -> bool:
        """Whether the run was cut short, by an interrupt or by the server's death."""
        return self._runner.has_ended

    async def run(self) -> None:
        config = self._config
        num_connections = max((*config.levels, 2 * config.pair_connections))
        check_limits(num_connections, connections_per_process=num_connections)
        self._target = target = resolve_target(config.url, config.api_key)
        self.plan = await self._make_plan(target)
        experiment = self.plan.experiment
        experiment_s = None
        if experiment is not None:
            send_s = config.interference_s
            alone_s = sum(stream.alone_s or send_s for stream in experiment.streams)
            experiment_s = min(REHEARSAL_S, send_s) + alone_s + send_s
        self._on_plan(config.plan(len(self.plan.models), experiment_s))
        record_file = RecordFile(self._records_path)
        try:
            self._runner = FleetLevels(
                target,
                record_file,
                processes=config.processes,
                seed=config.seed,
                timeouts=config.timeouts,
                drain_limit_s=config.drain_limit_s,
                on_progress=self._on_progress,
            )
            with self._runner.interrupt:
                await self._run_parts()
        finally:
            record_file.close()
        if record_file.problem is not None:
            self.notes.append(record_file.problem)

    async def _make_plan(self, target: Target) -> _Plan:
        config = self._config
        served = [replace(model, is_bundled=config.are_bundled) for model in await find_models(target, config.models)]
        shares = shares_of(served, config.mix)
        models = [
            ModelUnderLoad(
                name=model.name,
                task=model.task,
                workload=tasks()[model.task].default_workload(model, config.sizes),
                share=share,
                facts=model_facts({"data": [model.card]}, model.name, ("priority",)),
            )
            for model, share in zip(served, shares, strict=True)
        ]
        for model in models:
            self.notes += [f"{model.name}: {note}" for note in model_notes(model.facts)]
        plan = _Plan(models=models, experiment_streams=[])
        if "interference" in config.parts and config.interference != PAIRS:
            plan.experiment = load_experiment(config.interference)
            plan.experiment_streams = [
                Stream(
                    name=stream.name,
                    model=model.name,
                    workload=stream.workload or tasks()[model.task].default_workload(model, config.sizes),
                    connections=stream.concurrency or 0,
                    rate=stream.rate,
                )
                for stream, model in zip(plan.experiment.streams, choose_models(plan.experiment, served), strict=True)
            ]
        return plan

    async def _run_parts(self) -> None:
        config, models = self._config, self.plan.models
        await self._runner.warm_up([*(_stream(model, 1) for model in models), *self.plan.experiment_streams])
        if "per-model" in config.parts:
            for model in models:
                await self._run_ladder(model)
        if "mixed" in config.parts:
            for connections in config.levels:
                counts = split_connections(connections, [model.share for model in models])
                streams = [_stream(model, count) for model, count in zip(models, counts, strict=True) if count]
                await self._level("mixed", f"mixed, {connections:,} connections", streams, config.level_s)
        if self.plan.experiment is not None:
            await self._run_experiment(self.plan.experiment)
        elif "interference" in config.parts:
            await self._run_pairs()

    async def _run_ladder(self, model: ModelUnderLoad) -> None:
        """Run the levels of one model alone.

        Stop after a level whose queue needs more than `drain_limit_s` to empty.
        """
        config = self._config
        for position, connections in enumerate(config.levels):
            label = f"{model.name}, {connections:,} connections"
            level = await self._level("per-model", label, [_stream(model, connections)], config.level_s)
            skipped = [f"{each:,}" for each in config.levels[position + 1 :] if each > connections]
            if level is not None and skipped and level.duration_s - config.level_s > config.drain_limit_s:
                self.notes.append(
                    f"{model.name} alone with {', '.join(skipped)} connections was not run: with {connections:,} "
                    f"requests were in flight {config.drain_limit_s:g} s after the last one (--drain-limit), and failed"
                )
                return

    async def _run_pairs(self) -> None:
        """Measure each model alone, and then together with each other model."""
        config, models = self._config, self.plan.models
        streams = [_stream(model, config.pair_connections) for model in models]
        alone: dict[str, StreamLoad] = {}
        for stream in streams:
            level = await self._level("interference", f"{stream.name} alone", [stream], config.interference_s)
            if level is not None:
                [alone[stream.name]] = level.streams
        for victim in streams:
            for aggressor in streams:
                if victim is aggressor:
                    continue
                label = f"{victim.name} beside {aggressor.name}"
                level = await self._level("interference", label, [victim, aggressor], config.interference_s)
                if level is not None:
                    beside, aggressor_load = level.streams
                    self.interference.append(
                        Interference(
                            victim=victim.name,
                            aggressor=aggressor.name,
                            alone=alone[victim.name],
                            beside=beside,
                            aggressor_load=aggressor_load,
                        )
                    )

    async def _run_experiment(self, spec: ExperimentSpec) -> None:
        streams, send_s = self.plan.experiment_streams, self._config.interference_s
        alone: list[StreamLoad] = []
        alone_jobs: list[list[Job]] = []
        if not self._runner.has_ended:
            send_rehearsal_s = min(REHEARSAL_S, send_s)
            rehearsal = await self._runner.run("interference", f"{spec.name}: rehearsal", streams, send_rehearsal_s)
            if self._runner.has_ended:  # else it is in no result
                self._add_level(rehearsal)
        for stream, each in zip(streams, spec.streams, strict=True):
            label = f"{spec.name}: {stream.name} alone"
            level = await self._level("interference", label, [stream], each.alone_s or send_s)
            if level is not None:
                alone += level.streams
                alone_jobs += self._runner.jobs
        level = await self._level("interference", f"{spec.name}: together", streams, send_s)
        if level is not None:
            self.experiment_loads = [alone, level.streams]
            self._experiment_jobs = (alone_jobs, self._runner.jobs)

    async def _level(self, part: Part, label: str, streams: Sequence[Stream], send_s: float) -> FleetLevel | None:
        """Run a level and return its result. Returns None if the run ended before or during the level."""
        if self._runner.has_ended:
            return None
        earlier = await read_counters(self._target)
        level = await self._runner.run(part, label, streams, send_s)
        later = await read_counters(self._target)
        counted = {name: counted_between(earlier.get(name, ModelCounters()), each) for name, each in later.items()}
        for load, jobs in zip(level.streams, self._runner.jobs, strict=True):
            own = counted.get(load.model)
            total = StepSums() if own is None else total_steps(own.steps)
            if total.steps:
                load.rows_per_step = total.rows / total.steps
                load.prompt_tokens_per_step = total.prompt_tokens / total.steps
                load.steps_s = total.seconds
            if len(streams) == 1 and load.model in counted:
                error = alone_error(load, jobs, counted)
                if error or own is None:
                    self.notes.append(f"{label}: left out of the step costs: {error}")
                else:
                    self._steps_alone.setdefault(load.model, AloneSteps()).add(own.steps, jobs)
        self._add_level(level)
        return None if self._runner.has_ended else level

    def _add_level(self, level: FleetLevel) -> None:
        self.levels.append(level)
        if self._on_level is not None:
            self._on_level(level)

    def add_step_costs(self) -> dict[str, StepCosts]:
        """Return the step costs that the run has measured, and add them to the known ones."""
        measured = {}
        for model in self.plan.models:
            try:
                costs = fit_step_costs(self._steps_alone.get(model.name, AloneSteps()))
            except ValueError as error:
                self.notes.append(f"{model.name}: the server's step metrics give no step costs: {error}")
                continue
            if costs is not None:
                gpu = self._gpu_costs(model)
                measured[model.name] = costs
                gpu.models[model.name] = merge_step_costs(gpu.models.get(model.name), costs)
        return measured

    def save_step_costs(self, result: FleetLoad) -> None:
        """Write the step costs into the file of --step-costs if the run is complete and lost nothing."""
        path = self._config.step_costs
        if path is None or not result.step_costs:
            return
        if result.status == "partial" or any(line.status == "FAIL" for line in result.health):
            self.notes.append(f"{path} keeps its step costs: the run ended early, or a model failed")
            return
        try:
            write_document(Path(path), self._known_costs)
        except ConfigError as error:  # the result is not lost with it
            self.notes.append(f"the step costs were not kept: {error}")

    def _gpu_costs(self, model: ModelUnderLoad) -> GpuStepCosts:
        return self._known_costs.gpus.setdefault(str(model.facts.get("device", "unknown")), GpuStepCosts())

    def simulate(self, spec: ExperimentSpec) -> list[SimulatedStream] | str:
        """Return what an ideal scheduler gives each stream, or the reason why this is unknown."""
        models = {model.name: model for model in self.plan.models}
        gpus = [self._gpu_costs(models[stream.model]) for stream in self.plan.experiment_streams]
        costs = [gpu.models.get(stream.model) for gpu, stream in zip(gpus, self.plan.experiment_streams, strict=True)]
        known = [each for each in costs if each is not None and each.is_measured]
        if len(known) < len(costs):
            return NOT_SIMULATED
        if any(gpu is not gpus[0] for gpu in gpus):
            self.notes.append(
                "the simulation takes all streams to share one GPU, and their models name several devices"
            )
        alone, together = self._experiment_jobs
        levels_alone = [load.level for load in self.experiment_loads[0]]
        send_s = self._config.interference_s
        measured = [
            MeasuredStream(
                spec=spec_stream,
                costs=known[at],
                alone=alone[at],
                together=together[at],
                alone_s=spec_stream.alone_s or send_s,
                alone_mean_ms=levels_alone[at].e2e_ms.mean,
                alone_first_mean_ms=levels_alone[at].ttft_ms.mean,
                priority=models[self.plan.experiment_streams[at].model].facts.get("priority"),
            )
            for at, spec_stream in enumerate(spec.streams)
        ]
        try:
            return simulate_experiment(measured, send_s, gpus[0])
        except (ArithmeticError, ValueError) as error:  # what was measured is not lost with it
            return f"not simulated: {error}; the step costs are wrong (--step-costs)"


def _stream(model: ModelUnderLoad, connections: int) -> Stream:
    return Stream(name=model.name, model=model.name, workload=model.workload, connections=connections)


async def find_models(target: Target, names: Sequence[str] = ()) -> list[ServedModel]:
    """Return the models of /v1/models without aliases, in the server's order.

    If `names` are given, return only those models. Raises ConfigError if the server does not answer, lists no model, or
    lacks one of `names`.
    """
    try:
        response = await request(target, "GET", "/v1/models", timeout_s=PROBE_TIMEOUT_S)
    except HttpRequestError as error:
        raise ConfigError(f"{target.url} does not answer: {error}") from error
    try:
        cards = decode_json(msgspec.json.Decoder(), response.body)["data"] if response.status == 200 else []
        ids = {str(card["id"]) for card in cards}
    except (BadJsonError, KeyError, TypeError) as error:
        raise ConfigError(f"/v1/models of {target.url} is no list of models: {response.body[:80]!r}") from error
    unknown = [name for name in names if name not in ids]
    if unknown:
        raise ConfigError(f"--models: {unknown[0]} is not served; {target.url} has {', '.join(sorted(ids)) or 'none'}")
    if not cards:
        raise ConfigError(f"/v1/models of {target.url} names no model (status {response.status})")
    if names:
        return [_served(card) for card in cards if card["id"] in names]
    return [_served(card) for card in cards if card.get("root", card["id"]) == card["id"] or card["root"] not in ids]


def _served(card: Mapping[str, Any]) -> ServedModel:
    word = str(card.get("task") or default_task().name)
    task = find_task(word, f"/v1/models: {card['id']} has the task {word!r}")
    return ServedModel(name=str(card["id"]), task=task.name, card=card)
