"""Reads the sizes of models, which a short child process builds on torch's meta device.

Commands and the supervisor run without torch, whose import takes 2 s of CPU time. One child answers for all models of a
plan, and a process keeps the answers.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any, NamedTuple

from meltcore.common.errors import ConfigError
from meltcore.common.process import describe_exit, run
from meltcore.common.tasks import load
from meltcore.settings.fleet_spec import ModelSection

_LIMIT_S = 180.0  # for the child, which takes about 3 s, and many times as long on a busy machine or a cold disk
_known: dict[str, Any] = {}


class SizeRequest(NamedTuple):
    """A request for the sizes of a model.

    Args:
        function: import path of the function that builds the model and returns its sizes. It is called as
            `function(model, on_cpu)`.
        model: the checkpoint, or the shapes that replace it, with the settings that decide how weights are held.
        on_cpu: whether the engine runs on a CPU.
        contents: identifies the contents of the checkpoint's files, so that changed files are read again.
    """

    function: str
    model: ModelSection
    on_cpu: bool
    contents: str


def read_sizes(requests: Iterable[SizeRequest]) -> list[Any]:
    """Return the sizes of each model, or its ConfigError if it cannot be built.

    If this process has imported torch, it builds the models itself. Raises ConfigError if the child process does not
    answer.
    """
    keys, missing = [], {}
    for request in requests:
        keys.append(repr(request))
        if keys[-1] not in _known:
            missing[keys[-1]] = request
    answers = dict(_known)
    if missing:
        build = _built if "torch" in sys.modules else _built_by_child
        answers |= zip(missing, build(list(missing.values())), strict=True)
    # Errors too: a pending engine asks again each second. A mended model has other `contents`.
    _known.update({key: answers[key] for key in missing})
    return [answers[key] for key in keys]


def _built(requests: list[SizeRequest]) -> list[Any]:
    return [_answer(request) for request in requests]


def _answer(request: SizeRequest) -> Any:
    try:
        return load(request.function)(request.model, request.on_cpu)
    except ConfigError as error:
        return error


def _built_by_child(requests: list[SizeRequest]) -> list[Any]:
    if find_spec("torch") is None:
        raise ConfigError("reading the sizes of models needs torch: pip install 'meltcore[engine]'")
    child = run([sys.executable, "-m", __name__], limit_s=_LIMIT_S, stdin=pickle.dumps(requests))
    if child.returncode == 0:
        answers: list[Any] = pickle.loads(child.stdout)  # noqa: S301 # of our own child
        return answers
    end = f"no answer within {_LIMIT_S:g} s" if child.returncode is None else describe_exit(child.returncode)
    last_line = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    raise ConfigError(
        f"the process that builds models to read their sizes failed: {end}{last_line and f'; {last_line}'}"
    )


if __name__ == "__main__":
    sys.stdout.buffer.write(pickle.dumps(_built(pickle.load(sys.stdin.buffer))))  # noqa: S301 # of our own parent
