"""What a GPU keeps up: products of the most power-hungry shape for as long as asked, a sample every so often."""

from collections.abc import Iterator, Sequence
from statistics import harmonic_mean

from meltcore.hardware.measures import Answer, Question
from meltcore.hardware.probes.matrices import products
from meltcore.hardware.probes.timing import rates


def measure(question: Question) -> Iterator[Answer]:
    """All GPUs at once: settings dtype, m, n, k, seconds, every_s."""
    ask = question.settings
    m, n, k = int(ask["m"]), int(ask["n"]), int(ask["k"])
    jobs = {device: products(str(ask["dtype"]), m, n, k, device) for device in question.gpus}

    def launch(device: int) -> None:
        jobs[device]()

    seconds, every_s = float(ask["seconds"]), float(ask["every_s"])
    found = rates(question.gpus, launch, 2 * m * n * k / 1e12, seconds, group_s=every_s)
    for device, samples in zip(question.gpus, found, strict=True):
        yield Answer(key=question.key, gpus=(device,), samples=thinned(samples, round(seconds / every_s)))


def thinned(samples: Sequence[float], most: int) -> list[float]:
    """At most `most` of them, each the rate over several: groups of launches are shorter than a soak's samples."""
    together = -(-len(samples) // max(1, most))
    return [harmonic_mean(samples[start : start + together]) for start in range(0, len(samples), together)]
