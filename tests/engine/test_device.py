"""Which GPU is this thread's current one: Triton launches on it, and graphs record on it."""

from __future__ import annotations

import pytest
import torch

from meltcore.config import EngineConfig
from meltcore.engine import engine as engine_file
from meltcore.engine.engine import Engine


class Loading(Exception):
    """The engine has got as far as its weights."""


@pytest.mark.parametrize(
    ("device", "current"),
    [
        (torch.device("cuda", 1), [torch.device("cuda", 1)]),
        (torch.device("cuda"), []),
        (torch.device("cpu"), []),
        (torch.device("cpu", 0), []),
    ],
)
def test_a_gpu_named_by_its_number_is_the_current_one_before_anything_is_loaded(
    device: torch.device, current: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_current: list[torch.device] = []

    def load(*_: object) -> None:
        raise Loading

    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    monkeypatch.setattr(engine_file, "choose_device", lambda *_, **__: device)
    monkeypatch.setattr(engine_file, "load", load)
    with pytest.raises(Loading):
        Engine(EngineConfig(model="meltcore/sums"))
    assert made_current == current
