"""Translator: texts in, translations out, in order; bad input and checkpoints that cannot work are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("sentencepiece", reason="the extra `translate` is not installed: make .venv/.installed")

from m2m100_tools import SMALL, reference_model, write_checkpoint
from translation_texts import write_tokenizer

from meltcore import Translator
from meltcore.common.errors import ConfigError, RequestError
from meltcore.models.checkpoints.checkpoint import PUBLISHED_TASK_FOLDERS
from meltcore.models.configs.json_file import read_json
from meltcore.models.tasks.indictrans2 import IndicTrans2
from meltcore.text.translation.indic_processor import preprocess
from meltcore.text.translation.languages import find_language
from meltcore.text.translation.tokenizer import SentencePieceTokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
CORPUS = ["the cat sat on the mat", "a dog ran home", "वह घर गया", "क ख ग घ", "नमस्ते दुनिया", "< ID1 > . , ? ! ।"] * 10
FAST = {"num_beams": 3, "max_new_tokens": 10}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Random checkpoints by direction, with tokenizers trained here."""
    paths = {}
    for seed, direction in enumerate(("en-indic", "indic-en")):
        folder = tmp_path_factory.mktemp("checkpoints") / f"tiny-{direction}"
        folder.mkdir()
        num_ids = len(write_tokenizer(folder, CORPUS))
        values = {**SMALL, "encoder_vocab_size": num_ids, "decoder_vocab_size": num_ids}
        write_checkpoint(folder, values, reference_model(values, seed))
        paths[direction] = str(folder)
    return paths


@pytest.fixture(scope="module")
def translator(folders: dict[str, str]) -> Translator:
    return Translator([folders["en-indic"], folders["indic-en"]], device="cpu")


def test_translation_is_what_transformers_generates(folders: dict[str, str], translator: Translator) -> None:
    values = read_json(Path(folders["en-indic"]) / "config.json")
    reference = reference_model(values, seed=0)
    tokenizer = SentencePieceTokenizer(
        Path(folders["en-indic"]), values["encoder_vocab_size"], values["decoder_vocab_size"]
    )
    english, hindi = find_language("en", "x"), find_language("hi", "x")
    texts = ["the cat sat on the mat.", "a dog", "home", "zebra"]
    for text in texts:
        ids = tokenizer.encode(preprocess(text, english).text, english, hindi)
        output = reference.generate(
            torch.tensor([ids]), num_beams=3, max_new_tokens=10, decoder_start_token_id=2, do_sample=False
        )[0, 1:].tolist()
        ended = output[: output.index(2)] if 2 in output else output
        decoded = tokenizer.decode(ended)
        result = translator.translate(text, "en", "hi", **FAST)
        assert isinstance(result, str)
        assert result.replace(" ", "") == decoded.replace(" ", ""), "detokenization moves spaces only"
        assert result


def test_texts_keep_their_order_lines_and_number(translator: Translator) -> None:
    texts = ["the cat sat. A dog ran!", "", " \n ", "home\n\nthe mat", "the cat sat on the mat"]
    results = translator.translate(texts, "English", "kan_Knda", **FAST)
    assert len(results) == len(texts)
    assert results[1:3] == ["", " \n "]
    first, second = results[3].split("\n\n")
    assert [first, second] == translator.translate(["home", "the mat"], "English", "kan_Knda", **FAST)
    assert results[0] == " ".join(translator.translate(["the cat sat.", "A dog ran!"], "English", "kan_Knda", **FAST))
    assert translator.translate([], "en", "hi") == []


def test_text_has_the_same_translation_alone_and_in_company(translator: Translator) -> None:
    words = ["the", "cat", "sat", "on", "a", "mat", "dog", "ran", "home"]
    texts = [" ".join(words[i % 9 : i % 9 + 1 + i % 5]) for i in range(40)]  # more than there are slots
    together = translator.translate(texts, "en", "ta", **FAST)
    for i in range(0, 40, 7):
        assert translator.translate(texts[i], "en", "ta", **FAST) == together[i]


def test_placeholder_is_restored_in_the_right_text(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SentencePieceTokenizer, "decode", lambda self, ids: "x < ID1 > y")
    texts = ["a dog 12/05/2023", "the cat 1,000,000", "home a@b.org"]
    results = translator.translate(texts, "en", "hi", **FAST)
    assert results == ["x 12/05/2023 y", "x 1,000,000 y", "x a@b.org y"]


