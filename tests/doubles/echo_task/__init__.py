"""A task of another package: it answers a text with the same text. docs/adding-a-task.md follows these files."""

from meltcore.common.tasks import Task

TASK = Task(
    name="echo",
    paths={"/v1/echo": "echo"},
    backend="echo_task.serve:EchoBackend",
    routes=("echo_task.serve:EchoEndpoint",),
    engine="echo_task.engine:echo_engine",
    messages="echo_task.messages",
    needs="echo_task.engine:echo_needs",
    workload="echo_task.load:TASK",
    architectures=frozenset(("Echo",)),
    settings=("max_queue_chars",),
)
