"""Messages between an API server and an engine."""

from meltcore.protocol.batch import BatchReady, BatchStats, TaskRequest, TaskResult
from meltcore.protocol.shell import CommonFromEngine, CommonToEngine, EngineOutputs


class Shout(TaskRequest, tag="shout", array_like=True, frozen=True, kw_only=True):
    """Asks for the echo of a text."""

    text: str


class Echo(TaskResult, tag="echo", array_like=True, frozen=True, kw_only=True):
    """Holds an echo."""

    text: str = ""


class EchoOutputs(EngineOutputs[Echo, BatchStats], tag="echoes", array_like=True, frozen=True):
    """Holds the echoes of one step."""


class EchoReady(BatchReady, tag="echo_ready", array_like=True, frozen=True):
    """Reports that an engine can serve."""

    def describe_limits(self) -> str:
        return f"echoes of up to {self.max_cost} characters together"

    def probe(self, request_id: str) -> Shout:
        return Shout(request_id=request_id, text="hello")


ToEngine = Shout | CommonToEngine
FromEngine = EchoOutputs | EchoReady | CommonFromEngine