def test_pivot_goes_through_english_only_if_asked(folders: dict[str, str], translator: Translator) -> None:
    with pytest.raises(RequestError, match=r"hin_Deva to tam_Taml.*pivot=True") as error:
        translator.translate("वह घर गया", "hi", "ta")
    assert error.value.param == "pivot"
    english = translator.translate("वह घर गया।", "hi", "en", **FAST)
    try:
        expected = translator.translate(english, "en", "ta", **FAST)
    except RequestError:  # a random model writes English in any letters
        with pytest.raises(RequestError, match="eng_Latn, which is written in Latin"):
            translator.translate("वह घर गया।", "hi", "ta", pivot=True, **FAST)
    else:
        assert translator.translate("वह घर गया।", "hi", "ta", pivot=True, **FAST) == expected
    alone = Translator(folders["en-indic"], device="cpu")
    with pytest.raises(RequestError, match=r"no loaded checkpoint translates hin_Deva to eng_Latn .loaded: .*en-indic"):
        alone.translate("क", "hi", "en", pivot=True)


@pytest.mark.parametrize(
    ("text", "languages", "reason"),
    [
        ("x", ("en", "English"), "src_lang and tgt_lang are both eng_Latn"),
        ("x", ("en", "klingon"), "tgt_lang 'klingon' is not a language"),
        ("x", ("en", "sd"), "name snd_Arab or snd_Deva"),
        ("नमस्ते", ("en", "hi"), "src_lang is eng_Latn, which is written in Latin"),
        ("a" * 100_000, ("en", "hi"), "100,000 characters, of at most 4,096"),
        ("the cat " * 40, ("en", "hi"), "a sentence has .* tokens, of at most 64; split it: 'the cat"),
        (["x", 7], ("en", "hi"), "a text must be a string; got int"),
    ],
)
def test_bad_input_is_named(translator: Translator, text: str, languages: tuple[str, str], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        translator.translate(text, *languages)
    assert translator.translate("home", "en", "hi", **FAST), "the translator still works"


def test_option_outside_its_range_is_an_error(translator: Translator) -> None:
    with pytest.raises(ConfigError, match="num_beams must be from 1 to 8; got 20"):
        translator.translate("home", "en", "hi", num_beams=20)
    with pytest.raises(ConfigError, match="max_target_positions, 48"):
        translator.translate("home", "en", "hi", max_new_tokens=100)


def test_too_little_memory_is_named(folders: dict[str, str]) -> None:
    small = Translator(folders["en-indic"], device="cpu", memory_bytes=300_000)
    with pytest.raises(ConfigError, match=r"a sentence of \d+ tokens takes .* for 5 beams of 48 tokens"):
        small.translate("home", "en", "hi", max_new_tokens=48)


def test_checkpoints_that_cannot_work_together_are_refused(folders: dict[str, str]) -> None:
    for models in ([], [folders["en-indic"]] * 2, [folders["en-indic"], "meltcore/sums"]):
        with pytest.raises(ConfigError, match="one checkpoint, or several with different directions"):
            Translator(models)


def test_other_architectures_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"config.json names Qwen3ForCausalLM; translation runs IndicTrans"):
        Translator("meltcore/sums")


def test_random_weights_need_neither_weights_nor_tokenizer(tmp_path: Path) -> None:
    values = {**SMALL, "encoder_vocab_size": 300, "decoder_vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(values))
    results = [
        Translator(str(tmp_path), device="cpu", load_format="dummy", seed=seed).translate("ab", "en", "hi", **FAST)
        for seed in (3, 3)
    ]
    assert results[0] == results[1]
    assert set(results[0].replace("t", "")) <= set("0123456789 ")


@pytest.mark.parametrize(
    ("name", "parameters"),
    # By arithmetic on the published training scripts; the names say 1B and 200M.
    [
        ("en-indic-1B", 1.116e9),
        ("indic-en-1B", 1.023e9),
        ("indic-indic-1B", 1.208e9),
        ("en-indic-dist-200M", 2.118e8),
        ("indic-en-dist-200M", 2.118e8),
    ],
)
def test_published_shape_has_its_number_of_parameters(name: str, parameters: float) -> None:
    folder = PUBLISHED_TASK_FOLDERS[f"ai4bharat/indictrans2-{name}"]
    with torch.device("meta"):
        model = IndicTrans2(read_json(folder / "config.json"))
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(parameters, rel=1e-3)
