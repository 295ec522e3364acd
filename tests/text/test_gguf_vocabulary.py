"""Tokenizers that `meltcore quantize` writes to GGUF files give the tokens of their source."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from gguf import GGUFValueType, GGUFWriter
from gguf_tools import finish
from test_gguf_tokenizer import QWEN, TEXTS, check_equal, sentencepiece_vocabulary
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import generate_merges

from meltcore.common.errors import ConfigError
from meltcore.models.checkpoints.checkpoint import BUNDLED_HYBRID, BUNDLED_MODEL, Checkpoint, open_checkpoint
from meltcore.models.checkpoints.gguf.gguf_file import GGUFModel
from meltcore.text.chat_template import ChatTemplate
from meltcore.text.gguf_vocabulary import check_tokenizer, tokenizer_metadata
from meltcore.text.tokenizer import Tokenizer

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_PATTERN = (  # of Mistral Nemo's tokenizer.json
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Change = Callable[[dict[str, Any]], object]


def copy_of(source: Path, folder: Path, change: Change = lambda content: None) -> Path:
    """Copy a tokenizer with a changed tokenizer.json."""
    folder.mkdir()
    content = json.loads((source / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    return folder


def checkpoint_of(folder: Path, eos: tuple[int, ...] = ()) -> Checkpoint:
    return Checkpoint(str(folder), folder, {"eos_token_id": list(eos)} if eos else {}, {})


def write(checkpoint: Checkpoint, path: Path, rows: int, **changes: Any) -> GGUFModel:
    """Write a file that is nothing but a vocabulary. changes: of the metadata."""
    writer = GGUFWriter(path, "qwen3")
    small = {"context_length": 64, "embedding_length": 2, "block_count": 1, "feed_forward_length": 2}
    small |= {"attention.head_count": 1}
    metadata: dict[str, Any] = {f"qwen3.{key}": value for key, value in small.items()}
    metadata["qwen3.attention.layer_norm_rms_epsilon"] = 1e-6
    metadata |= tokenizer_metadata(checkpoint, rows) | {f"tokenizer.ggml.{key}": new for key, new in changes.items()}
    for key, value in metadata.items():
        writer.add_key_value(key, value, GGUFValueType.get_type(value))
    writer.add_tensor("token_embd.weight", np.zeros((rows, 2), dtype=np.float32))
    writer.add_tensor("blk.0.attn_norm.weight", np.zeros(2, dtype=np.float32))
    return GGUFModel(finish(writer, path))


def tokenizer_of(written: GGUFModel) -> Tokenizer:
    return Tokenizer.from_checkpoint(Checkpoint("m", written.path.parent, {}, {}, written))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "rows"), [(BUNDLED_MODEL, 824), (BUNDLED_HYBRID, 826), (BUNDLED_MODEL, 900), ("qwen3", 151_936)]
)
def test_byte_level_vocabulary_is_that_of_its_source(tmp_path: Path, model: str, rows: int) -> None:
    """Also with rows of the embedding that are no tokens."""
    if model == "qwen3" and not QWEN.exists():
        pytest.skip("needs Qwen3's tokenizer beside the repository")
    checkpoint = checkpoint_of(QWEN) if model == "qwen3" else open_checkpoint(model, files="text")
    written = write(checkpoint, tmp_path / "m.gguf", rows)
    check_tokenizer(checkpoint, written)
    ours, source = tokenizer_of(written), Tokenizer.from_folder(checkpoint.folder)
    check_equal(ours, source)
    assert ours.special_ids == source.special_ids
    template, expected = (
        ChatTemplate.from_checkpoint(Checkpoint("m", tmp_path, {}, {}, written)),
        ChatTemplate.from_folder(checkpoint.folder),
    )
    message = [{"role": "user", "content": "hi"}]
    assert template is not None
    assert expected is not None
    assert template.render(message) == expected.render(message)


def published(pattern: str) -> Change:
    """Return the change of a tokenizer.json to one of the published pattern, whose BOS token every text gets."""
    bos = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])

    def change(content: dict[str, Any]) -> None:
        content["normalizer"] = None
        content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
        content["model"]["ignore_merges"] = True
        content["post_processor"] = json.loads(bos.__getstate__())

    return change


@pytest.mark.parametrize(("name", "pattern"), [("llama-bpe", LLAMA3_PATTERN), ("tekken", TEKKEN_PATTERN)])
def test_published_settings_and_bos_are_kept(tmp_path: Path, name: str, pattern: str) -> None:
    source = copy_of(open_checkpoint(BUNDLED_MODEL, files="text").folder, tmp_path / "source", published(pattern))
    written = write(checkpoint_of(source), tmp_path / "m.gguf", 824)
    assert written.metadata["tokenizer.ggml.pre"] == name
    check_tokenizer(checkpoint_of(source), written)
    check_equal(tokenizer_of(written), Tokenizer.from_folder(source))
    assert tokenizer_of(written).encode("a", add_special_tokens=True)[0] == 0


def save_sentencepiece(folder: Path, *, prefix: bool, num_words: int = 300) -> Path:
    """Write the tokenizer.json that transformers makes of a SentencePiece vocabulary, of Llama 2's or Gemma's kind.

    Two spaces are a token: with Gemma's also an added one.
    """
    tokens, _, scores = sentencepiece_vocabulary(num_words)
    vocab = {token.replace(" ", "▁"): index for index, token in enumerate(tokens)}
    score_of = dict(zip(tokens[261:], scores[261:], strict=True)) | {"▁▁": 1.0}
    merges = generate_merges({word: vocab[word] for word in score_of}, score_of)
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:  # Llama 2
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:  # Gemma
        backend.normalizer = replace
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(
        [tokenizers.AddedToken(token, normalized=False, special=True) for token in ("<unk>", "<s>", "</s>")]
    )
    added = ("\n\n",) if prefix else ("\n\n", "▁▁")
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in added])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}')
    return folder


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabulary_is_that_of_its_source(tmp_path: Path, prefix: bool) -> None:
    source = save_sentencepiece(tmp_path / "source", prefix=prefix)
    written = write(checkpoint_of(source), tmp_path / "m.gguf", 600)
    check_tokenizer(checkpoint_of(source), written)
    ours, theirs = tokenizer_of(written), Tokenizer.from_folder(source)
    generator = random.Random(3)
    texts = ["".join(generator.choices("abcdefghijkl é日ß🏳\n", k=generator.randint(1, 60))) for _ in range(300)]
    for text in [*texts, *TEXTS, "a</s>b<s> c\n\nd", "<unk>"]:
        ids = theirs.encode(text, add_special_tokens=True)
        assert ours.encode(text, add_special_tokens=True) == ids
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.encode("", add_special_tokens=True) == [1]
    assert ours.encode("a  b", add_special_tokens=False)[-2] == 259
    assert written.texts("tokenizer.ggml.tokens")[259] == ("▁▁" if prefix else "  ")
    assert (ours.special_ids, ours.token_id("</s>")) == (theirs.special_ids, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"add_bos_token": False},
        {"add_space_prefix": False},
        {"scores": [-float(index % 97) for index in range(600)]},
        {"token_type": [1] * 600},
    ],
)
def test_another_tokenization_is_noticed(tmp_path: Path, changes: dict[str, Any]) -> None:
    checkpoint = checkpoint_of(save_sentencepiece(tmp_path / "source", prefix=True))
    with pytest.raises(ConfigError, match="as GGUF"):
        check_tokenizer(checkpoint, write(checkpoint, tmp_path / "m.gguf", 600, **changes))


def test_another_pattern_is_noticed(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(BUNDLED_MODEL, files="text")
    with pytest.raises(ConfigError, match=r"the text .* has the tokens .* as GGUF it would have"):
        check_tokenizer(checkpoint, write(checkpoint, tmp_path / "m.gguf", 824, pre="llama-bpe"))


def test_all_end_tokens_are_kept(tmp_path: Path) -> None:
    folder = open_checkpoint(BUNDLED_MODEL, files="text").folder
    for eos, is_kept in (((0, 2), True), ((2, 0, 300, 301), True), ((2, 300, 301, 302), False)):
        checkpoint = checkpoint_of(folder, eos)
        written = write(checkpoint, tmp_path / f"{len(eos)}{eos[1]}.gguf", 824)
        assert written.metadata["tokenizer.ggml.eos_token_id"] == 2  # of tokenizer_config.json
        if is_kept:
            check_tokenizer(checkpoint, written)
        else:
            with pytest.raises(
                ConfigError, match=r"has the end tokens \(2, 300, 301, 302\); a GGUF file loses \[302\]"
            ):
                check_tokenizer(checkpoint, written)


def set_model(key: str, value: Any) -> Change:
    return lambda content: content["model"].update({key: value})


def set_added(key: str, value: Any) -> Change:
    return lambda content: content["added_tokens"][0].update({key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda content: content.update(normalizer=None),
            "pre_tokenizer is .* a GGUF file can have the patterns .*qwen2",
        ),
        (
            lambda content: content.update(pre_tokenizer=None),
            "pre_tokenizer is null; a GGUF file can have the patterns",
        ),
        (set_model("ignore_merges", True), "pre_tokenizer is .* a GGUF file can have"),
        (set_added("lstrip", True), r"token '<\|endoftext\|>' has lstrip, which a GGUF file cannot express"),
    ],
)
def test_what_gguf_has_no_name_for_is_refused(tmp_path: Path, change: Change, message: str) -> None:
    source = copy_of(open_checkpoint(BUNDLED_MODEL, files="text").folder, tmp_path / "source", change)
    with pytest.raises(ConfigError, match=message):
        tokenizer_metadata(checkpoint_of(source), 824)


def test_too_few_rows_and_merges_without_scores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: token '.*' has the id .*; the model has 500"):
        tokenizer_metadata(open_checkpoint(BUNDLED_MODEL, files="text"), 500)

    def drop(content: dict[str, Any]) -> None:
        content["model"]["merges"] = content["model"]["merges"][::2]

    source = copy_of(save_sentencepiece(tmp_path / "plain", prefix=True), tmp_path / "source", drop)
    with pytest.raises(ConfigError, match=r"the merges follow from no order of tokens, as GGUF needs it"):
        tokenizer_metadata(checkpoint_of(source), 600)


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_spaces_that_gguf_has_no_name_for_are_refused(tmp_path: Path, scheme: str) -> None:
    """GGUF adds a space before each text. `first` adds none after special tokens, `always` none before a space."""
    splitter = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    change: Change = lambda content: content.update(pre_tokenizer=splitter, normalizer=None)  # noqa: E731
    plain = save_sentencepiece(tmp_path / "plain", prefix=True)
    source = copy_of(plain, tmp_path / "source", change)
    texts = "<s> a", " a"
    before, after = (
        [Tokenizer.from_folder(folder).encode(text, add_special_tokens=False) for text in texts]
        for folder in (plain, source)
    )
    assert before != after
    with pytest.raises(ConfigError, match=rf'treatment of spaces is .*"{scheme}".*a space before each text, or none'):
        tokenizer_metadata(checkpoint_of(source), 600)
