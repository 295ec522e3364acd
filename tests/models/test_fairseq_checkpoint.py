"""IndicTrans2 in fairseq's layout: the same weights and translations as from the Hugging Face layout."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq_tools import fairseq_tensors, write_fairseq
from m2m100_tools import DISTILLED, SMALL, load_model, random_sources, reference_model, write_checkpoint

from meltcore.common.errors import ConfigError
from meltcore.engine.translation.beam_search import BeamOptions
from meltcore.engine.translation.engine import TranslationTask
from meltcore.engine.translation.translation import translate_all
from meltcore.models.checkpoints.checkpoint import find_task
from meltcore.models.checkpoints.fairseq_config import read_dictionary
from meltcore.models.checkpoints.torch_archive import TorchArchive
from meltcore.offline.translator import Translator
from meltcore.settings.config import EngineConfig
from meltcore.text.translation.tokenizer import SentencePieceTokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
CORPUS = ["the cat sat on the mat", "a dog ran home", "वह घर गया", "क ख ग घ", "नमस्ते दुनिया", "< ID1 > . , ? ! ।"] * 10
OPTIONS = BeamOptions(num_beams=3, max_new_tokens=10)


@pytest.mark.parametrize(("values", "newer"), [(SMALL, False), (DISTILLED, True)], ids=["1b", "distilled"])
def test_layout_changes_no_result(values: dict[str, Any], newer: bool, tmp_path: Path) -> None:
    reference = reference_model(values, seed=3)
    (tmp_path / "hf").mkdir()
    write_checkpoint(tmp_path / "hf", values, reference)
    fairseq = write_fairseq(tmp_path / "fairseq", values, fairseq_tensors(reference), newer=newer)
    expected, found = load_model(tmp_path / "hf"), load_model(fairseq)
    assert found.config == expected.config
    assert found.state_dict().keys() == expected.state_dict().keys()
    for name, weight in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight), name
    sources = random_sources(5, seed=1)
    translations = [translate_all(model, sources, OPTIONS, slots=5) for model in (expected, found)]
    assert translations[0] == translations[1]
    assert len({tuple(tokens) for tokens in translations[1]}) > 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random checkpoint with a tokenizer, in the Hugging Face layout and in fairseq's."""
    pytest.importorskip("sentencepiece", reason="the extra translate has it")
    from translation_texts import write_tokenizer

    root = tmp_path_factory.mktemp("fairseq")
    hf = root / "hf-en-indic"
    hf.mkdir()
    num_ids = len(write_tokenizer(hf, CORPUS))
    values = {**SMALL, "encoder_vocab_size": num_ids, "decoder_vocab_size": num_ids}
    reference = reference_model(values, seed=0)
    write_checkpoint(hf, values, reference)
    return hf, write_fairseq(root / "en-indic", values, fairseq_tensors(reference), tokenizer=hf)


def test_texts_have_the_same_translations(folders: tuple[Path, Path]) -> None:
    texts = ["the cat sat on the mat.", "a dog\n\nhome", "zebra"]
    results = [
        Translator(str(folder), device="cpu").translate(texts, "en", "hi", num_beams=3, max_new_tokens=10)
        for folder in folders
    ]
    assert results[0] == results[1]
    assert any(results[0])


def test_server_takes_it_for_a_translation_model(folders: tuple[Path, Path]) -> None:
    assert find_task(str(folders[1])).name == "translation"
    task = TranslationTask(EngineConfig(model=str(folders[1]), device="cpu", memory_bytes=2**21))
    assert (task.ready().tokens, task.ready().vocab_size) == ("real", task.model.config.encoder.vocab_size)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder_learned_pos": True}, "sets args.encoder_learned_pos to True, which IndicTrans2 does not compute"),
        ({"decoder_normalize_before": False}, "sets args.decoder_normalize_before to False"),
        ({"adaptive_softmax_cutoff": "100,200"}, "sets args.adaptive_softmax_cutoff to '100,200'"),
        ({"encoder_layers": "two"}, "args.encoder_layers must be a whole number from 1 to 16384; got 'two'"),
        (
            {"decoder_ffn_embed_dim": None, "activation_fn": None},
            "lacks args.decoder_ffn_embed_dim, args.activation_fn",
        ),
        ({"encoder_layers": 3}, r"checkpoint_best.pt: 16 missing tensors: model.encoder.layers.2"),
        ({"decoder_ffn_embed_dim": 41}, r"decoder.layers.0.fc1.weight has shape \[40, 32\]; .* asks for \[41, 32\]"),
    ],
)
def test_what_is_not_computed_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_fairseq(tmp_path, SMALL, fairseq_tensors(reference_model(SMALL, seed=3)), changes=changes)
    with pytest.raises(ConfigError, match=message):
        load_model(folder)


