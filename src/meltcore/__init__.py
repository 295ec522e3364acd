"""Meltcore serves, scores and certifies LLM inference. Importing it is cheap; torch loads with the first engine."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from meltcore.engine.sampling_params import SamplingParams
    from meltcore.llm import LLM


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from meltcore.llm import LLM

        return LLM
    if name == "SamplingParams":
        from meltcore.engine.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'meltcore' has no attribute {name!r}")
