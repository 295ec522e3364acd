"""What `meltcore load` sends to models of the task, and reads."""

from meltcore.measure.load.tasks.task import MeasuredTask
from meltcore.measure.load.wire.response import TextResponse
from meltcore.measure.load.workloads.sentences import text_workload
from meltcore.measure.load.workloads.workload import Prompt

TASK = MeasuredTask(
    open=lambda config, _num_requests, _clips: text_workload(
        config, lambda text: Prompt("/v1/echo", {"text": text}), TextResponse
    ),
    default_workload=lambda _model, _sizes: "echo:words=3-8",
)
