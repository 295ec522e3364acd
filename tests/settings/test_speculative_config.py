"""Settings of speculative decoding: what is refused, by name, value and limit."""

from __future__ import annotations

import pytest

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.settings.config import EngineConfig
from meltcore.settings.fleet_file import parse_fleet

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
WRONG = [
    ({}, "missing required field `method`"),
    ({"method": "mtp", "num_speculative_tokens": 3, "prompt_lookup_max": 8}, "prompt_lookup_max is for method ngram"),
    ({"method": "ngram"}, "num_speculative_tokens"),
    ({**NGRAM, "method": "eagle"}, "'eagle'.*ngram, mtp"),
    ({**NGRAM, "num_speculative_tokens": 9}, '"num_speculative_tokens": 9.*1 to 7'),
    ({**NGRAM, "prompt_lookup_min": 5}, "prompt_lookup_min 5 is more than prompt_lookup_max 4"),
    ({**NGRAM, "drafts": 1}, "unknown field `drafts`"),
    ({**NGRAM, "synthetic_acceptance_length": 2}, "rejection_sample_method synthetic; got 2"),
    (
        {**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 4.5},
        "from 1 to 4, the tokens of a step; got 4.5",
    ),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"speculative_config: .*{message}"):
        EngineConfig(model="m", speculative_config=settings)


def test_flag_is_checked_before_anything_is_opened(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "owner/model", "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 9}'])
    assert "--speculative-config: speculative_config: got" in capsys.readouterr().err


def test_a_fleet_names_the_model() -> None:
    text = "version: 1\nmodels: {a: {checkpoint: m, speculative_config: {method: ngram}}}"
    with pytest.raises(ConfigError, match=r"models\.a: speculative_config: .*num_speculative_tokens"):
        parse_fleet(text)
    assert parse_fleet(text.replace("ngram", "ngram, num_speculative_tokens: 2")).models["a"].max_drafts == 2


def test_mtp_has_the_names_of_vllm() -> None:
    settings = {"method": "qwen3_5_mtp", "num_speculative_tokens": 3}
    config = EngineConfig(model="m", speculative_config=settings)
    assert config.has_mtp
    assert config.speculation is not None
    assert config.speculation.description == "mtp"


def test_synthetic_acceptance_is_named_in_results() -> None:
    synthetic = {**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    config = EngineConfig(model="m", speculative_config=synthetic)
    assert config.speculation is not None
    assert config.speculation.description == "ngram, synthetic acceptance length 2.5"
