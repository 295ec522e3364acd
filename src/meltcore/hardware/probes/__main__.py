"""Runs one probe over the questions of a job. One that fails is answered with its error, and the next is asked."""

import importlib
import os
import sys

from meltcore.hardware.measures import Answer, Question, decode_job, encode

PROBES = ("product", "memory", "host", "peers", "collectives", "sustained", "corruption")


def main(name: str) -> None:
    job = decode_job(sys.stdin.buffer.read())
    measure = importlib.import_module(f"meltcore.hardware.probes.{name}").measure
    for question in job.questions:
        try:
            answers = list(measure(question))
        except (RuntimeError, ValueError, AssertionError, OSError) as error:  # a torch without CUDA asserts
            answers = _failed(question, error)
        for answer in answers:
            # One write a line, past Python's buffers: what is written before a kill is kept.
            os.write(sys.stdout.fileno(), encode(answer) + b"\n")


def _failed(question: Question, error: Exception) -> list[Answer]:
    words = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no words'}"
    return [Answer(key=question.key, gpus=target, error=words[:300]) for target in question.targets()]


if __name__ == "__main__":
    main(sys.argv[1])
