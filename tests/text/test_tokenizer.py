"""Tokenizers read from a checkpoint, and the synthetic one."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meltcore.common.errors import ConfigError
from meltcore.text.tokenizer import Tokenizer, byte_alphabet


def test_alphabet_names_every_byte_once() -> None:
    assert sorted(byte_alphabet().values()) == list(range(256))


@pytest.mark.slow
@given(st.text())
def test_synthetic_tokens_are_the_bytes(text: str) -> None:
    tokenizer = Tokenizer.synthetic_bytes(300)
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text


def test_every_synthetic_id_has_text() -> None:
    tokenizer = Tokenizer.synthetic_bytes(1000)
    assert tokenizer.is_synthetic
    assert tokenizer.vocab_size == 1000
    assert tokenizer.decode([104, 300, 999]) == "h t300 t999"


def test_vocabulary_smaller_than_the_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 256; got 100"):
        Tokenizer.synthetic_bytes(100)


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    tokenizer = Tokenizer.synthetic_bytes(300)
    assert tokenizer.token_bytes(5000) == b""
    assert tokenizer.decode([5000]) == ""


def test_missing_or_broken_file_is_a_config_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{]")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_truncating_tokenizer_json_does_not_cut_prompts(tmp_path: Path) -> None:
    raw = Tokenizer.synthetic_bytes(300)._backend
    raw.enable_truncation(5)
    raw.enable_padding(length=50)
    raw.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_folder(tmp_path).encode("x" * 20, add_special_tokens=True)) == 20
