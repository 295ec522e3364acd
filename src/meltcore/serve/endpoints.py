"""Lists the endpoints whose requests are answered by models.

Each task names its own endpoints. Responses, and the chat routes of Anthropic and dwani.ai, belong to no task.
"""

from __future__ import annotations

from meltcore.common.tasks import load, tasks
from meltcore.serve.dialects.dwani_chat import DwaniChatEndpoint
from meltcore.serve.dialects.messages import CountTokensEndpoint, MessagesEndpoint
from meltcore.serve.dialects.responses import InputTokensEndpoint, ResponsesEndpoint
from meltcore.serve.dialects.vision import VisionEndpoint
from meltcore.serve.tasks.endpoint import Endpoint


def endpoint_types() -> list[type[Endpoint]]:
    """Return the endpoints in the order in which /openapi.json has their operations."""
    dialects = [ResponsesEndpoint, InputTokensEndpoint, MessagesEndpoint, CountTokensEndpoint, DwaniChatEndpoint]
    return [*(load(route) for task in tasks().values() for route in task.routes), *dialects, VisionEndpoint]
