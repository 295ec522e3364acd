"""The committed checkpoints: small, in the published layouts, and right about problems they never saw."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from tokenizers import Tokenizer

import meltcore
from meltcore.measure.problems import Problem, generate, is_correct

FOLDER = Path(meltcore.__file__).parent / "bundled" / "sums"
HYBRID = FOLDER.parent / "sums-hybrid"
GEMMA = FOLDER.parent / "sums-gemma"
# The least accuracy of each, by its own evaluation.
ACCURACY = {FOLDER: 0.995, HYBRID: 0.95, GEMMA: 0.99}
each_folder = pytest.mark.parametrize("folder", ACCURACY, ids=lambda folder: folder.name)
_PAGE_TOKENS = 64


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def _render(question: str) -> str:
    template = ImmutableSandboxedEnvironment().from_string((FOLDER / "chat_template.jinja").read_text())
    return template.render(messages=[{"role": "user", "content": question}], add_generation_prompt=True)


@each_folder
def test_checkpoint_is_complete_and_at_most_8_megabytes(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
        "README.md",
        "evaluation.json",
    }
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 8_000_000


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("phrases", {"config.json", "dict.SRC.json", "dict.TGT.json", "model.SRC", "model.TGT", "model.safetensors"}),
        ("tones", {"model_config.yaml", "en_tokenizer.model", "hi_tokenizer.model", "model_weights.ckpt"}),
        ("voice", {"config.json", "model.safetensors", "vocab.txt", "prompts/seven.wav", "prompts/seven.txt"}),
    ],
)
def test_checkpoint_of_another_task_is_complete_small_and_measured(name: str, files: set[str]) -> None:
    folder = FOLDER.parent / name
    found_files = [path for path in folder.rglob("*") if path.is_file()]
    assert {str(path.relative_to(folder)) for path in found_files} == {*files, "README.md", "evaluation.json"}
    assert sum(path.stat().st_size for path in found_files) <= 6_000_000
    card, evaluation = (folder / "README.md").read_text(), json.loads((folder / "evaluation.json").read_text())
    assert re.fullmatch(r"python scripts/\w+\.py( --[a-z-]+( [\d.]+)?)*", evaluation["command"]), "no path of a machine"
    for kind, found in evaluation["kinds"].items():
        assert found["problems"] >= 100
        assert found["right"] >= 0.95 * found["problems"]
        accuracy = found["right"] / found["problems"]
        assert f"| {kind} | {found['problems']:,} | {found['right']:,} | {accuracy:.2%} |" in card


@each_folder
def test_end_ids_are_the_turn_end_and_the_text_end(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    generation = json.loads((folder / "generation_config.json").read_text())
    expected = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    assert generation["eos_token_id"] == expected


@each_folder
def test_card_quotes_the_measured_accuracy(folder: Path) -> None:
    card = (folder / "README.md").read_text()
    kinds = json.loads((folder / "evaluation.json").read_text())["kinds"]
    assert set(kinds) == {"short", "medium", "long"}
    for kind, found in kinds.items():
        assert f"| {kind} | {found['problems']:,} | {found['right']:,} | {found['accuracy']:.2%} |" in card
        assert found["accuracy"] >= ACCURACY[folder]


def test_template_renders_all_roles_in_a_sandbox() -> None:
    template = ImmutableSandboxedEnvironment().from_string((FOLDER / "chat_template.jinja").read_text())
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant")]
    turns = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages)
    assert template.render(messages=messages) == turns
    assert template.render(messages=messages, add_generation_prompt=True) == turns + "<|im_start|>assistant\n"


def test_hybrid_template_starts_an_answer_or_reasoning() -> None:
    template = ImmutableSandboxedEnvironment().from_string((HYBRID / "chat_template.jinja").read_text())
    messages = [{"role": "user", "content": "u"}]
    turn = "<|im_start|>user\nu<|im_end|>\n"
    assert template.render(messages=messages) == turn
    begun = f"{turn}<|im_start|>assistant\n<think>\n"
    assert template.render(messages=messages, add_generation_prompt=True) == begun
    rendered = template.render(messages=messages, add_generation_prompt=True, enable_thinking=False)
    assert rendered == f"{begun}\n</think>\n\n"


def test_hybrid_reasoning_markers_are_ordinary_tokens() -> None:
    tokenizer = Tokenizer.from_file(str(HYBRID / "tokenizer.json"))
    ids = tokenizer.encode("<think>a</think>").ids
    assert (ids[0], ids[-1]) == (tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>"))
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think>"


def test_hybrid_has_the_published_names_and_every_kind_of_layer() -> None:
    config = json.loads((HYBRID / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5MoeForConditionalGeneration"]
    with safe_open(HYBRID / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
    assert {name.split(".")[0] for name in names} == {"model", "lm_head"}
    assert all(name.startswith("model.language_model.") for name in names - {"lm_head.weight"})
    for part in ("0.linear_attn.A_log", "1.self_attn.q_norm.weight", "0.mlp.experts.gate_up_proj"):
        assert f"model.language_model.layers.{part}" in names


@pytest.mark.parametrize(
    "text", ["What is 37 + 45?", "naïve café\n\n\t 日本語 🙂 12,345", "<|im_start|>user\nx<|im_end|>\n"]
)
def test_any_text_round_trips_through_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("1024").tokens == ["1", "0", "2", "4"]


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_long_prompts_have_200_to_1000_tokens(tokenizer: Tokenizer, split: str) -> None:
    prompts = [_render(each.question) for each in generate(split, kind="long", num_problems=400, seed=21)]
    lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch(prompts)]
    assert min(lengths) >= 200
    assert max(lengths) <= 1000
    assert max(lengths) > 800


def test_needed_facts_are_three_kv_pages_back(tokenizer: Tokenizer) -> None:
    for problem in generate("heldout", kind="long", num_problems=200, seed=22):
        for fact in re.findall(r"(?:\w+ counted \w+|Price of \w+): \d+\.", problem.answer):
            after = problem.question.split(fact)[1]
            assert len(tokenizer.encode(after).ids) > 3 * _PAGE_TOKENS, problem.question


def test_answers_are_short(tokenizer: Tokenizer) -> None:
    short = generate("heldout", kind="short", num_problems=500, seed=23)
    lengths = [len(encoding.ids) + 1 for encoding in tokenizer.encode_batch([each.answer for each in short])]
    assert max(lengths) <= 18
    assert sum(lengths) / len(lengths) <= 12


@pytest.fixture(scope="module")
def model() -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.mark.slow
def test_held_out_problems_are_answered_correctly_with_transformers(model: Any) -> None:
    from transformers import AutoTokenizer

    assert type(model).__name__ == "Qwen3ForCausalLM"
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, padding_side="left")
    right = 0
    for kind, count in (("short", 24), ("long", 6)):
        problems = generate("heldout", kind=kind, num_problems=count, seed=31)
        inputs = tokenizer([_render(problem.question) for problem in problems], padding=True, return_tensors="pt")
        outputs = model.generate(**inputs, max_new_tokens=64)
        replies = tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(map(is_correct, problems, replies))
    assert right / 30 >= 0.95


@pytest.mark.slow
def test_faults_of_pages_and_positions_collapse_long_answers(model: Any, tokenizer: Tokenizer) -> None:
    """What the model is for: an engine that reads one wrong page, or wrong positions in one, loses the answer."""
    problems = generate("heldout", kind="long", num_problems=8, seed=32)
    right = Counter[str]()
    for problem in problems:
        prompt = tokenizer.encode(_render(problem.question)).ids
        answer = tokenizer.encode(problem.answer).ids
        positions = list(range(len(prompt) + len(answer)))
        page = _page_of(problem, tokenizer)
        other_page = [*prompt[: page.start], *prompt[page.stop : page.stop + _PAGE_TOKENS], *prompt[page.stop :]]
        turned_page = [*positions[: page.start], *reversed(positions[page]), *positions[page.stop :]]
        pairs = [position - position % 2 for position in positions]
        right["as it should be"] += _predicts(model, prompt, answer, positions)
        right["another page in place of the needed one"] += _predicts(model, other_page, answer, positions)
        right["positions turned round in the needed page"] += _predicts(model, prompt, answer, turned_page)
        right["every second position off by one"] += _predicts(model, prompt, answer, pairs)
    assert right.pop("as it should be") == len(problems)
    assert all(count <= 1 for count in right.values()), right


def _page_of(problem: Problem, tokenizer: Tokenizer) -> slice:
    """The 64 prompt tokens among which the first needed fact's key stands."""
    key = problem.answer.split(":")[0]
    before = _render(problem.question).split(f"{key}:")[0] + key
    start = len(tokenizer.encode(before).ids) // _PAGE_TOKENS * _PAGE_TOKENS
    return slice(start, start + _PAGE_TOKENS)


def _predicts(model: Any, prompt: list[int], answer: list[int], positions: list[int]) -> bool:
    import torch

    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + answer]), position_ids=torch.tensor([positions])).logits
    return logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == answer
