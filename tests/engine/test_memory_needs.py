"""Memory that engines need: without torch, enough for what is asked, no MiB more, and more for longer contexts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meltcore.engine.host.memory_needs import engine_needs
from meltcore.errors import ConfigError
from meltcore.protocol.fleet_spec import ModelSection, Size

GEMMA = {"checkpoint": "not/here", "shapes": "google/gemma-3-27b-it", "format": "q4_0", "max_num_seqs": 8}
FLEET = {
    "generation": {**GEMMA, "max_model_len": 8192},
    "translation": {"checkpoint": "not/here", "shapes": "ai4bharat/indictrans2-en-indic-1B"},
    "recognition": {"checkpoint": "ai4bharat/indic-conformer-600m-multilingual", "load_format": "dummy"},
    "synthesis": {"checkpoint": "not/here", "shapes": "ai4bharat/IndicF5"},
}


@pytest.mark.parametrize("task", FLEET)
def test_rows_add_up_to_the_budget_of_each_task(task: str) -> None:
    needs = engine_needs(ModelSection(**FLEET[task]))
    assert needs.task == task
    assert 0 <= needs.budget_bytes - sum(row.size_bytes for row in needs.rows) < 2**20 + 0.08 * needs.budget_bytes
    assert needs.budget_bytes > needs.rows[0].size_bytes > 0


def test_one_mebibyte_less_is_not_enough() -> None:
    needs = engine_needs(ModelSection(**FLEET["generation"]))
    pages = next(row for row in needs.rows if row.name == "KV pages").size_bytes
    less = engine_needs(ModelSection(**FLEET["generation"], memory=Size(needs.budget_bytes - 2**20)))
    assert next(row for row in less.rows if row.name == "KV pages").size_bytes < pages


def test_memory_grows_with_context_and_concurrency() -> None:
    def budget(length: int, seqs: int) -> int:
        return engine_needs(ModelSection(**{**GEMMA, "max_model_len": length, "max_num_seqs": seqs})).budget_bytes

    lengths = [budget(length, 8) for length in (512, 1024, 4096, 8192, 65_536)]
    assert lengths == sorted(set(lengths))
    counts = [budget(8192, seqs) for seqs in (1, 2, 8, 64)]
    assert counts == sorted(set(counts))


def test_needs_are_known_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from meltcore.engine.host.memory_needs import engine_needs; "
        "from meltcore.protocol.fleet_spec import ModelSection; "
        "assert engine_needs(ModelSection(checkpoint='meltcore/sums')).budget_bytes > 2**20"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_memory_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="must hold the weights"):
        engine_needs(ModelSection(**FLEET["generation"], memory=Size(2**30)))
