"""How bundled models are trained, packed and with all experts in one GEMM, against transformers' own forward."""

from __future__ import annotations

import pytest
import torch
from places import ROOT
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from meltcore.measure.problems import generate
from meltcore.models.checkpoints.checkpoint import BUNDLED_MODEL, open_checkpoint

SCRIPTS = ROOT / "scripts"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def a_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(open_checkpoint(BUNDLED_MODEL, files="text").folder / "tokenizer.json"))


@pytest.mark.slow
@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("architecture", ["qwen3_5", "gemma3"])
def test_packed_sequences_give_the_logits_of_each_alone(architecture: str) -> None:
    from bundled_data import pack
    from bundled_model import Trainee, model_config

    torch.manual_seed(0)
    tokenizer = a_tokenizer()
    config = model_config(architecture, tokenizer)
    trainee = Trainee(config, torch.device("cpu"))
    problems = [
        *generate("train", kind="short", num_problems=2, seed=1),
        *generate("train", kind="long", num_problems=1, seed=1),
    ]
    batch = pack(tokenizer, [problems[2], *problems[:2]])
    assert max(batch.lengths) > 200 > 64 > min(batch.lengths)
    with torch.no_grad():
        ours, further = trainee.answer_logits(batch)
    assert (further > 0) == (architecture == "qwen3_5")
    text = AutoConfig.for_model(**config.get("text_config", config))
    reference = AutoModelForCausalLM.from_config(text, dtype=torch.float32).eval()
    reference.load_state_dict(trainee.model.state_dict())
    with torch.no_grad():
        alone = [reference(ids[None]).logits[0] for ids in batch.ids.split(batch.lengths)]
    theirs = torch.cat(alone)[batch.sources]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("scripts")
def test_loss_covers_the_assistant_tokens_only() -> None:
    """After an empty pair of reasoning markers without reasoning, else including it."""
    from bundled_data import pack
    from bundled_tokenizer import END_THINK, THINK, ReplyPrefix

    tokenizer = a_tokenizer()
    tokenizer.add_tokens([THINK, END_THINK])
    (problem,) = generate("train", kind="short", num_problems=1, seed=2)
    ways: list[ReplyPrefix] = ["plain", "answering", "thinking"]
    batch = pack(tokenizer, [problem] * 3, ways)
    targets = [
        tokenizer.decode(batch.targets[batch.owners == way].tolist(), skip_special_tokens=False) for way in range(3)
    ]
    reasoned = f"{problem.answer}\n</think>\n\nThe answer is {problem.value}.<|im_end|>"
    assert targets == [f"{problem.answer}<|im_end|>"] * 2 + [reasoned]
    texts = [tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids in batch.ids.split(batch.lengths)]
    for text, beginning in zip(texts, ("", "<think>\n\n</think>\n\n", "<think>\n"), strict=True):
        assert f"<|im_start|>assistant\n{beginning}{problem.answer}" in text
