"""Builds the tokenizer and finds the chat template of a GGUF checkpoint.

A GGUF file names its kind of tokenizer instead of its parts. If `tokenizer.ggml.model` is "gpt2", this is byte-level
BPE with the pre-tokenizer that `tokenizer.ggml.pre` names. If it is "llama", this is SentencePiece BPE, which has
scores instead of merges.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from gguf.constants import TokenType
from tokenizers import decoders, models, normalizers, processors

from meltcore.common.errors import ConfigError, UnservableModelError
from meltcore.models.checkpoints.gguf.gguf_file import GGUFModel, describe_value
from meltcore.models.checkpoints.gguf.gguf_tokens import missing_id_lines, read_flag, special_id, token_types
from meltcore.text.gguf_pre_tokenizers import PRE_TOKENIZERS

_MAX_IDS_SHOWN = 5
# A token of n characters splits into two in n - 1 ways. Published tokens have up to 128 characters, and those of a
# vocabulary up to 1.5 million (Gemma 3, with 513,511 merges). With these limits a hostile vocabulary costs seconds.
MAX_TOKEN_CHARS, _MAX_VOCABULARY_CHARS, MAX_MERGES = 512, 2**22, 2**20
_MAX_ADDED_CHARS = 2**20  # of tokens that are matched whole, for which an automaton is built
_ADDED_TYPES = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
# Published vocabularies may lack bytes: SmolLM2's lacks 21, such as 0xF1 and those that UTF-8 never has.
_REQUIRED_CHARACTERS = [*map(chr, range(0x20, 0x7F)), "\n"]
_BYTE_LEVEL_LETTERS = {" ": "Ġ", "\n": "Ċ"}  # others stand for themselves
SPACE = "▁"  # SentencePiece's
PREFIX = "tokenizer.ggml."
_KINDS = ("gpt2", "llama")
SPECIAL_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # as in the keys


def build_tokenizer(gguf: GGUFModel) -> tokenizers.Tokenizer:
    """Build the tokenizer of a GGUF checkpoint.

    Raises ConfigError that names file and key for an unsupported kind and for a missing or wrong value.
    """
    if f"{PREFIX}tokens" not in gguf.metadata:
        raise ConfigError(f"{gguf.path} lacks {PREFIX}tokens; name a tokenizer with --tokenizer")
    if reasons := _kind_reasons(gguf):
        raise UnservableModelError(str(gguf.path), reasons)
    kind = gguf.metadata.get(f"{PREFIX}model")
    vocab, types, notes = _read_vocabulary(gguf)
    for note in notes:
        print(f"meltcore: {gguf.path}: {note}", file=sys.stderr, flush=True)
    try:
        tokenizer, add_bos = (_byte_level if kind == "gpt2" else _sentencepiece)(gguf, vocab, types)
    except ConfigError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{gguf.path}: the tokenizer cannot be built: {error}") from error
    tokens, types = list(vocab), types[: len(vocab)]
    special = np.isin(types, (TokenType.CONTROL, TokenType.UNKNOWN))
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(tokens[i], normalized=False, special=True) for i in np.flatnonzero(special)]
    )
    tokenizer.add_tokens(
        [tokenizers.AddedToken(tokens[i], normalized=False) for i in np.flatnonzero(types == TokenType.USER_DEFINED)]
    )
    _set_added_tokens(tokenizer, gguf, add_bos=add_bos)
    return tokenizer


def tokenizer_reasons(path: Path) -> list[str]:
    """Return the reasons why the kind of a GGUF file's tokenizer is not supported, without building the tokenizer.

    Returns an empty list for a file without tokens, which the reader of the file reports.
    """
    return _kind_reasons(GGUFModel(path))


def broken_reasons(path: Path) -> list[str]:
    """Return the reason why the tokenizer of a GGUF file cannot be built, although its kind is supported.

    The tokenizer is not built for this check, since building takes seconds for 262,144 tokens. Returns an empty list
    also for a file without tokens, which the reader of the file reports.
    """
    gguf = GGUFModel(path)
    if f"{PREFIX}tokens" not in gguf.metadata or _kind_reasons(gguf):
        return []
    try:
        vocab, types, _ = _read_vocabulary(gguf)
        for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
            read_flag(gguf, key, default=False)
        if gguf.metadata[f"{PREFIX}model"] == "gpt2":
            _read_merges(gguf, vocab)
        else:
            _read_scores(gguf, types)
    except ConfigError as error:
        return [str(error).removeprefix(f"{path}: ").removeprefix(f"{path} ")]
    return []


def _kind_reasons(gguf: GGUFModel) -> list[str]:
    if f"{PREFIX}tokens" not in gguf.metadata:
        return []
    kind = gguf.metadata.get(f"{PREFIX}model")
    if kind == "gpt2":
        return _unsupported_reasons("pre", gguf.metadata.get(f"{PREFIX}pre"), PRE_TOKENIZERS)
    return _unsupported_reasons("model", kind, _KINDS)


def special_tokens(gguf: GGUFModel) -> dict[str, str]:
    """Return the texts of the special tokens by their names in a chat template, such as bos_token."""
    tokens = gguf.texts(f"{PREFIX}tokens") if f"{PREFIX}tokens" in gguf.metadata else []
    ids = {f"{name}_token": special_id(gguf, key, len(tokens)) for name, key in SPECIAL_NAMES.items()}
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def template_source(gguf: GGUFModel) -> str | None:
    """Return the chat template, or None if the file has none."""
    source = gguf.metadata.get("tokenizer.chat_template")
    if source is None or isinstance(source, str):
        return source
    raise ConfigError(f"{gguf.path}: tokenizer.chat_template must be a text; got {describe_value(source)}")


def _read_vocabulary(gguf: GGUFModel) -> tuple[dict[str, int], np.ndarray[Any, Any], list[str]]:
    """Return the ids of tokens, the types of all rows, and notes on values that are not read as they are stored.

    Raises ConfigError if a token occurs twice, which llama.cpp rejects too, if the tokens exceed the limits of
    characters, or if printable ASCII has no tokens. Empty tokens get names.
    """
    tokens = gguf.texts(f"{PREFIX}tokens")
    types, retyped = token_types(gguf, tokens)
    beyond = missing_id_lines(gguf, len(tokens))
    used = np.flatnonzero(types != TokenType.UNUSED)
    tokens = tokens[: int(used[-1]) + 1 if len(used) else 0]  # the rest fills up the rows of an embedding
    empty = [token_id for token_id, token in enumerate(tokens) if not token]
    types[empty] = TokenType.UNUSED
    # llama.cpp names them so too. No text is encoded to these: a vocabulary has another character for their space.
    tokens = [token or f"[EMPTY {token_id}]" for token_id, token in enumerate(tokens)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if vocab[token] != token_id)
        raise ConfigError(f"{gguf.path}: {PREFIX}tokens has {describe_value(twice)} twice")
    _check_tokens(gguf, vocab, types)
    notes = {
        "control tokens, though of another type": retyped,
        f"special tokens beyond the vocabulary of {len(types)}": beyond,
        "empty tokens, which no text is encoded to, by id": [
            *map(str, empty[:_MAX_IDS_SHOWN]),
            *([f"and {len(empty) - _MAX_IDS_SHOWN} more"] if len(empty) > _MAX_IDS_SHOWN else []),
        ],
    }
    return vocab, types, [f"{what}: {', '.join(names)}" for what, names in notes.items() if names]


def _check_tokens(gguf: GGUFModel, vocab: dict[str, int], types: np.ndarray[Any, Any]) -> None:
    """Raise ConfigError for tokens beyond the limits of length, and for a vocabulary that lacks printable ASCII."""
    lengths = np.fromiter(map(len, vocab), dtype=np.int64, count=len(vocab))
    added = int(lengths[np.isin(types[: len(vocab)], _ADDED_TYPES)].sum())
    longest = int(lengths.argmax()) if len(lengths) else 0
    for count, limit, what in (
        (int(lengths.max(initial=0)), MAX_TOKEN_CHARS, f"a token, id {longest},"),
        (int(lengths.sum()), _MAX_VOCABULARY_CHARS, "tokens"),
        (added, _MAX_ADDED_CHARS, "control and user-defined tokens"),
    ):
        if count > limit:
            raise ConfigError(f"{gguf.path}: {PREFIX}tokens has {what} of {count} characters; the limit is {limit}")
    is_byte_level = gguf.metadata[f"{PREFIX}model"] == "gpt2"
    letters = _BYTE_LEVEL_LETTERS if is_byte_level else {" ": SPACE}
    missing = [each for each in _REQUIRED_CHARACTERS if letters.get(each, each) not in vocab]
    if not is_byte_level:
        missing = [each for each in missing if f"<0x{ord(each):02X}>" not in vocab]
    if missing:
        shown = ", ".join(map(repr, missing[:_MAX_IDS_SHOWN]))
        raise ConfigError(
            f"{gguf.path}: {PREFIX}tokens has {len(vocab)} tokens and none for {len(missing)} of the "
            f"{len(_REQUIRED_CHARACTERS)} characters of plain ASCII text, such as {shown}"
        )


def _read_merges(gguf: GGUFModel, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Return the merges of a byte-level vocabulary. Raises ConfigError for an invalid merge."""
    if f"{PREFIX}merges" not in gguf.metadata:
        raise ConfigError(f"{gguf.path} lacks {PREFIX}merges; name a tokenizer with --tokenizer")
    merges: list[tuple[str, str]] = []
    for merge in gguf.texts(f"{PREFIX}merges"):
        left, space, right = merge.partition(" ")
        if not space:
            raise ConfigError(
                f"{gguf.path}: {PREFIX}merges has {describe_value(merge)}; a merge is two tokens with a space between"
            )
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ConfigError(
                f"{gguf.path}: the tokenizer cannot be built: {PREFIX}merges has {describe_value(merge)}, which has or "
                f"makes a token that {PREFIX}tokens lacks"
            )
        merges.append((left, right))
    return merges


