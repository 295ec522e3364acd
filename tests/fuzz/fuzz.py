"""Feeds one parser with damaged inputs: `python tests/fuzz/fuzz.py TARGET --seconds 600`.

Hypothesis changes valid inputs, in rounds whose seeds are printed. Each input must end in a value or in the documented
errors, within LIMIT_S of CPU time, within the memory limit, and without a file or a descriptor left. The first input
that does not is written to a file, whose name is printed; `--input FILE` repeats it. A crash of a library ends the
child process that runs the inputs, and leaves its input likewise. An unknown target lists them all.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import math
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

LIMIT_S = 2.0  # of CPU time, for one input
_MEMORY_BYTES = 2 * 2**30  # of address space, beyond what the imported libraries have
_MOST_INPUT_BYTES = 256 * 1024
_ROUND = 1000  # inputs; Hypothesis remembers those of a round
_EXIT_S = 120.0  # after which the watching process ends a child that native code holds
_HEAD_BYTES = 64
_CHANGE = struct.Struct(">BHH")
_MOST_CHANGES = 6
_NUMBERS = (
    0,
    1,
    2,
    127,
    128,
    255,
    256,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
_WORD = re.compile(rb'"[^"\n]*"|[\w.$-]+|\S')
# What a change puts in place of a word of a text.
_WORDS = (
    *(b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"18446744073709551616", b"[]", b"{}", b'""', b'"\\ud800"'),
    *(
        b"9" * 5000,
        b"[" * 3000,
        b'{"a":' * 3000,
        b"\0",
        b"\xff\xfe",
        b"\xf0\x9f\x98\x80",
        b"\r\n",
        b"..",
        b"/etc/passwd",
    ),
)


Check = Callable[[bytes], Any]


class Target(NamedTuple):
    """A parser under test.

    `check` gets one input, and returns unless the parser breaks its promise. `words` are put into inputs.
    """

    check: Check
    seeds: list[bytes]
    words: tuple[bytes, ...] = ()


def edited(drawn: bytes, target: Target) -> bytes:
    """Return the input that drawn bytes stand for: a valid one, and changes of it in five bytes each.

    A change has a kind, a place in 65,536ths of the input, and a value. Hypothesis draws bytes several times faster
    than structures, and shortens them as well.
    """
    words = (*target.words, *_WORDS)
    data = target.seeds[int.from_bytes(drawn[:2], "big") % len(target.seeds)]
    for kind, place, value in _CHANGE.iter_unpack(drawn[2 : max(2, len(drawn) - (len(drawn) - 2) % _CHANGE.size)]):
        at = place * (len(data) + 1) >> 16
        kind %= 8
        if kind == 0:
            data = data[:at] + bytes([value & 255]) + data[at + 1 :]
        elif kind == 1:  # a number, as headers have them at their beginning
            at = at if value & 1 else place % _HEAD_BYTES
            size, order = (1, 2, 4, 8)[value >> 1 & 3], "little" if value & 8 else "big"
            number = _NUMBERS[(value >> 4) % len(_NUMBERS)] & (256**size - 1)
            data = data[:at] + number.to_bytes(size, order) + data[at + size :]
        elif kind == 2:
            data = data[:at] + words[value % len(words)] + data[at:]
        elif kind == 3:
            data = data[:at] + data[at + 1 + value % 64 :]
        elif kind == 4:
            data = data[: at + 1 + value % 512] + data[at:]
        elif kind == 5:
            data = data[:at] if value & 1 else data[at:]
        elif kind == 6:
            other = target.seeds[value % len(target.seeds)]
            data = data[:at] + other[place * len(other) >> 16 :]
        else:
            found = [*_WORD.finditer(data)]
            if found:
                word = found[place * len(found) >> 16]
                data = data[: word.start()] + words[value % len(words)] + data[word.end() :]
    return data[:_MOST_INPUT_BYTES]


class TooLongError(BaseException):
    """Reports an input that takes more than LIMIT_S. No parser catches it."""


class TimeIsOverError(BaseException):
    """Ends a round. Hypothesis would otherwise draw the rest of its inputs."""


@contextmanager
def limited() -> Iterator[None]:
    """Raise TooLongError in Python code that runs for more than LIMIT_S of CPU time, and in C code at its end."""

    def stop(*_: Any) -> None:
        raise TooLongError(f"took more than {LIMIT_S:g} s of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    begin_s = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    if time.process_time() - begin_s > LIMIT_S:
        raise TooLongError(f"took {time.process_time() - begin_s:.1f} s of CPU time")


def run_round(target: Target, number: int, inputs: int, last: Path | None = None, end_s: float = math.inf) -> int:
    """Try a round of inputs in the working directory, until the monotonic clock reads `end_s`. Return their number.

    Raises what a parser raises, and AssertionError for a file that is left.
    """
    file = None if last is None else os.open(last, os.O_CREAT | os.O_WRONLY, 0o600)
    files, tried = sorted(Path().iterdir()), 0

    @seed(number)
    @settings(
        max_examples=inputs, database=None, deadline=None, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck), print_blob=False, report_multiple_bugs=False,
    )  # fmt: skip
    @given(st.binary(max_size=2 + _MOST_CHANGES * _CHANGE.size))
    def attempt(drawn: bytes) -> None:
        nonlocal tried
        if time.monotonic() > end_s:
            raise TimeIsOverError
        tried += 1
        data = edited(drawn, target)
        if file is not None:
            os.ftruncate(file, 0)
            os.pwrite(file, data, 0)
        with limited():
            target.check(data)
        assert sorted(Path().iterdir()) == files, "a file is left"

    with suppress(TimeIsOverError):
        attempt()
    if file is not None:
        os.close(file)
    return tried


def _run(name: str, seconds: float, first_seed: int, last: Path) -> None:
    """Run rounds for some seconds, and print what was tried. Ends at the first fault."""
    import fuzz_targets

    faulthandler.enable()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        target = fuzz_targets.TARGETS[name]()
        run_round(target, first_seed, 50)  # which imports what is imported late
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY_BYTES, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        begin_s, rounds, tried, resident = time.monotonic(), 0, 0, [_resident_bytes()]
        descriptors = _descriptors()
        while time.monotonic() - begin_s < seconds:
            tried += run_round(target, first_seed + rounds, _ROUND, last, begin_s + seconds)
            rounds += 1
            resident.append(_resident_bytes())
            assert _descriptors() == descriptors, "descriptors are left"
        os.chdir("/")
    growth = (resident[-1] - resident[min(1, rounds)]) / 2**20
    print(
        f"{name}: {tried:,} inputs in {time.monotonic() - begin_s:.0f} s, seeds {first_seed} to "
        f"{first_seed + rounds - 1}; resident memory {resident[-1] / 2**20:,.0f} MiB, {growth:+,.0f} since round one"
    )


def _descriptors() -> list[str]:
    gc.collect()
    return sorted(str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> int:
    """Run one target in a child process."""
    sys.path += sorted({str(path.parent) for path in Path(__file__).resolve().parent.parent.rglob("*.py")})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--input", type=Path, help="try the contents of this file alone")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    import fuzz_targets

    if args.target not in fuzz_targets.TARGETS:
        parser.error(f"TARGET must be one of {', '.join(fuzz_targets.TARGETS)}")
    if args.input is not None:
        data = args.input.read_bytes()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            with limited():
                fuzz_targets.TARGETS[args.target]().check(data)
            os.chdir("/")
        return 0
    if args.child is not None:
        _run(args.target, args.seconds, args.seed, args.child)
        return 0
    last = Path(tempfile.gettempdir(), f"fuzz-{args.target}-{os.getpid()}.bin")
    command = [sys.executable, __file__, args.target, "--child", str(last)]
    command += ["--seconds", str(args.seconds), "--seed", str(args.seed)]
    try:
        code = subprocess.run(command, timeout=args.seconds + _EXIT_S).returncode
    except subprocess.TimeoutExpired:
        code = -signal.SIGKILL
    if code == 0:
        last.unlink(missing_ok=True)
    else:
        print(f"{args.target}: ended with {code}; the last input: {last}", file=sys.stderr)
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main())