def test_missing_parts_are_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "final_bin").mkdir()
    with pytest.raises(ConfigError, match=r"has fairseq's final_bin, and lacks model/checkpoint_best.pt"):
        Translator(str(tmp_path))
    with pytest.raises(ConfigError, match=r"lacks vocab/model.SRC, vocab/model.TGT, final_bin/dict.SRC.txt"):
        SentencePieceTokenizer(tmp_path, 9, 9)
    for state, message in (
        ([1], "it has neither args nor cfg.model"),
        ({"args": None, "cfg": 3}, "it has neither args nor cfg.model"),
        ({"args": {"encoder_layers": 1}, "model": [1]}, "lacks args.encoder_embed_dim"),
    ):
        path = tmp_path / "model" / "checkpoint_best.pt"
        path.parent.mkdir(exist_ok=True)
        torch.save(state, path)
        with pytest.raises(ConfigError, match=f"checkpoint_best.pt .*{message}"):
            Translator(str(tmp_path))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("a 3\nb\n", "line 2 must be a token and its count; it is 'b'"),
        ("a 3\n\nb 1\n", "line 2 must be"),
        ("a 3\na 2\n", "line 2 has the token 'a' a second time"),
        ("a x\n", "line 1 must be"),
    ],
)
def test_wrong_dictionary_is_named(lines: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "dict.SRC.txt"
    path.write_text(lines)
    with pytest.raises(ConfigError, match=message):
        read_dictionary(path)


def test_dictionary_numbers_tokens_after_the_special_ones(tmp_path: Path) -> None:
    path = tmp_path / "dict.SRC.txt"
    path.write_text("eng_Latn 99\n▁the 5\n<unk> 1 #fairseq:overwrite\n")
    assert read_dictionary(path) == {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 6, "eng_Latn": 4, "▁the": 5}


class Trap:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


# threat: a model file: no code in an archive of torch.save runs
def test_code_in_an_archive_does_not_run(tmp_path: Path) -> None:
    torch.save({"trap": Trap(str(tmp_path / "sprung")), "model": {"a": torch.ones(2)}}, tmp_path / "a.pt")
    root = TorchArchive(tmp_path / "a.pt").root
    assert root["model"]["a"].shape == (2,)
    assert root["trap"].values == (str(tmp_path / "sprung"),)
    assert not (tmp_path / "sprung").exists()


def rewritten(source: Path, target: Path, change: Any) -> Path:
    """Copy an archive. change: from name and content to the new content and compression."""
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w") as written:
        for name in archive.namelist():
            content, compression = change(name, archive.read(name))
            written.writestr(zipfile.ZipInfo(name), content, compression)
    return target


def test_hostile_archives_are_refused_by_name(tmp_path: Path) -> None:
    whole = tmp_path / "whole.pt"
    torch.save({"a": torch.ones(64), "b": torch.zeros(64)}, whole)
    stored, deflated = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED

    def refused(path: Path, message: str) -> None:
        with pytest.raises(ConfigError, match=message) as error:
            TorchArchive(path)
        assert path.name in str(error.value)

    def changed(name: str, make: Any) -> Path:
        return rewritten(whole, tmp_path / f"{name}.pt", make)

    def pickle_with(old: bytes, new: bytes) -> Path:
        def change(name: str, content: bytes) -> tuple[bytes, int]:
            assert not name.endswith("data.pkl") or old in content
            return (content.replace(old, new) if name.endswith("data.pkl") else content), stored

        return changed("pickle", change)

    refused(changed("deflated", lambda name, content: (content, deflated)), r"data/0 is compressed")
    bomb = changed("bomb", lambda name, content: (bytes(9 * 2**20), deflated) if "pkl" in name else (content, stored))
    assert bomb.stat().st_size < 100_000
    refused(bomb, "data.pkl has more than 8388608 bytes")
    refused(changed("short", lambda name, content: (content[:100], stored) if "data/1" in name else (content, stored)),
            "data/1 has 100 bytes, which cannot be 64 elements")  # fmt: skip
    refused(changed("big", lambda name, content: (b"big", stored) if "byteorder" in name else (content, stored)),
            "its byte order is not little-endian")  # fmt: skip
    shape = b"K@\x85"  # (64,)
    refused(pickle_with(shape, b"KA\x85"), r"a tensor of shape \[65\] from element 0 on in 64 elements")
    refused(pickle_with(shape, b"J\xff\xff\xff\xff\x85"), "a tensor of shape")
    refused(pickle_with(b"X\x01\x00\x00\x00a", b"r\xff\xff\xff\x7fX\x01\x00\x00\x00a"), "the memo index 2147483647")
    refused(pickle_with(b"X\x01\x00\x00\x00a", b"X\xff\xff\xff\x7fa"), "cannot be read")
    refused(pickle_with(b"X\x01\x00\x00\x00a", b"\x82\x01X\x01\x00\x00\x00a"), "the opcode EXT1")
    (tmp_path / "cut.pt").write_bytes(whole.read_bytes()[:-40])
    refused(tmp_path / "cut.pt", "cannot be read as an archive of torch.save")
    content = bytearray(whole.read_bytes())
    with zipfile.ZipFile(whole) as archive:
        first, second = (archive.getinfo(f"whole/data/{i}").header_offset for i in (0, 1))
    entry = content.rindex(b"whole/data/1") - 46  # in the directory at the end
    assert content[entry + 42 : entry + 46] == second.to_bytes(4, "little")
    content[entry + 42 : entry + 46] = first.to_bytes(4, "little")
    (tmp_path / "overlap.pt").write_bytes(content)
    refused(tmp_path / "overlap.pt", r"whole/data/1 overlaps whole/data/0")
