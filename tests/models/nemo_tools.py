"""A small transcriber as a NeMo archive: random weights, and a SentencePiece model per language."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from parakeet_tools import CONFIG

LETTERS = {"hi": "कखगघचछ", "kn": "ಕಖಗಘಚಛ", "ta": "கஙசஞடண"}


def nemo_config(**changes: Any) -> dict[str, Any]:
    """model_config.yaml of parakeet_tools.CONFIG. changes: sections whose fields are replaced."""
    encoder, features = CONFIG.encoder, CONFIG.features
    config: dict[str, Any] = {
        "target": "nemo.collections.asr.models.hybrid_rnnt_ctc_bpe_models.EncDecHybridRNNTCTCBPEModel",
        "nemo_version": "2.3.0",
        "preprocessor": {
            "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
            "sample_rate": 16000,
            "normalize": "per_feature",
            "window_size": 0.025,
            "window_stride": 0.01,
            "window": "hann",
            "features": features.num_mels,
            "n_fft": 512,
            "dither": 1e-05,
            "pad_to": 0,
        },
        "encoder": {
            "feat_in": 80,
            "feat_out": -1,
            "n_layers": encoder.num_layers,
            "d_model": encoder.hidden_size,
            "subsampling": "dw_striding",
            "subsampling_factor": 8,
            "subsampling_conv_channels": encoder.subsampling_channels,
            "ff_expansion_factor": 2,
            "self_attention_model": "rel_pos",
            "n_heads": encoder.num_heads,
            "att_context_size": [-1, -1],
            "conv_kernel_size": 9,
            "conv_norm_type": "batch_norm",
        },
        "decoder": {"blank_as_pad": True, "prednet": {"pred_hidden": 24, "pred_rnn_layers": 2}},
        "joint": {
            "multilingual": True,
            # In another order than the tokenizers, which have the order of the CTC head.
            "language_keys": ["ta", "hi", "kn"],
            "num_classes": CONFIG.vocab_size,
            "jointnet": {"joint_hidden": 24, "activation": "relu", "dropout": 0.2},
        },
        "tokenizer": {
            "type": "multilingual",
            "langs": {
                language: {"type": "bpe", "dir": "/elsewhere", "model_path": f"nemo:0a1b_{language}_tokenizer.model"}
                for language in CONFIG.languages
            },
        },
        "decoding": {"strategy": "greedy_batch", "greedy": {"max_symbols": 10}},
    }
    for section, fields in changes.items():
        config[section] = {**config[section], **fields} if isinstance(fields, dict) else fields
    return config


def sentencepiece_model(language: str) -> bytes:
    """A model of as many tokens as CONFIG has per language, among them word starts."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="the extra audio has sentencepiece")
    rng = random.Random(language)
    lines = [
        " ".join("".join(rng.choices(LETTERS[language], k=rng.randint(1, 4))) for _ in range(5)) for _ in range(200)
    ]
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        vocab_size=CONFIG.tokens_per_language,
        model_type="bpe",
        bos_id=-1,
        eos_id=-1,
        minloglevel=2,
    )
    return written.getvalue()


def write_archive(
    path: Path,
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any] | None = None,
    *,
    compression: str = "",
    tokenizers: bool = True,
) -> Path:
    """Write the archive. compression: "" or "gz"."""
    weights = io.BytesIO()
    torch.save(tensors, weights)
    files = {"model_config.yaml": yaml.safe_dump(config or nemo_config(), sort_keys=False).encode()}
    files["model_weights.ckpt"] = weights.getvalue()
    if tokenizers:
        files |= {f"0a1b_{language}_tokenizer.model": sentencepiece_model(language) for language in CONFIG.languages}
    with tarfile.open(path, f"w:{compression}") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path
