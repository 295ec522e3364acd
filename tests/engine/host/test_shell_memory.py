"""An idle engine process holds no outputs."""

import weakref
from pathlib import Path

import pytest

from meltcore.engine.host import shell
from meltcore.protocol.generation import EngineStats, SequenceOutput, StepOutputs, ToEngine
from meltcore.protocol.shell import EngineReady


class _Enough(BaseException):
    """Ends the process's loop from within."""


class _Outputs(list[SequenceOutput]):
    """A list that supports weak references."""


class _OneStep:
    """An engine with one step to do."""

    def __init__(self) -> None:
        self.has_work = True
        self.kept_at_idle: bool | None = None

    def ready(self) -> EngineReady:
        return EngineReady("cuda:0", "bfloat16", "real", [], 1.0)

    def step(self) -> StepOutputs:
        self.has_work = False
        outputs = _Outputs()
        self._outputs = weakref.ref(outputs)
        return StepOutputs(outputs, EngineStats(), 0.0)

    def check(self) -> None:
        self.kept_at_idle = self._outputs() is not None
        raise _Enough


@pytest.mark.slow
def test_idle_process_holds_no_outputs_of_its_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _OneStep()
    monkeypatch.setattr(shell, "_IDLE_POLL_MS", 10)
    monkeypatch.setattr("gc.freeze", lambda: None)
    with pytest.raises(_Enough):
        shell.EngineShell(tmp_path, ToEngine).serve(lambda progress: engine)
    assert engine.kept_at_idle is False
