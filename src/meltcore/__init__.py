"""Meltcore serves, scores and certifies LLM inference. Importing it is cheap; torch loads with the first engine."""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = ["LLM", "SamplingParams", "Synthesizer", "Transcriber", "Translator", "__version__"]

if TYPE_CHECKING:
    from meltcore.offline.llm import LLM
    from meltcore.offline.synthesizer import Synthesizer
    from meltcore.offline.transcriber import Transcriber
    from meltcore.offline.translator import Translator
    from meltcore.protocol.sampling_params import SamplingParams


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from meltcore.common.process import without_collection

        with without_collection():  # full collections are a tenth of the time that the import of torch takes
            from meltcore.offline.llm import LLM

        return LLM
    if name == "SamplingParams":
        from meltcore.protocol.sampling_params import SamplingParams

        return SamplingParams
    if name == "Synthesizer":
        from meltcore.offline.synthesizer import Synthesizer

        return Synthesizer
    if name == "Transcriber":
        from meltcore.offline.transcriber import Transcriber

        return Transcriber
    if name == "Translator":
        from meltcore.offline.translator import Translator

        return Translator
    raise AttributeError(f"module 'meltcore' has no attribute {name!r}")
