"""Whether answers under schemas are valid, by an independent validator, and how many schemas are enforced.

The schemas come from tests/doubles/schemas.py. Schemas that are accepted without weakening are answered by a model
beside free greedy answers. The package jsonschema judges each answer that is finished, and a new
matcher reads each answer that was cut. The free answers are compared with the answers of a run without grammars.

    python benchmarks/structured_validity.py --model meltcore/sums --device cpu --temperature 1.5
    python benchmarks/structured_validity.py --model FILE.gguf --schemas 200 --device cpu
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
from bench_output import Row, Target, need_gpu, write_result

from meltcore import LLM, SamplingParams
from meltcore.common.errors import RequestError
from meltcore.offline.llm import Completion
from meltcore.protocol.sampling_params import Grammar
from meltcore.serve.tasks.generation.structured import CheckedGrammar, first_valid, grammar_of_schema
from meltcore.text.grammar import GrammarCompiler

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "doubles"))
from schemas import Schema, schemas

FREE, FREE_TOKENS = 16, 48
QUESTIONS = ["Describe a city as JSON:", "The arguments of the call are", "7 * 8 =", "Name three colors:"]
VALIDATOR = jsonschema.Draft202012Validator


class Checked(NamedTuple):
    """The schemas that are accepted with their grammars, and the number of the others."""

    accepted: list[tuple[Schema, CheckedGrammar]]
    weakened: int
    refused: int


def check(compiler: GrammarCompiler, count: int) -> Checked:
    accepted, weakened, refused = [], 0, 0
    for schema in schemas(count):
        try:
            grammar = first_valid(compiler, grammar_of_schema(schema, "schema", is_strict=False))
        except RequestError:
            refused += 1
            continue
        if grammar.weakened:
            weakened += 1
        else:
            accepted.append((schema, grammar))
    return Checked(accepted, weakened, refused)


def fault(schema: Schema, grammar: CheckedGrammar, answer: Completion, compiler: GrammarCompiler) -> str | None:
    """What is wrong with an answer, or None."""
    if answer.finish_reason == "length":
        matcher = compiler.matcher(grammar.text)
        return None if matcher.try_consume_tokens(answer.token_ids) == len(answer.token_ids) else "a wrong prefix"
    if answer.finish_reason != "stop":
        return f"ended by {answer.finish_reason}"
    try:
        value: Any = json.loads(answer.text)
    except ValueError as error:
        return f"no JSON: {error}"
    errors = VALIDATOR(schema, format_checker=VALIDATOR.FORMAT_CHECKER).iter_errors(value)
    return next((error.message for error in errors), None)


def validate(llm: LLM, count: int, tokens: int, temperature: float) -> list[Row]:
    """Answer the schemas, and return the rows of the result. Prints each answer that is not valid."""
    compiler = GrammarCompiler.from_checkpoint(llm.engine.checkpoint, allow_missing=False)
    found = check(compiler, count)
    free = SamplingParams(max_tokens=FREE_TOKENS)
    free_prompts = [f"{QUESTIONS[number % len(QUESTIONS)]} {number}" for number in range(FREE)]
    alone = llm.generate(free_prompts, free)
    prompts = [f"{QUESTIONS[number % len(QUESTIONS)]} " for number in range(len(found.accepted))]
    sampling = [
        SamplingParams(max_tokens=tokens, temperature=temperature, seed=number, grammar=Grammar(grammar.text))
        for number, (_, grammar) in enumerate(found.accepted)
    ]
    # The free answers begin with the first constrained ones.
    answers = llm.generate([*free_prompts, *prompts], [*[free] * FREE, *sampling])
    beside, constrained = answers[:FREE], answers[FREE:]
    faults = 0
    for (schema, grammar), answer in zip(found.accepted, constrained, strict=True):
        reason = fault(schema, grammar, answer, compiler)
        if reason is not None:
            faults += 1
            print(f"{reason}: {answer.text!r} of {json.dumps(schema)}")
    finished = sum(answer.finish_reason == "stop" for answer in constrained)
    same = sum(one.token_ids == other.token_ids for one, other in zip(alone, beside, strict=True))
    total, accepted = count, len(found.accepted)

    def share(work: str, number: int, of: int, reach: float | None = None) -> Row:
        target = None if reach is None else Target(reach)
        return Row(work=f"{work}, of {of}", unit="%", value=round(100 * number / of, 1), target=target)

    return [
        share("schemas enforced", accepted, total),
        share("schemas weakened with notice", found.weakened, total),
        share("schemas refused", found.refused, total),
        share("answers that are valid, or a valid prefix where they were cut", accepted - faults, accepted, 100),
        share("answers that were finished", finished, accepted, 90),
        share("free greedy answers that are the same beside them", same, FREE, 100),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="meltcore/sums")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--schemas", type=int, default=700)
    parser.add_argument("--tokens", type=int, default=512, help="Of each answer at most.")
    parser.add_argument("--temperature", type=float, default=1.0, help="Tiny models repeat themselves at a low one.")
    parser.add_argument("--sequences", type=int, default=64)
    args = parser.parse_args()
    need_gpu(model=args.model)
    llm = LLM(args.model, device=args.device, max_num_seqs=args.sequences, max_model_len=args.tokens + 64)
    rows = validate(llm, args.schemas, args.tokens, args.temperature)
    llm.close()
    versions = {name: metadata.version(name) for name in ("torch", "llguidance", "jsonschema")}
    write_result(rows, versions, subject=Path(args.model).name if Path(args.model).exists() else args.model)


if __name__ == "__main__":
    main()
