r"""Defines the pre-tokenizers that `tokenizer.ggml.pre` of a GGUF file names.

The names are llama.cpp's. The steps and normalizers are the published tokenizer's: each step splits the pieces of the
step before it. The tokens equal llama.cpp's, except where llama.cpp leaves out a normalizer (NFC) or writes \p{Lu} and
\p{M} as ranges of ASCII letters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import tokenizers
from tokenizers import normalizers, pre_tokenizers


class PreTokenizer(NamedTuple):
    """Describes how a text is split into words before byte-level BPE merges characters within each word.

    Args:
        steps: The steps in the order of their application. The last step writes bytes as characters.
        normalizer: Changes the text before the steps, or None.
        ignore_merges: Keeps a word that is a token whole, without applying merges.
        add_bos: Begins a text with BOS if tokenizer.ggml.add_bos_token is absent.
    """

    steps: tuple[pre_tokenizers.PreTokenizer, ...]
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False
    add_bos: bool = False

    def splitter(self) -> pre_tokenizers.PreTokenizer:
        """Return all steps as one pre-tokenizer."""
        return self.steps[0] if len(self.steps) == 1 else pre_tokenizers.Sequence(list(self.steps))


_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # splits by GPT-2's pattern
_DIGITS = pre_tokenizers.Digits(individual_digits=True)


def _split(*patterns: str) -> Iterable[pre_tokenizers.PreTokenizer]:
    """Return one step per pattern, which makes each match a word."""
    return [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]


_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD_PREFIX = r"[^\r\n\p{L}\p{N}]?"


def _word_pattern(digits: str) -> str:
    """Return the pattern of words of Qwen2 and Llama 3, which differ in how many digits make a token."""
    return rf"{_SUFFIXES}|{_WORD_PREFIX}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


# Words of Mistral's Tekken and of GPT-4o, which end before a capital letter: "helloWorld" is two.
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased_word_pattern(suffix: str, digits: str) -> str:
    """Return the pattern of words with at most one change from capital to small letters."""
    return (
        f"{_WORD_PREFIX}{_CAPITALS}*{_SMALL}+{suffix}|{_WORD_PREFIX}{_CAPITALS}+{_SMALL}*{suffix}|"
        rf"{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


# DeepSeek LLM lists the letters of scripts that have capitals and some more, and the signs of two widths.
_DEEPSEEK_LETTERS = (
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}"
    r"\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}"
    r"\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}"
    r"\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}"
    r"\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}"
    r"\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}"
    r"\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}"
    r"\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}"
    r"\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}"
    r"\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}"
    r"\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}"
)
_DEEPSEEK_CHINESE = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"
_DEEPSEEK_V3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_NFC = normalizers.NFC()
_LLAMA3 = PreTokenizer((*_split(_word_pattern(r"\p{N}{1,3}")), _BYTES), ignore_merges=True, add_bos=True)
_CL100K = _LLAMA3._replace(ignore_merges=False, add_bos=False)  # of GPT-4, which Llama 3 took
_QWEN2 = PreTokenizer((*_split(_word_pattern(r"\p{N}")), _BYTES), _NFC)
_STARCODER = PreTokenizer((_DIGITS, _GPT2))
_GPT_NEOX = PreTokenizer((_GPT2,), _NFC)
_GPT4O = PreTokenizer((*_split(_cased_word_pattern(f"{_SUFFIXES}?", r"\p{N}{1,3}")), _BYTES))
# The first name of several equal ones is the one that files are written with.
PRE_TOKENIZERS = {
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "tekken": PreTokenizer((*_split(_cased_word_pattern("", r"\p{N}")), _BYTES), ignore_merges=True, add_bos=True),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "chatglm-bpe": _CL100K,
    "glm4": _CL100K,
    "smollm": _STARCODER,
    "starcoder": _STARCODER,
    "refact": _STARCODER,
    "command-r": _STARCODER._replace(normalizer=_NFC),
    "gpt-2": PreTokenizer((_GPT2,)),
    "phi-2": PreTokenizer((_GPT2,)),
    "mpt": _GPT_NEOX,
    "olmo": _GPT_NEOX,
    "falcon": PreTokenizer((*_split(r"[\p{P}$+<=>^~|`]+", _GPT2_WORDS, "[0-9][0-9][0-9]"), _BYTES)),
    "deepseek-llm": PreTokenizer(
        (
            *_split(r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
            *_split(r"\s+$", _DEEPSEEK_CHINESE, r"\p{N}+"),
            _BYTES,
        )
    ),
    "deepseek-coder": PreTokenizer(
        (*_split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CHINESE, r"\p{N}"), _BYTES)
    ),
    "deepseek-v3": PreTokenizer((*_split(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3_WORDS), _BYTES)),
}
