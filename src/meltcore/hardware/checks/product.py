"""Matrix product: does every GPU multiply as fast as its SMs and clock say?"""

from collections.abc import Sequence

from meltcore.hardware import expect
from meltcore.hardware.checks.base import MeasuredCheck
from meltcore.hardware.measures import Question
from meltcore.hardware.site import Site
from meltcore.results.certificate import Expectation, Tier

Shape = tuple[int, int, int]
SQUARE: Shape = (8192, 8192, 8192)
SMALL_SQUARE: Shape = (4096, 4096, 4096)
# Tokens x outputs x inputs of large models' feed-forward layers, and a shape that meets every GPU's power limit.
MODEL_SHAPES: tuple[Shape, ...] = ((4096, 14336, 4096), (8192, 28672, 8192), (16384, 16384, 8192))

_WIDE = ("bf16", "fp16", "tf32")
_FP8_FROM = (8, 9)  # compute capability
_PLANS: dict[Tier, tuple[tuple[Shape, ...], tuple[str, ...], float]] = {
    "quick": ((SQUARE,), ("bf16",), 1.0),
    "standard": ((SQUARE, MODEL_SHAPES[0]), (*_WIDE, "fp8"), 1.0),
    "full": ((SMALL_SQUARE, SQUARE, *MODEL_SHAPES), (*_WIDE, "fp8"), 3.0),
}
_BUILD_S = 2.0  # making a question's matrices


class Product(MeasuredCheck):
    name = "product"
    title = "Matrix product"
    unit = "TFLOP/s"

    def questions(self, site: Site) -> list[Question]:
        shapes, dtypes, seconds = _plan(site.tier)
        return [
            Question(
                key=f"product/{dtype}/{m}x{n}x{k}",
                gpus=site.positions,
                each=True,
                settings={"dtype": dtype, "m": m, "n": n, "k": k, "seconds": seconds},
            )
            for dtype in dtypes
            if dtype != "fp8" or has_fp8(site)
            for m, n, k in shapes
        ]

    def seconds(self, site: Site) -> float:
        return len(self.questions(site)) * (_plan(site.tier)[2] + _BUILD_S)

    def left_out(self, site: Site) -> str:
        wanted = "fp8" in _plan(site.tier)[1]
        return "fp8: these GPUs have no such products" if wanted and not has_fp8(site) else ""

    def topology(self, site: Site, question: Question, gpus: Sequence[int]) -> Expectation | None:
        ask = question.settings
        shape = "square" if ask["m"] == ask["n"] == ask["k"] else "model"
        return expect.product(site.snapshot.gpus[gpus[0]], str(ask["dtype"]), shape)


def _plan(tier: Tier) -> tuple[tuple[Shape, ...], tuple[str, ...], float]:
    return _PLANS.get(tier, _PLANS["full"])


def has_fp8(site: Site) -> bool:
    """Also where the capability cannot be read: then the probe finds out, and nothing is left out in silence."""
    known = [str(gpu.facts.get("compute_capability", "")).split(".") for gpu in site.snapshot.gpus]
    return all((int(parts[0]), int(parts[1])) >= _FP8_FROM for parts in known if len(parts) == 2)
