"""How fast NCCL's collectives are: bus bandwidth in GB/s, one process a GPU, as programs use them."""

import atexit
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from meltcore.hardware.measures import Answer, Question, decode_answer, encode

_LEAVE_S = 10.0


class Group:
    """Ranks that wait for questions. They end with their standard input, or with this process's group."""

    def __init__(self, gpus: tuple[int, ...]) -> None:
        self.gpus = gpus
        self._folder = tempfile.TemporaryDirectory(prefix="meltcore-ranks-")
        store = os.path.join(self._folder.name, "store")
        devices = ",".join(map(str, gpus))
        self._ranks = [self._start(rank, devices, store) for rank in range(len(gpus))]

    def _start(self, rank: int, devices: str, store: str) -> subprocess.Popen[bytes]:
        with self._words_of(rank).open("wb") as words:
            return subprocess.Popen(
                [sys.executable, "-m", "meltcore.hardware.probes.rank", str(rank), devices, store],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=words,
            )

    def _words_of(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank-{rank}.err"

    def ask(self, question: Question) -> Answer:
        """Raises RuntimeError where the first rank is gone; one of the others gone leaves it waiting, to be killed."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(encode(question) + b"\n")
            rank.stdin.flush()
        stdout = self._ranks[0].stdout
        assert stdout is not None
        while line := stdout.readline():
            if line.startswith(b'{"key"'):
                return decode_answer(line)
        raise RuntimeError(f"the first rank ended without an answer: {self._last_words()}")

    def _last_words(self) -> str:
        lines = self._words_of(0).read_text(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "it said nothing"

    def close(self) -> None:
        """Let the ranks leave in order; kill those that do not. A second call finds none left."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            try:
                rank.wait(_LEAVE_S)
            except subprocess.TimeoutExpired:
                rank.kill()
        self._ranks = []
        self._folder.cleanup()


_group: Group | None = None


def measure(question: Question) -> Iterator[Answer]:
    """All GPUs of the question together: settings op, bytes, seconds. Groups of the same GPUs are used again."""
    global _group
    if _group is None or _group.gpus != question.gpus:
        if _group is not None:
            _group.close()
        _group = Group(question.gpus)
        atexit.register(_group.close)
    yield _group.ask(question)