def _read_scores(gguf: GGUFModel, types: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the scores of a SentencePiece vocabulary as float64.

    Raises ConfigError if the scores are missing, if their number is not the number of tokens, or if one is not finite.
    """
    key = f"{PREFIX}scores"
    if key not in gguf.metadata:
        raise ConfigError(f"{gguf.path} lacks {key}; name a tokenizer with --tokenizer")
    scores = gguf.numbers(key).astype(np.float64)  # unsigned numbers have no negatives to sort by
    if len(scores) != len(types):
        raise ConfigError(f"{gguf.path}: {key} has {len(scores)} values for {len(types)} tokens")
    if not np.isfinite(scores).all():
        first = int(np.isfinite(scores).argmin())
        raise ConfigError(f"{gguf.path}: {key} must be finite numbers; got {scores[first]} for token {first}")
    return scores


def _byte_level(
    gguf: GGUFModel, vocab: dict[str, int], _types: np.ndarray[Any, Any]
) -> tuple[tokenizers.Tokenizer, bool]:
    """Return a byte-level BPE tokenizer, and whether it adds a BOS token by default."""
    pre = PRE_TOKENIZERS[gguf.metadata[f"{PREFIX}pre"]]
    merges = _read_merges(gguf, vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre.ignore_merges))
    if pre.normalizer is not None:
        tokenizer.normalizer = pre.normalizer
    tokenizer.pre_tokenizer = pre.splitter()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _sentencepiece(
    gguf: GGUFModel, vocab: dict[str, int], types: np.ndarray[Any, Any]
) -> tuple[tokenizers.Tokenizer, bool]:
    """Return a BPE tokenizer with SentencePiece's spaces and byte tokens. It adds a BOS token by default."""
    scores = _read_scores(gguf, types)
    unknown = special_id(gguf, "unknown", len(types)) or 0
    unknown_token = next((token for token, token_id in vocab.items() if token_id == unknown), None)
    merges = merges_from_scores(vocab, scores, types)
    if len(merges) > MAX_MERGES:
        raise ConfigError(f"{gguf.path}: {PREFIX}tokens gives more than {MAX_MERGES} merges, which is the limit")
    bpe = models.BPE(vocab, merges, unk_token=unknown_token, fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(bpe)
    add_space = read_flag(gguf, "add_space_prefix", default=True)  # Llama 2 does, Gemma does not
    tokenizer.normalizer = space_normalizer(add_space=add_space)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] if add_space else []
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def space_normalizer(*, add_space: bool) -> normalizers.Normalizer:
    """Return the normalizer of SentencePiece's spaces. With `add_space` it adds a space before each text."""
    replace = normalizers.Replace(" ", SPACE)
    return normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if add_space else replace


def merges_from_scores(
    vocab: dict[str, int], scores: np.ndarray[Any, Any], types: np.ndarray[Any, Any]
) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece vocabulary, which joins the neighbors whose token has the highest score.

    Tokens of equal score are joined in the order of their ids. Among pairs that give the same token, the pair with the
    longest left neighbor is joined first, as in published tokenizer.json files. Control tokens, bytes and other tokens
    that are matched whole result from no merge. The list ends with the token that brings its length above MAX_MERGES.
    """
    by_score = np.argsort(-scores[: len(vocab)], kind="stable")
    tokens = list(vocab)
    merges: list[tuple[str, str]] = []
    for token_id in by_score[types[by_score] == TokenType.NORMAL].tolist():
        token = tokens[token_id]
        pairs = ((token[:end], token[end:]) for end in range(len(token) - 1, 0, -1))
        found = (pair for pair in pairs if pair[0] in vocab and pair[1] in vocab)
        # The texts of the vocabulary are taken, since copies of a million halves would take gigabytes.
        merges += ((tokens[vocab[left]], tokens[vocab[right]]) for left, right in found)
        if len(merges) > MAX_MERGES:
            break
    return merges


def _set_added_tokens(tokenizer: tokenizers.Tokenizer, gguf: GGUFModel, *, add_bos: bool) -> None:
    """Make the tokenizer add BOS and EOS tokens when it encodes with special tokens."""
    tokens = special_tokens(gguf)
    template, used = ["$A"], []
    if read_flag(gguf, "add_bos_token", default=add_bos) and tokens.get("bos_token"):
        template, used = [tokens["bos_token"], *template], [tokens["bos_token"]]
    if read_flag(gguf, "add_eos_token", default=False) and tokens.get("eos_token"):
        template, used = [*template, tokens["eos_token"]], [*used, tokens["eos_token"]]
    if used:
        ids = [(token, tokenizer.token_to_id(token)) for token in used]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)


def _unsupported_reasons(key: str, value: Any, supported: Iterable[str]) -> list[str]:
    """Return the reason why the value of a key is not supported, or an empty list if it is."""
    names = list(supported)
    if isinstance(value, str) and value in names:
        return []
    listed = ", ".join(names)
    return [f"{PREFIX}{key} is {describe_value(value)}; supported: {listed} (--tokenizer names another tokenizer)"]
