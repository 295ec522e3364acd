"""Beam search finds CTranslate2's best hypotheses, for the weights that its fairseq converter has put into its format.

ctranslate2 is no dependency of the tests: `pip install ctranslate2` and run this file by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq_tools import fairseq_tensors, write_fairseq
from m2m100_tools import DISTILLED, SMALL, load_model, random_sources, reference_model

from meltcore.engine.translation.beam_search import BeamOptions, BeamSearch

ctranslate2 = pytest.importorskip("ctranslate2", reason="not a dependency of the tests; run by hand")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
NEW_TOKENS, NOISE = 12, 1e-4
SPECIAL = ["<s>", "<blank>", "</s>", "<unk>"]


def with_endings(reference: Any) -> Any:
    """Give the padding token logits that are never the best, and the end token such that often are.

    The padding token has no position here, as in transformers. CTranslate2 gives it one.
    """
    with torch.no_grad():
        reference.lm_head.weight[:, 0] = 0.0
        reference.lm_head.weight[2, 0] = 0.3
        reference.lm_head.weight[1] = -10.0 * torch.nn.functional.one_hot(torch.tensor(0), 32)
        reference.model.decoder.layer_norm.bias[0] += 4.0
    return reference


def convert(reference: Any, values: dict[str, Any], folder: Path) -> Any:
    """CTranslate2's model of transformers' weights, by the functions of its converter of fairseq checkpoints."""
    from ctranslate2.converters import fairseq
    from ctranslate2.specs import common_spec, transformer_spec

    spec = transformer_spec.TransformerSpec.from_config(
        (values["encoder_layers"], values["decoder_layers"]), values["encoder_attention_heads"], pre_norm=True,
        activation=common_spec.Activation.GELU, layernorm_embedding=values["layernorm_embedding"],
    )  # fmt: skip
    reference.requires_grad_(False)
    for stack in (reference.model.encoder, reference.model.decoder):
        stack.embed_scale = values["encoder_embed_dim"] ** 0.5
        stack.project_in_dim = stack.project_out_dim = None
        if not values["layernorm_embedding"]:
            stack.layernorm_embedding = None
    reference.model.decoder.output_projection = reference.lm_head
    fairseq.set_transformer_encoder(spec.encoder, reference.model.encoder)
    fairseq.set_transformer_decoder(spec.decoder, reference.model.decoder)
    for side, register in (("encoder", spec.register_source_vocabulary), ("decoder", spec.register_target_vocabulary)):
        register([*SPECIAL, *(f"t{i}" for i in range(4, values[f"{side}_vocab_size"]))])
    spec.config.decoder_start_token, spec.config.add_source_eos = spec.config.eos_token, True
    spec.validate()
    folder.mkdir()
    spec.save(str(folder))
    return ctranslate2.Translator(str(folder), device="cpu", compute_type="float32")


@pytest.mark.parametrize("values", [SMALL, DISTILLED], ids=["1b", "distilled"])
@pytest.mark.parametrize("num_beams", [1, 5])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_best_hypothesis_is_that_of_ctranslate2(
    values: dict[str, Any], num_beams: int, length_penalty: float, tmp_path: Path
) -> None:
    reference = with_endings(reference_model(values, seed=11))
    model = load_model(write_fairseq(tmp_path / "fairseq", values, fairseq_tensors(reference)))
    sources = random_sources(40, seed=7)
    options = BeamOptions(num_beams, NEW_TOKENS, length_penalty=length_penalty, early_stopping=True)
    search = BeamSearch(model, options, slots=len(sources), max_source=20)
    search.add(list(range(len(sources))), sources)
    found: dict[Any, Any] = {}
    while search.num_running:
        found |= {each.key: each for each in search.step()}
    words = [[f"t{token}" for token in source[:-1]] for source in sources]
    results = convert(reference, values, tmp_path / "ct2").translate_batch(
        words, beam_size=num_beams, num_hypotheses=min(2, num_beams), max_decoding_length=NEW_TOKENS,
        min_decoding_length=0, return_scores=True, length_penalty=length_penalty,
    )  # fmt: skip
    wrong = []
    for i, result in enumerate(results):
        ids = [SPECIAL.index(word) if word in SPECIAL else int(word[1:]) for word in result.hypotheses[0]]
        is_close = num_beams > 1 and abs(result.scores[0] - result.scores[1]) < NOISE
        same = ids == found[i].token_ids and result.scores[0] == pytest.approx(found[i].score, abs=NOISE)
        if not same and not is_close:
            wrong.append((i, ids, result.scores, found[i]))
    assert wrong == []
    assert len({len(each.token_ids) for each in found.values()}) > 2
