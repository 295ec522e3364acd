"""The engine, and the memory that it needs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from time import sleep

from echo_task.messages import Echo, EchoOutputs, EchoReady, Shout
from meltcore.engine.memory.memory_needs import PlannedEngine, budget_rows, concurrency
from meltcore.engine.tasks.batch_engine import BatchEngine, OneStepTask
from meltcore.models.checkpoints.checkpoint import Checkpoint
from meltcore.protocol.shell import MemoryRow
from meltcore.settings.config import EngineConfig
from meltcore.settings.fleet_spec import ModelSection


class EchoTask(OneStepTask[Shout, Echo]):
    """Echoes texts. The text "wait for PATH" has its echo once there is such a file."""

    result, message, max_cost = Echo, EchoOutputs, 1000

    def cost(self, request: Shout) -> int:
        return len(request.text)

    def compute(self, requests: Sequence[Shout], padded_cost: int) -> list[Echo]:
        sleep(0.002)
        waited = {each: each.text.removeprefix("wait for ") for each in requests}
        done = [each for each, path in waited.items() if path == each.text or Path(path).exists()]
        return [Echo(request_id=each.request_id, finish_reason="stop", text=each.text) for each in done]

    def ready(self) -> EchoReady:
        return EchoReady(device="CPU", dtype="float32", weights="real", memory=[], load_s=0.0, max_cost=self.max_cost)


def echo_engine(_config: EngineConfig, progress: Callable[[str, float], None]) -> BatchEngine[Shout, Echo]:
    progress("listening", 0.0)
    return BatchEngine(EchoTask())


def echo_needs(model: ModelSection, _checkpoint: Checkpoint, _on_cpu: bool, source: str, _sizes: None) -> PlannedEngine:
    def divide(memory_bytes: int) -> tuple[bool, list[MemoryRow]]:
        return memory_bytes >= concurrency(model) * 2**20, [MemoryRow("weights", 0)]

    budget, rows = budget_rows(model, divide)
    return PlannedEngine(model.task, budget, rows, None, concurrency(model), source)
