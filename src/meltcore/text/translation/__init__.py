"""Handles the text of translation: languages, sentences, IndicProcessor's preparation, and SentencePiece ids.

Importing the package raises ConfigError if the packages of `meltcore[translate]` are not installed.
"""

from importlib.util import find_spec

from meltcore.common.errors import ConfigError

_missing = [name for name in ("regex", "sacremoses", "sentencepiece") if find_spec(name) is None]
if _missing:
    raise ConfigError(f"translation needs {', '.join(_missing)}: pip install 'meltcore[translate]'")
