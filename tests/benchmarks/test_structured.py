"""Answers of the bundled model under generated schemas are valid by jsonschema, and cut ones are valid prefixes."""

from __future__ import annotations

import pytest
from schemas import schemas
from structured_validity import VALIDATOR, validate

from meltcore import LLM
from meltcore.models.checkpoints.checkpoint import BUNDLED_MODEL

pytestmark = pytest.mark.slow


def test_answers_under_generated_schemas_are_valid() -> None:
    llm = LLM(BUNDLED_MODEL, device="cpu", max_num_seqs=32, max_model_len=256)
    rows = {row.work.partition(",")[0]: row.value for row in validate(llm, 40, tokens=150, temperature=1.5)}
    llm.close()
    assert rows["answers that are valid"] == 100
    assert rows["free greedy answers that are the same beside them"] == 100
    assert rows["schemas enforced"] + rows["schemas weakened with notice"] + rows["schemas refused"] == pytest.approx(
        100
    )


def test_schemas_are_valid_and_differ() -> None:
    found = schemas(700)
    for schema in found:
        VALIDATOR.check_schema(schema)
    assert len({str(schema) for schema in found}) > 600
