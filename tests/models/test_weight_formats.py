"""The table of models, weight formats and GPUs in the docs is what the code builds."""

from __future__ import annotations

import code_tables
import pytest

from meltcore.models.registry import ARCHITECTURES


def table() -> dict[str, dict[str, str]]:
    """The cells by format and column."""
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in code_tables.weight_formats()]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


@pytest.mark.slow
def test_cells_are_what_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    found = table()
    [blocks] = [name for name in found if "quantized formats" in name]
    assert {f"`{family.__name__}`" for family in ARCHITECTURES.values()} <= found[blocks].keys()
    assert (found[blocks]["`Llama`"], found[blocks]["`Qwen3_5`"]) == ("yes", "no")
    assert found[blocks]["GPUs"] == "8.0 and later (A100)"
    assert found["FP8, quantized at load"]["GPUs"] == "8.9 and later (L40S)"
    monkeypatch.delitem(code_tables.FAMILIES, "qwen3")
    assert table()[blocks]["`Qwen3`"] == "no"


@pytest.mark.slow
def test_format_that_is_refused_has_neither_gpus_nor_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(code_tables._PUBLISHED, "awq", {"bits": 3, "group_size": 128})
    assert set(list(table()[code_tables._PUBLISHED_NAMES["awq"]].values())[2:]) == {"no", "none"}
