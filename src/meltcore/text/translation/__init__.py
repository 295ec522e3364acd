"""The text side of translation: languages, sentences, what IndicProcessor does to them, and SentencePiece ids.

Importing it raises ConfigError where the packages of `meltcore[translate]` are not installed.
"""

from importlib.util import find_spec

from meltcore.common.errors import ConfigError

_missing = [name for name in ("regex", "sacremoses", "sentencepiece") if find_spec(name) is None]
if _missing:
    raise ConfigError(f"translation needs {', '.join(_missing)}: pip install 'meltcore[translate]'")
