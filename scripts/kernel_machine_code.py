"""Compares the machine code of every kernel between two source trees, on a machine without a GPU.

    kernel_machine_code.py dump TREE OUT.json [--only SUBSTRING] [--capability 90]
    kernel_machine_code.py compare BEFORE.json AFTER.json

`dump` compiles all compile cases of TREE (as its tests/kernels/test_kernel_compile.py lists them) for one architecture
and writes one row per compiled kernel: name, SHA-256 of its instructions, registers, shared memory, launch settings.
Symbol names, line numbers and debug data are not part of the hash. `compare` matches rows by hash, so renaming a kernel
or its parameters is no difference. It prints what only one side has and exits 1 if there is any.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SECTION_HEADER = struct.Struct(
    "<IIQQQQIIQQ"
)  # ELF64: name, type, flags, address, offset, size, link, info, align, entry
_SETTINGS = ("num_warps", "num_stages", "shared", "launch_pdl", "launch_cooperative_grid", "cluster_dims")


def code_sections(cubin: bytes) -> Iterator[bytes]:
    """The bytes of each `.text` section of a cubin, an ELF64 file, in file order."""
    headers_at, header_bytes, count, names_index = (
        struct.unpack_from("<Q", cubin, 0x28)[0],
        *struct.unpack_from("<HHH", cubin, 0x3A),
    )
    headers = [_SECTION_HEADER.unpack_from(cubin, headers_at + number * header_bytes) for number in range(count)]
    names_at = headers[names_index][4]
    for name, _, _, _, offset, size, *_ in headers:
        if cubin[names_at + name :].startswith(b".text"):
            yield cubin[offset : offset + size]


def describe(name: str, compiled: Any) -> dict[str, Any]:
    """One row for a compiled kernel: everything that decides its speed, without what it is called."""
    metadata = compiled.metadata._asdict()
    digest = hashlib.sha256(b"".join(code_sections(compiled.asm["cubin"]))).hexdigest()
    settings = {key: str(metadata[key]) for key in _SETTINGS if key in metadata}
    return {"kernel": name, "code": digest, **settings}


def dump(tree: Path, out: Path, only: str, capability: int) -> None:
    sys.path[:0] = [str(tree / "src"), str(tree / "tests" / "kernels")]
    import compile_tools
    import test_kernel_compile
    from triton.runtime.jit import JITFunction

    rows: list[dict[str, Any]] = []
    compile_tools.only_compile_for(capability)
    compile_only = JITFunction.run
    create_binder = JITFunction._do_compile

    def compile_and_keep(function: JITFunction, *args: Any, **kwargs: Any) -> Any:
        compiled = create_binder(function, *args, **kwargs)
        if compiled is not None:
            rows.append(describe(function.__name__, compiled))
        return compiled

    JITFunction._do_compile = compile_and_keep
    assert JITFunction.run is compile_only
    tasks = list(dict.fromkeys(task._replace(capability=capability) for task in test_kernel_compile.cases()))
    tasks = [task for task in tasks if only in task.module]
    for number, task in enumerate(tasks):
        print(f"{number + 1}/{len(tasks)} {task.module} {task.dtype}", file=sys.stderr, flush=True)
        compile_tools.compile_file(task)
    out.write_text(json.dumps(sorted(rows, key=lambda row: (row["kernel"], row["code"])), indent=0) + "\n")
    print(f"{len(rows)} compiled kernels of {len(tasks)} cases: {out}")


def compare(before: Path, after: Path) -> int:
    """Print the rows that only one side has. Returns the exit status: 0 where the machine code is the same."""

    def read(path: Path) -> tuple[Counter[tuple[str, ...]], dict[tuple[str, ...], str]]:
        rows = json.loads(path.read_text())
        keys = [tuple(str(value) for key, value in row.items() if key != "kernel") for row in rows]
        return Counter(set(keys)), {key: row["kernel"] for key, row in zip(keys, rows, strict=True)}

    (old, old_names), (new, new_names) = read(before), read(after)
    for title, missing, names in (("only before", old - new, old_names), ("only after", new - old, new_names)):
        for name, number in sorted(Counter(names[key] for key in missing).items()):
            print(f"{title}: {name}: {number} of {sum(1 for each in names.values() if each == name)} kernels")
    print(f"{len(old)} different kernels before, {len(new)} after, {len(old & new)} the same")
    return 0 if old == new else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    dumping = verbs.add_parser("dump")
    dumping.add_argument("tree", type=Path)
    dumping.add_argument("out", type=Path)
    dumping.add_argument("--only", default="", help="Part of a module's name: compile the cases of these alone.")
    dumping.add_argument("--capability", type=int, default=90, help="Compute capability (default: 90).")
    comparing = verbs.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.verb == "compare":
        return compare(args.before, args.after)
    dump(args.tree.resolve(), args.out, args.only, args.capability)
    return 0


if __name__ == "__main__":
    sys.exit(main())
