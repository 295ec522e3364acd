from __future__ import annotations

import pytest

from meltcore.measure.documents.served_model import model_facts, model_notes


def test_dummy_weights_and_synthetic_tokenizer_yield_notes() -> None:
    listing = {"data": [{"id": "other"}, {"id": "m", "weights": "dummy", "tokenizer": "synthetic", "owned_by": "x"}]}
    facts = model_facts(listing, "m")
    assert facts == {"weights": "dummy", "tokenizer": "synthetic"}
    weights, tokenizer, debug = model_notes(facts | {"debug": ["--no-async-scheduling"]})
    assert "--no-async-scheduling" in debug
    assert "random weights" in weights
    assert "synthetic" in tokenizer
    assert "5 tokens more" in model_notes(facts | {"output_lengths": "synthetic"})[-1]
    assert model_notes({"weights": "real", "tokenizer": "real", "output_lengths": "model"}) == []


def test_facts_hold_the_precision_of_the_served_process() -> None:
    precision = {"weight_dtypes": ["float8_e4m3fn"], "kv_cache_dtype": "bfloat16", "speculative_decoding": "none"}
    assert model_facts({"data": [{"id": "m", **precision}]}, "m") == precision


def test_replaced_fields_of_the_checkpoint_yield_a_note() -> None:
    overrides = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    facts = model_facts({"data": [{"id": "m", "hf_overrides": overrides}]}, "m")
    assert facts == {"hf_overrides": overrides}
    assert model_notes(facts) == [
        "The server replaced fields of the checkpoint's config.json "
        '(--hf-overrides {"rope_parameters": {"factor": 4.0, "rope_type": "yarn"}}).'
    ]
    assert model_facts({"data": [{"id": "m", "hf_overrides": {}}]}, "m") == {}


@pytest.mark.parametrize("listing", [None, [], {}, {"data": None}, {"data": ["m", {"id": "other"}]}])
def test_server_without_extra_fields_has_no_facts(listing: object) -> None:
    assert model_facts(listing, "m") == {}
