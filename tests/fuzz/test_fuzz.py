"""Every target of `fuzz.py`, with a few damaged inputs: the program runs them for minutes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import fuzz
import pytest
from fuzz import Target, TooLongError, edited, limited, run_round
from fuzz_targets import TARGETS

from meltcore.common.errors import ConfigError

INPUTS = 8


# threat: any of them: damaged inputs of 24 parsers end in the documented errors
@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_damaged_inputs_end_in_documented_errors(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    target = TARGETS[name]()
    for data in target.seeds[:3]:  # which imports what the parser needs
        target.check(data)
    assert run_round(target, 0, INPUTS) == INPUTS
    assert {edited(start.to_bytes(2, "big"), target) for start in range(len(target.seeds))} == {*target.seeds}


def faulty(data: bytes) -> None:
    if len(data) > 3:
        raise KeyError("not documented")


def leaving(data: bytes) -> None:
    Path("left").write_bytes(data)


def endless(data: bytes) -> None:
    begin_s = time.process_time()
    while time.process_time() - begin_s < 60:
        pass


@pytest.mark.parametrize(("check", "error"), [(faulty, KeyError), (leaving, AssertionError), (endless, TooLongError)])
def test_each_kind_of_fault_is_found(
    check: object, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fuzz, "LIMIT_S", 0.05)
    target = Target(check, [b"whole"])  # type: ignore[arg-type]
    if error is TooLongError:  # of which Hypothesis would try a shorter one for long
        with pytest.raises(TooLongError), limited():
            endless(b"")
        return
    with pytest.raises(error):
        run_round(target, 0, 20)


def test_error_of_a_parser_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def check(data: bytes) -> None:
        try:
            raise ConfigError("documented")
        except ConfigError:
            return

    assert run_round(Target(check, [b"a", b"b"]), 3, 20) == 20


def test_program_lists_its_targets() -> None:
    command = [sys.executable, fuzz.__file__, "nothing"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ", ".join(TARGETS) in ended.stderr
