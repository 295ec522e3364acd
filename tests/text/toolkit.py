"""IndicTransToolkit's IndicProcessor, where it is installed. Run as a program, writes translation_pairs.json.

The recorded pairs are of this project's random sentences: what the processor (1.1.1, MIT) makes of them.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from translation_texts import random_sentence

from meltcore.text.languages import LANGUAGES
from meltcore.text.translation.indic_processor import preprocess

PAIRS = Path(__file__).parent / "translation_pairs.json"
_PER_LANGUAGE = 5


def load_processor() -> Any:
    """An IndicProcessor, or None. The package's other modules, which need older transformers, are not imported."""
    found = importlib.util.find_spec("IndicTransToolkit")
    if found is None:
        return None
    package = ModuleType("IndicTransToolkit")
    package.__path__ = list(found.submodule_search_locations or [])
    sys.modules["IndicTransToolkit"] = package
    return importlib.import_module("IndicTransToolkit.processor").IndicProcessor(inference=True)


def record() -> None:
    processor, chance, rows = load_processor(), random.Random(23), []
    for language in LANGUAGES:
        recorded = 0
        while recorded < _PER_LANGUAGE:
            sentence = random_sentence(language, chance, 8)
            expected = preprocess(sentence, language)
            if preprocess(sentence, language, order=set) != expected:
                continue  # the processor's order of placeholders would be the order of a set
            [source] = processor.preprocess_batch([sentence], src_lang=language.code, tgt_lang="eng_Latn")
            output = f"{random_sentence(language, chance, 4)} {expected.text}"
            target = chance.choice(LANGUAGES).code
            [translation] = processor.postprocess_batch([output], lang=target)
            recorded += 1
            rows.append(
                {
                    "language": language.code,
                    "sentence": sentence,
                    "source": source.split(" ", 2)[2],
                    "placeholders": expected.placeholders,
                    "output": output,
                    "target": target,
                    "translation": translation,
                }
            )
    PAIRS.write_text(json.dumps(rows, ensure_ascii=True, indent=0) + "\n")


if __name__ == "__main__":
    record()
