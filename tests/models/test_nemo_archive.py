"""NeMo archives: configuration, weights and tokenizers as NeMo writes them; what is missing or wrong is named."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from nemo_tools import nemo_config, write_archive
from parakeet_tools import CONFIG

import meltcore
from meltcore.common.errors import ConfigError
from meltcore.engine.transcription.memory import planned_config
from meltcore.models.checkpoints.checkpoint import find_transcriber
from meltcore.models.checkpoints.nemo_archive import NemoArchive
from meltcore.models.configs.nemo_config import read_config

TENSORS = {"encoder.a": torch.arange(6.0).view(2, 3), "joint.b": torch.ones(4, dtype=torch.float16)}


def test_configuration_is_read_as_nemo_writes_it() -> None:
    assert read_config(nemo_config()) == CONFIG  # with languages in the order of the tokenizers
    older = read_config(nemo_config(nemo_version="1.23.0rc0")).features
    assert (older.center_padding, older.drops_last_frame) == ("reflect", False)
    same_channels = nemo_config(encoder={"subsampling_conv_channels": -1, "conv_kernel_size": None})
    encoder = read_config(same_channels).encoder
    assert (encoder.subsampling_channels, encoder.conv_kernel) == (CONFIG.encoder.hidden_size, 31)


def test_published_sizes() -> None:
    folder = find_transcriber("ai4bharat/indic-conformer-600m-multilingual", dummy=True)
    assert folder is not None
    config = read_config(NemoArchive(folder).config)
    assert len(config.languages) == 22
    assert (config.vocab_size, config.blank, config.encoder.feed_forward_size) == (5632, 256, 4096)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": {"n_heads": None}}, "lacks encoder.n_heads"),
        ({"encoder": {"n_heads": 5}}, "encoder.n_heads must divide d_model, 64; got 5"),
        ({"encoder": {"n_layers": "3"}}, 'encoder.n_layers must be a whole number from 1 to 16384; got "3"'),
        ({"encoder": {"subsampling": "vggnet"}}, 'sets encoder.subsampling to "vggnet"'),
        ({"encoder": {"subsampling_factor": 6}}, "encoder.subsampling_factor must be a power of 2; got 6"),
        ({"encoder": {"conv_kernel_size": 8}}, "encoder.conv_kernel_size must be odd; got 8"),
        ({"encoder": {"conv_norm_type": "layer_norm"}}, 'sets encoder.conv_norm_type to "layer_norm"'),
        ({"encoder": {"att_context_size": [70, 1]}}, r"sets encoder.att_context_size to \[70, 1\]"),
        ({"encoder": {"self_attention_model": "abs_pos"}}, "sets encoder.self_attention_model"),
        ({"preprocessor": {"normalize": "all_features"}}, "sets preprocessor.normalize"),
        ({"preprocessor": {"n_fft": 256}}, "preprocessor.n_fft must be at least the window of 400 samples; got 256"),
        ({"joint": {"multilingual": False}}, "sets joint.multilingual to false"),
        ({"joint": {"num_classes": 37}}, "joint.num_classes must be a multiple of the 3 languages; got 37"),
        (
            {"joint": {"language_keys": ["hi", "kn"]}},
            "joint.language_keys must be those of tokenizer.langs, hi, kn, ta",
        ),
        (
            {"joint": {"jointnet": {"joint_hidden": 8, "activation": "gelu"}}},
            'sets joint.jointnet.activation to "gelu"',
        ),
        ({"decoder": {"prednet": None}}, "lacks decoder.prednet.pred_hidden, decoder.prednet.pred_rnn_layers"),
        ({"encoder": 7}, "encoder must be an object; got 7"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(nemo_config(**changes))


@pytest.mark.parametrize("form", ["plain", "gz", "folder"])
def test_tensors_and_tokens_of_every_form(form: str, tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.nemo", TENSORS, compression="gz" if form == "gz" else "")
    if form == "folder":
        with tarfile.open(path) as tar:
            tar.extractall(tmp_path / "unpacked", filter="data")
        path = tmp_path / "unpacked"
    assert find_transcriber(str(path)) == path
    files_before = sorted(path.parent.iterdir())
    archive = NemoArchive(path)
    for name, values in archive.tensors().items():
        torch.testing.assert_close(values, TENSORS[name])
    texts = archive.token_texts(CONFIG)
    archive.close()
    assert {len(tokens) for tokens in texts.values()} == {CONFIG.tokens_per_language}
    assert any(token.startswith("\u2581") for token in texts["kn"])
    assert texts["kn"] != texts["hi"]
    assert sorted(path.parent.iterdir()) == files_before


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    whole = write_archive(tmp_path / "whole.nemo", TENSORS, tokenizers=False)
    (tmp_path / "text.nemo").write_text("not an archive")
    (tmp_path / "cut.nemo").write_bytes(whole.read_bytes()[:3000])
    for name, message in (("text", "text.nemo cannot be read as a NeMo archive"), ("cut", "cut.nemo")):
        with pytest.raises(ConfigError, match=message):
            NemoArchive(tmp_path / f"{name}.nemo").tensors()
    with pytest.raises(ConfigError, match="no such file"):
        find_transcriber(str(tmp_path / "missing.nemo"))
    with pytest.raises(ConfigError, match=r"2 NeMo archives, so name one of them|3 NeMo archives"):
        find_transcriber(str(tmp_path))
    pytest.importorskip("sentencepiece")
    with pytest.raises(ConfigError, match="has no 0a1b_hi_tokenizer"):
        NemoArchive(whole).token_texts(CONFIG)


# threat: a model file: no code in a NeMo checkpoint runs
def test_code_in_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    tensors: Any = {"a": Trap()}
    archive = NemoArchive(write_archive(tmp_path / "trap.nemo", tensors, tokenizers=False))
    with pytest.raises(ConfigError, match="cannot be read"):
        archive.tensors()
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("damage", [b"not a model", b"\x0a\x09\x0a\x02\xa5\xa5\x15\0\0\0\0"])
def test_tokens_that_are_no_text_are_named(damage: bytes, tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    bundled = Path(meltcore.__file__).parent / "bundled/tones"
    for name in ("model_config.yaml", "en_tokenizer.model", "hi_tokenizer.model"):
        (tmp_path / name).write_bytes((bundled / name).read_bytes())
    archive = NemoArchive(tmp_path)
    assert len(archive.token_texts(archive.model_config)) == 2
    path = tmp_path / "en_tokenizer.model"
    path.write_bytes(damage if b"model" in damage else damage + path.read_bytes())
    with pytest.raises(ConfigError, match=r"en_tokenizer.model is not a SentencePiece model"):
        archive.token_texts(archive.model_config)


@pytest.mark.parametrize("begin", [b"\xfd7zXZ\0\0\4", b"\x1f\x8b\x08\0\0\0\0\0\0\3\xff", b"BZh9\xff", b"]\0\0\0\xf0"])
def test_compressed_archive_that_is_damaged_is_named(begin: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.nemo").write_bytes(begin + bytes(2000))
    with pytest.raises(ConfigError, match="cannot be read"):
        NemoArchive(tmp_path / "a.nemo")


def test_plan_names_wrong_yaml(tmp_path: Path) -> None:
    (tmp_path / "model_config.yaml").write_text("a: [")
    (tmp_path / "model_weights.ckpt").touch()
    with pytest.raises(ConfigError, match="is not valid YAML"):
        planned_config(str(tmp_path), is_dummy=False)


def test_wrong_yaml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.nemo"
    for content, message in (
        *((b"a: [", "is not valid YAML"), (b"- 1", "must hold an object"), (b"a: 2026-99-99", "is not valid YAML")),
        *((b"a: \xff", "is not valid YAML"), (b"a: " + b"9" * 5000, "is not valid YAML"), (b"#" * 2**18, "the limit")),
    ):
        with tarfile.open(path, "w") as tar:
            member = tarfile.TarInfo("model_config.yaml")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        with pytest.raises(ConfigError, match=message):
            NemoArchive(path)
