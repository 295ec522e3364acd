from __future__ import annotations

import pytest

from meltcore.results.served import model_facts, model_notes


def test_dummy_weights_and_synthetic_tokenizer_are_said_aloud() -> None:
    listing = {"data": [{"id": "other"}, {"id": "m", "weights": "dummy", "tokenizer": "synthetic", "owned_by": "x"}]}
    facts = model_facts(listing, "m")
    assert facts == {"weights": "dummy", "tokenizer": "synthetic"}
    weights, tokenizer, debug = model_notes(facts | {"debug": ["no-overlap"]})
    assert "no-overlap" in debug
    assert "random weights" in weights
    assert "synthetic" in tokenizer
    assert model_notes({"weights": "real", "tokenizer": "real"}) == []


@pytest.mark.parametrize("listing", [None, [], {}, {"data": None}, {"data": ["m", {"id": "other"}]}])
def test_a_server_that_says_nothing_has_no_facts(listing: object) -> None:
    assert model_facts(listing, "m") == {}
