"""What a check asks of a probe, and what the probe answers: JSON lines over its standard streams."""

from collections.abc import Sequence

import msgspec

Setting = int | float | str


class Question(msgspec.Struct, kw_only=True, frozen=True):
    """One measurement. `gpus`: positions in the snapshot, the same as the probe's device numbers.

    `each`: all of them are measured at once, and each gives an answer of its own; otherwise there is one answer of all.
    """

    key: str
    gpus: tuple[int, ...]
    each: bool = False
    settings: dict[str, Setting] = {}

    def targets(self) -> list[tuple[int, ...]]:
        """The GPUs of every answer to be had."""
        return [(gpu,) for gpu in self.gpus] if self.each else [self.gpus]


class Answer(msgspec.Struct, kw_only=True):
    """`samples` in the unit of the check. `marks`: what is not a rate (digests, counts). `error`: why it has none.

    A sample is None where it was NaN or infinite, which JSON cannot say.
    """

    key: str
    gpus: tuple[int, ...]
    samples: Sequence[float | None] = ()
    marks: dict[str, str | int] = {}
    error: str = ""


class Job(msgspec.Struct, kw_only=True):
    """All a probe is asked in one life."""

    questions: list[Question]


decode_job = msgspec.json.Decoder(Job).decode
decode_answer = msgspec.json.Decoder(Answer).decode
encode = msgspec.json.encode


def read_answers(stdout: bytes) -> list[Answer]:
    """Whole lines that are answers; a line cut short by a kill, and what a library printed, are left out."""
    answers = []
    for line in stdout.splitlines():
        try:
            answers.append(decode_answer(line))
        except msgspec.MsgspecError:
            continue  # the answer that should be there is then missing, and its row UNKNOWN
    return answers
