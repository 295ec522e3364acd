"""What a GPU keeps up: products of the most power-hungry shape for as long as asked, a sample every so often."""

from collections.abc import Iterator

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

    found = rates(question.gpus, launch, 2 * m * n * k / 1e12, float(ask["seconds"]), group_s=float(ask["every_s"]))
    for device, samples in zip(question.gpus, found, strict=True):
        yield Answer(key=question.key, gpus=(device,), samples=samples)
