"""Sentences before and after IndicTrans2 are those of IndicTransToolkit, faults included; no text takes long."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

pytest.importorskip("sacremoses", reason="the extra `translate` is not installed: make .venv/.installed")

from toolkit import PAIRS, load_processor
from translation_texts import random_sentence

from meltcore.common.errors import RequestError
from meltcore.text.languages import LANGUAGES
from meltcore.text.translation import indic_processor
from meltcore.text.translation.indic_processor import MAX_SENTENCE_CHARS, ODDITIES, postprocess, preprocess
from meltcore.text.translation.indic_scripts import join_words, split_words, transliterate
from meltcore.text.translation.languages import find_language

PAIRS_OF_TOOLKIT = json.loads(PAIRS.read_text())


def language(code: str) -> Any:
    return find_language(code, "src_lang")


def source(text: str, code: str) -> str:
    return preprocess(text, language(code)).text


def test_recorded_sentences_are_those_of_the_toolkit() -> None:
    assert {pair["language"] for pair in PAIRS_OF_TOOLKIT} == {each.code for each in LANGUAGES}
    for pair in PAIRS_OF_TOOLKIT:
        assert preprocess(pair["sentence"], language(pair["language"])) == (pair["source"], pair["placeholders"])
        translation = postprocess(pair["output"], language(pair["target"]), pair["placeholders"])
        assert translation == pair["translation"], pair["target"]


def test_random_sentences_are_those_of_the_toolkit() -> None:
    processor = load_processor()
    if processor is None:
        pytest.skip("IndicTransToolkit is not installed; recorded sentences are compared")
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for i in range(2600):
        spoken, target = LANGUAGES[i % len(LANGUAGES)], chance.choice(LANGUAGES)
        sentence = random_sentence(spoken, chance)
        prepared = preprocess(sentence, spoken, order=set)  # the toolkit's order, in this process
        expected = processor.preprocess_batch([sentence], src_lang=spoken.code, tgt_lang=target.code)
        assert [f"{spoken.code} {target.code} {prepared.text}"] == expected, (seed, spoken.code, sentence)
        output = f"{random_sentence(target, chance)} {prepared.text}"
        expected = processor.postprocess_batch([output], lang=target.code)
        assert [postprocess(output, target, prepared.placeholders)] == expected, (seed, target.code, output)


def copied(text: str, spoken: str, target: str) -> str:
    """Return the text as a model gives it that copies what it reads."""
    prepared = preprocess(text, language(spoken))
    return postprocess(prepared.text, language(target), prepared.placeholders)


# An example of each entry of ODDITIES: what a repaired step would not give
ODD = {
    "text-codes": lambda: source("\u0958", "mai_Deva") == source("\u0958", "hin_Deva"),
    "digits": lambda: source("௧ ൧ ౦ ٣ १ ౧", "tam_Taml").split()[-4:] == ["౦", "٣", "1", "1"],
    "literal-nukta": lambda: source("\u0958", "hin_Deva") == "\u0915\\u093C",
    "ascii-visarga": lambda: source("A:b", "hin_Deva") == "\\1ःb" and source("क:b", "hin_Deva") == "क : b",
    "backslash-in-words": lambda: source("क\\ख", "hin_Deva") == "क\\ख",
    "kept-forms": lambda: source("\ufb56 \ufb57", "urd_Arab") == "\u067e \ufb57",
    "first-number": lambda: join_words("1 , 2 x 3 , 4") == "1, 2 x 3,4",
    "quote-markers": lambda: join_words("@RA x") == "'x",
    "merged-placeholder": lambda: "<आय . डी .1>" not in indic_processor._spellings("<ID1>"),
    "odia-nukta": lambda: (
        postprocess("\u092f\u093c", language("ory_Orya"), {}) == "\u0b2f\u0b3c"
        and postprocess("\u0b2f\u0b3c", language("ory_Orya"), {}) == "\u0b5f"
    ),
    "long-numbers": lambda: (
        preprocess("1,23,45,678 है", language("hin_Deva")) == ("< ID1 > , 678 है", {"<ID1>": "1,23,45"})
        and postprocess("< ID1 > , 678", language("eng_Latn"), {"<ID1>": "1,23,45"}) == "1,23,45, 678"
    ),
    "signs-apart": lambda: (
        copied("+91-80 42$ a>b ₹12 42°", "eng_Latn", "hin_Deva") == "+ 91-80 42 $a> b ₹ 12 42 °"
        and copied("₹12 a&b +919880012345", "hin_Deva", "eng_Latn") == "₹12 a & b + 919880012345"
    ),
    "joined-sentences": lambda: (
        preprocess("I saw dogs.The king. a.b", language("eng_Latn")).placeholders == {"<ID1>": "dogs.The"}
    ),
    "nested-entities": lambda: (
        preprocess("#a #ab #c", language("eng_Latn")).placeholders == {"<ID1>": "#a", "<ID2>": "#ab", "<ID3>": "#c"}
    ),
}


@pytest.mark.parametrize("name", ODDITIES)
def test_each_oddity_is_reproduced(name: str) -> None:
    assert ODD[name]()


@pytest.mark.parametrize(
    ("code", "text", "itt", "original"),
    [
        ("ben_Beng", "\u09af\u09bc \u09df", "\u092f\u093c \u092f\\u09BC", "\u092f\u093c \u092f\u093c"),
        ("hin_Deva", "\u0958 5:30", "\u0915\\u093C \\1\u090330", "\u0915\u093c 5:30"),
        ("hin_Deva", "\u0915:7", "\u0915 : 7", "\u0915\u09037"),
        ("pan_Guru", "\u0a36", "\u0938\\u0A3C", "\u0938\u093c"),
    ],
)
def test_original_normalizer_repairs_nukta_and_visarga(code: str, text: str, itt: str, original: str) -> None:
    assert preprocess(text, language(code)).text == itt
    assert preprocess(text, language(code), normalizer="original").text == original


@pytest.mark.parametrize(
    "entity", ["a.b@mail.example.org", "https://example.org/a?b=1", "12/05/2023", "10-20%", "98,765,432", "#tag"]
)
@pytest.mark.parametrize("code", ["eng_Latn", "hin_Deva", "urd_Arab", "sat_Olck"])
def test_entity_travels_as_a_placeholder_and_comes_back(entity: str, code: str) -> None:
    text, placeholders = preprocess(f"x {entity} y", language(code))
    assert placeholders == {"<ID1>": entity}
    assert entity not in text
    for written in ("<ID1>", "< ID1 >", "[id 1]", "<आईडी1>", "ᱟᱭᱰᱤ 1"):
        assert entity in postprocess(f"z {written} w", language("hin_Deva"), placeholders)


@pytest.mark.parametrize("number", [2, 10, 11, 12, 21])
@pytest.mark.parametrize("written", ["<ID{}>", "[id {}]", "आईडी {}", "आईडी{}", "< आई . डी . {} >", "ᱟᱭᱰᱤ{}"])
def test_each_of_many_addresses_comes_back(number: int, written: str) -> None:
    text = " ".join(f"item{index}@example.org" for index in range(1, 22))
    placeholders = preprocess(text, language("eng_Latn")).placeholders
    found = postprocess(f"x {written.format(number)} y", language("hin_Deva"), placeholders)
    assert found == f"x item{number}@example.org y"


def test_backslashes_of_an_address_come_back() -> None:
    assert postprocess("आईडी 1", language("hin_Deva"), {"<ID1>": r"a\1@b\g<0>.org"}) == r"a\1@b\g<0>.org"


def test_number_of_a_typed_placeholder_is_not_used() -> None:
    text, placeholders = preprocess("<ID1> and [id 2] are 123456 and 1/2/34", language("eng_Latn"))
    assert placeholders == {"<ID3>": "1/2/34"}
    assert "< ID1 >" in text
    assert postprocess("<ID1> < ID3 >", language("eng_Latn"), placeholders) == "<ID1> 1/2/34"


def test_sentences_do_not_share_placeholders() -> None:
    first, second = (preprocess(text, language("hin_Deva")) for text in ("क 1/2/34", "ख 5/6/78"))
    assert postprocess("<ID1>", language("eng_Latn"), second.placeholders) == "5/6/78"
    assert postprocess("<ID1>", language("eng_Latn"), first.placeholders) == "1/2/34"


@pytest.mark.parametrize(
    "unit", ["1", "1 ", "a.-", "-a.", "a", "a@", "a@a.", "1.1", "1-1", "#", "( ", " ", "<ID1>", "'", "A:", "1%1", "~1 "]
)
def test_longest_sentence_takes_bounded_time(unit: str) -> None:
    sentence = (unit * MAX_SENTENCE_CHARS)[:MAX_SENTENCE_CHARS]
    for code in ("hin_Deva", "urd_Arab"):
        started = time.process_time()
        preprocess(sentence, language(code))
        assert time.process_time() - started < 3


def test_longer_sentence_is_an_error_that_names_the_limit() -> None:
    with pytest.raises(RequestError, match="100,000 characters, of at most 4,096"):
        preprocess("क" * 100_000, language("hin_Deva"))


@pytest.mark.parametrize("code", [each.code for each in LANGUAGES if each.script not in ("Arabic", "Latin")])
def test_letters_survive_the_way_to_devanagari_and_back(code: str) -> None:
    each = language(code)
    text = source(random_sentence(each, random.Random(1)), code)
    again = transliterate(transliterate(text, "hi", each.text_code), each.text_code, "hi")
    assert each.script == "Tamil" or again == text


def test_numbers_are_not_split_into_words() -> None:
    assert split_words("क,ख 1,000.5 ग।", "hi") == "क , ख 1,000.5 ग ।"
    assert join_words("क , ख ( ग ) ' घ ' .") == "क, ख (ग) 'घ'."
