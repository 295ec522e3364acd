"""What an engine process lets go of once nothing is left to do."""

import sys
import weakref
from pathlib import Path

import pytest

from meltcore.config import EngineConfig
from meltcore.engine import process
from meltcore.engine.host_memory import give_back_memory
from meltcore.engine.messages import EngineStats, Loading, SequenceOutput, StepOutputs


def test_names_of_methods_that_the_interpreter_remembers_are_let_go() -> None:
    names = ["".join(["conj", "ugate"]) for _ in range(100)]  # one text, each a string of its own
    held = list(map(sys.getrefcount, names))
    assert all(getattr(1, name)() == 1 for name in names)
    assert sum(map(sys.getrefcount, names)) > sum(held), "this interpreter keeps no names: nothing is to be let go"
    give_back_memory()
    assert list(map(sys.getrefcount, names)) == held


class _Enough(BaseException):
    """Ends the process's loop from within."""


class _Outputs(list[SequenceOutput]):
    """A list that can be watched."""


class _OneStep:
    """An engine with one step to do."""

    def __init__(self) -> None:
        self.has_work = True
        self.kept_at_idle: bool | None = None

    def ready(self) -> Loading:
        return Loading("ready", 1.0)

    def step(self) -> StepOutputs:
        self.has_work = False
        outputs = _Outputs()
        self._outputs = weakref.ref(outputs)
        return StepOutputs(outputs, EngineStats(), 0.0)

    def check(self) -> None:
        self.kept_at_idle = self._outputs() is not None
        raise _Enough


def test_idle_process_holds_nothing_of_its_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _OneStep()
    monkeypatch.setattr(process, "Engine", lambda config, progress, ranks: engine)
    monkeypatch.setattr(process, "_IDLE_POLL_MS", 10)
    monkeypatch.setattr("gc.freeze", lambda: None)
    with pytest.raises(_Enough):
        process.EngineProcess(tmp_path).serve(EngineConfig(model="none"))
    assert engine.kept_at_idle is False
