"""Every probe on real GPUs, for moments: each kind of question has a sane answer before a tier asks for minutes."""

import subprocess
import sys

import pytest

from meltcore.hardware.measures import Answer, Job, Question, Setting, encode, read_answers

MIB = 2**20
BRIEF: dict[str, Setting] = {"seconds": 0.1}
# No GPU of today comes near, in TFLOP/s and GB/s: what is above was not timed.
MOST = {
    "product": 5000.0,
    "sustained": 5000.0,
    "memory": 20_000.0,
    "host": 200.0,
    "peers": 4000.0,
    "collectives": 4000.0,
}


def asked(probe: str, *questions: Question, limit_s: float = 120.0) -> list[Answer]:
    done = subprocess.run(
        [sys.executable, "-m", "meltcore.hardware.probes", probe],
        input=encode(Job(questions=list(questions))),
        capture_output=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    answers = read_answers(done.stdout)
    assert [(answer.key, answer.gpus) for answer in answers] == [
        (question.key, target) for question in questions for target in question.targets()
    ]
    assert [answer.error for answer in answers if answer.error] == []
    for answer in answers:
        assert answer.samples
        assert all(sample is not None and 0 < sample < MOST.get(probe, 1e9) for sample in answer.samples)
    return answers


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


@pytest.mark.gpu
def test_products_of_every_type() -> None:
    import torch

    types = ["bf16", "fp16", "tf32"] + (["fp8"] if torch.cuda.get_device_capability() >= (8, 9) else [])
    sizes: dict[str, Setting] = {"m": 4096, "n": 14336, "k": 4096}
    everyone = tuple(range(gpus()))
    questions = [
        Question(key=f"product/{kind}", gpus=everyone, each=True, settings={**BRIEF, **sizes, "dtype": kind})
        for kind in types
    ]
    assert len(asked("product", *questions)) == len(types) * len(everyone)


@pytest.mark.gpu
def test_memory_and_host_copies_of_every_kind() -> None:
    kinds = [
        Question(key=kind, gpus=(0,), each=True, settings={**BRIEF, "kind": kind, "bytes": 512 * MIB})
        for kind in ("copy", "read", "write")
    ]
    asked("memory", *kinds)
    ways = [
        Question(key=way, gpus=(0,), settings={**BRIEF, "way": way, "bytes": 256 * MIB, "cpus": ""})
        for way in ("to-device", "to-host")
    ]
    asked("host", *ways)


@pytest.mark.gpu
def test_a_load_is_sustained_and_its_products_come_out_alike() -> None:
    sizes: dict[str, Setting] = {"dtype": "bf16", "m": 8192, "n": 8192, "k": 8192}
    load = Question(key="s", gpus=(0,), each=True, settings={**sizes, "seconds": 2.0, "every_s": 0.25})
    (answer,) = asked("sustained", load)
    assert 4 <= len(answer.samples) <= 8
    again = Question(key="c", gpus=(0,), each=True, settings={"dtype": "bf16", "size": 4096, "seconds": 1.0})
    (first,), (second,) = asked("corruption", again), asked("corruption", again)
    assert (first.marks["wrong"], second.marks["wrong"]) == (0, 0)
    assert int(first.marks["compared"]) >= 100
    assert first.marks["digest"] == second.marks["digest"], "the same bits in another process"


@pytest.mark.gpu
def test_two_gpus_exchange_data_and_sums() -> None:
    if gpus() < 2:
        pytest.skip("needs two GPUs")
    pair = [
        Question(key=f"ways {ways}", gpus=(0, 1), settings={**BRIEF, "ways": ways, "bytes": 256 * MIB})
        for ways in (1, 2)
    ]
    asked("peers", *pair)
    together = [
        Question(key=f"{op} {size}", gpus=(0, 1), settings={**BRIEF, "op": op, "bytes": size})
        for op in ("all_reduce", "all_gather", "reduce_scatter")
        for size in (4096, MIB, 256 * MIB)
    ]
    assert {answer.marks["wrong"] for answer in asked("collectives", *together)} == {0}
