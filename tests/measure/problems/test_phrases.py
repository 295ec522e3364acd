"""Sentences and their translations: as a model reads them, with agreement, and never held out in training."""

import pytest

from meltcore.measure.problems import phrases
from meltcore.measure.problems.phrases import SOURCE_LANGUAGE, TARGET_LANGUAGE, generate_phrases

NUM_PHRASES = 400


def test_words_are_what_the_steps_of_translation_make_of_the_texts() -> None:
    pytest.importorskip("sacremoses", reason="the extra translate has sacremoses")
    from meltcore.text.translation.indic_processor import postprocess, preprocess
    from meltcore.text.translation.indic_scripts import transliterate_to_devanagari
    from meltcore.text.translation.languages import find_language
    from meltcore.text.translation.sentences import split_sentences

    source, target = (find_language(code, "language") for code in (SOURCE_LANGUAGE, TARGET_LANGUAGE))
    found = generate_phrases("heldout", num_phrases=NUM_PHRASES, seed=1)
    for each in found:
        prepared = preprocess(each.source, source)
        assert prepared.text == " ".join(each.source_words)
        written = transliterate_to_devanagari(" ".join(each.target_words), target.text_code)
        assert postprocess(written, target, prepared.placeholders) == each.target
        assert split_sentences(each.source, source)[0] == [each.source]
    assert sum("ID2" in each.source_words for each in found) > 3


def test_training_has_no_combination_that_is_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phrases, "is_held_out", lambda _subject, verb, _thing: verb == "see")

    def with_see(split: str) -> int:
        found = generate_phrases(split, num_phrases=NUM_PHRASES, seed=1)
        return sum(not {"see", "sees", "saw"}.isdisjoint(each.source_words) for each in found)

    assert with_see("train") == 0
    assert with_see("heldout") == NUM_PHRASES


def test_one_combination_in_five_is_held_out() -> None:
    verbs = ("see", "find", "carry", "hide", "watch", "buy")
    combinations = [(s, v, o) for s in phrases._PEOPLE for v in verbs for o in phrases._THINGS]
    share = sum(phrases.is_held_out(*each) for each in combinations) / len(combinations)
    assert share == pytest.approx(0.2, abs=0.02)


def test_the_verb_agrees_with_its_subject_and_stands_last() -> None:
    by_subject: dict[str, set[str]] = {}
    for each in generate_phrases("train", num_phrases=20 * NUM_PHRASES, seed=2):
        words = each.source_words
        if words[0] == "The" and words[2] == "liked" and {"and", "but", "because"}.isdisjoint(words):
            by_subject.setdefault(words[1], set()).add(each.target_words[-2])
    assert all(len(verbs) == 1 for verbs in by_subject.values())
    assert len(set.union(*by_subject.values())) == 6  # three classes, two numbers


def test_the_same_seed_gives_the_same_sentences() -> None:
    first, again, other = (generate_phrases("train", num_phrases=5, seed=seed) for seed in (3, 3, 4))
    assert first == again != other
