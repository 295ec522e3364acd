"""Sentences per second of beam search beside transformers' `generate`, on the same random weights and sentences.

Every sentence gets as many tokens as every other (min = max new tokens), in both: `generate` knows one length for a
batch. A level of c is c sentences that start together, of uniform random lengths. transformers runs M2M100 with the
layers that IndicTrans2 has otherwise, one batch per level, with SDPA. The median of the repetitions is quoted, with its
share of the floor: what the weights, keys, values and logits take to read, or the GEMMs to compute.

    python benchmarks/translation.py --peer
    python benchmarks/translation.py --profile 1,1000        # kernels of a step by their time; prints only
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

import torch
from bench_output import Row, Target, need_gpu, print_table, write_result
from floors import Limits

from meltcore.engine.translation.beam_search import BeamSearch
from meltcore.engine.translation.beam_state import BeamOptions
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.configs.task_configs import IndicTrans2Config
from meltcore.models.loader import fill_dummy_weights
from meltcore.models.tasks.indictrans2 import EOS_ID, PAD_ID, IndicTrans2

PUBLISHED = "ai4bharat/indictrans2-en-indic-1B"
LOWEST_ID = 4
RATE, LATENCY, STEP = "sentences/s", "ms", "ms per step"
TARGETS = {RATE: Target(3.0, of="ratio"), LATENCY: Target(50.0, better="lower"), STEP: Target(1.5, better="lower")}

Sources = list[list[int]]


class Work(NamedTuple):
    """Sentences of uniform length from low to high tokens, each translated to `out` tokens."""

    sentences: int
    low: int
    high: int
    out: int

    def __str__(self) -> str:
        lengths = f"{self.low} to {self.high}" if self.low < self.high else str(self.low)
        return f"{self.sentences:,} sentence{'s' * (self.sentences != 1)}, {lengths} in / {self.out} out"

    def sources(self, vocab: int, seed: int) -> Sources:
        draw = random.Random(seed)
        return [
            [*(draw.randrange(LOWEST_ID, vocab) for _ in range(draw.randint(self.low, self.high) - 1)), EOS_ID]
            for _ in range(self.sentences)
        ]


def floor_s(config: IndicTrans2Config, sources: Sources, out: int, beams: int, limits: Limits, size: int) -> float:
    """The least seconds of a work. size: bytes of a number.

    A step reads the decoder's weights and the head once, each key and value of a sentence once for all its beams, and
    writes and reads the logits.
    """
    width, layers, vocab = config.hidden_size, config.decoder.num_layers, config.decoder.vocab_size
    step_weights = layers * (6 * width**2 + 2 * width * config.decoder.ffn_size) + vocab * width
    encoder_layer = 4 * width**2 + 2 * width * config.encoder.ffn_size
    source_weights = config.encoder.num_layers * encoder_layer + layers * 2 * width**2
    rows, tokens = len(sources) * beams, sum(map(len, sources))
    encoder_us = max(2 * tokens * source_weights / limits.flops_per_us, source_weights * size / limits.bytes_per_us)
    token_bytes = 2 * layers * width * size
    computed = 2 * rows * step_weights
    total_us = encoder_us
    for position in range(out):
        read = step_weights * size + token_bytes * (tokens + rows * position) + 2 * rows * vocab * size
        total_us += max(read / limits.bytes_per_us, computed / limits.flops_per_us)
    return total_us / 1e6


def peer_model(values: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' M2M100 of these sizes with random weights: separate vocabularies and a head of its own."""
    from transformers import M2M100Config, M2M100ForConditionalGeneration
    from transformers.models.m2m_100.modeling_m2m_100 import M2M100ScaledWordEmbedding

    width = values["encoder_embed_dim"]
    same = ("layers", "attention_heads", "ffn_dim")
    sizes = {f"{side}_{name}": values[f"{side}_{name}"] for side in ("encoder", "decoder") for name in same}
    config = M2M100Config(
        vocab_size=values["decoder_vocab_size"], d_model=width, scale_embedding=values["scale_embedding"],
        activation_function=values["activation_function"], max_position_embeddings=values["max_source_positions"],
        dropout=0.0, tie_word_embeddings=False, pad_token_id=PAD_ID, bos_token_id=0, eos_token_id=EOS_ID, **sizes,
    )  # fmt: skip
    with torch.device(device):
        model = M2M100ForConditionalGeneration(config)
        scale = width**0.5 if values["scale_embedding"] else 1.0
        for side, stack in (("encoder", model.model.encoder), ("decoder", model.model.decoder)):
            stack.embed_tokens = M2M100ScaledWordEmbedding(
                values[f"{side}_vocab_size"], width, PAD_ID, embed_scale=scale
            )
        model.lm_head = torch.nn.Linear(width, values["decoder_vocab_size"], bias=False)
    model.generation_config.update(forced_eos_token_id=None, max_length=None)
    return model.to(device, dtype).eval()


def peer_generate(model: Any, sources: Sources, out: int, beams: int) -> Sources:
    """The best sequences of `generate`, without the start token. Sources are padded on the left, as its users do."""
    longest = max(map(len, sources))
    token_ids = torch.tensor([[PAD_ID] * (longest - len(source)) + source for source in sources], device=model.device)
    with torch.inference_mode():
        found = model.generate(
            token_ids, attention_mask=(token_ids != PAD_ID).long(), num_beams=beams, min_new_tokens=out,
            max_new_tokens=out, do_sample=False, decoder_start_token_id=EOS_ID,
        )  # fmt: skip
    tokens: Sources = found[:, 1:].tolist()
    return tokens


def our_model(name: str, device: torch.device, dtype: torch.dtype, peer: Any) -> IndicTrans2:
    """Our model with the peer's weights, or with random ones."""
    checkpoint = open_checkpoint(name, files="config")
    with torch.device("meta"):
        model = IndicTrans2(checkpoint.config).to(dtype)
    model = model.to_empty(device=device)
    if peer is None:
        fill_dummy_weights(model, checkpoint, seed=1)
    else:
        weights = peer.state_dict()
        for tensor, target in model.checkpoint_tensors().items():
            target.copy_(weights[tensor])
    model.prepare()
    return model


def translate(search: BeamSearch, sources: Sources) -> Sources:
    """What the search finds for sources that all start together."""
    found: dict[Any, list[int]] = {}
    search.add(range(len(sources)), sources)
    while search.num_running:
        found |= {each.key: each.token_ids for each in search.step()}
    return [found[key] for key in range(len(sources))]


def seconds(run: Callable[[], object], reps: int) -> float:
    """The median time of a run, after one that warms up."""
    run()
    times = []
    for _ in range(reps):
        synchronize()
        started = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def step_ms(search: BeamSearch, sources: Sources) -> float:
    """Milliseconds of a step, without the encoder."""
    times = []
    for _ in range(3):
        search.add(range(len(sources)), sources)
        synchronize()
        started, steps = time.perf_counter(), 0
        while search.num_running:
            search.step()
            steps += 1
        # The last call reads what the one before has launched.
        times.append((time.perf_counter() - started) * 1000 / max(1, steps - 1))
    return statistics.median(times)


def profile(model: IndicTrans2, level: int, work: Work, beams: int) -> None:
    """Print the kernels of a search by their time."""
    sources = work._replace(sentences=level).sources(model.config.encoder.vocab_size, seed=1)
    options = BeamOptions(beams, max_new_tokens=work.out, min_new_tokens=work.out)
    search = BeamSearch(model, options, slots=level, max_source=work.high)
    search.capture()
    translate(search, sources)
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profiler:
        translate(search, sources)
    print(f"{level} sentences, {work.out} steps")
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=80), flush=True)


def measure_ours(
    model: IndicTrans2, sources: Sources, work: Work, args: argparse.Namespace
) -> tuple[Sources, list[Row]]:
    """What a search finds, and its rows: the rate first."""
    options = BeamOptions(args.beams, max_new_tokens=work.out, min_new_tokens=work.out)
    graphs = False if args.eager else None
    search = BeamSearch(model, options, slots=len(sources), max_source=work.high, graphs=graphs)
    search.capture()
    found = translate(search, sources)
    if not all(len(tokens) == work.out for tokens in found):
        raise RuntimeError(f"{work}: translations of other lengths came")
    ours_s = seconds(lambda: translate(search, sources), args.reps)
    rows = [Row(work=str(work), unit=RATE, value=len(sources) / ours_s)]
    if len(sources) == 1:
        rows.append(Row(work=str(work), unit=LATENCY, value=ours_s * 1000))
        rows.append(Row(work=str(work), unit=STEP, value=step_ms(search, sources)))
    return found, rows


def measure(model: IndicTrans2, peer: Any, work: Work, args: argparse.Namespace, limits: Limits | None) -> list[Row]:
    beams, reps = args.beams, args.reps
    sources = work.sources(model.config.encoder.vocab_size, seed=args.seed)
    found, rows = measure_ours(model, sources, work, args)
    ours_s = len(sources) / rows[0].value
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if limits:
        least_s = floor_s(model.config, sources, work.out, beams, limits, model.dtype.itemsize)
        rows[0].limit_share = least_s / ours_s
    print(f"{work}: {ours_s * 1000:,.1f} ms", flush=True)
    if peer is None:
        return rows
    try:
        theirs = peer_generate(peer, sources, work.out, beams)
        theirs_s = seconds(lambda: peer_generate(peer, sources, work.out, beams), reps)
    except torch.OutOfMemoryError as error:
        print(f"{work}: the peer ran out of memory: {error}", flush=True)
        return rows
    equal = sum(ours == other for ours, other in zip(found, theirs, strict=True)) / len(sources)
    rows[0].peer, rows[0].peer_value = f"transformers {metadata.version('transformers')}", len(sources) / theirs_s
    rows[0].ratio = theirs_s / ours_s
    print(f"{work}: peer {theirs_s * 1000:,.1f} ms; {equal:.0%} of the sentences have its tokens", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=PUBLISHED, help="Published name, or a folder with a config.json.")
    parser.add_argument("--levels", default="1,64,400,1000", help="Sentences that start together.")
    parser.add_argument("--lengths", default="10:60", help="Tokens of a source, LOW:HIGH.")
    parser.add_argument("--out", type=int, default=35, help="Tokens of every translation.")
    parser.add_argument("--alone", default="30/30", help="One more work of one sentence, IN/OUT.")
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peer", action="store_true", help="Also measure transformers.")
    parser.add_argument("--eager", action="store_true", help="Without CUDA graphs; prints only.")
    parser.add_argument("--profile", default="", help="Only print the kernels of these levels.")
    args = parser.parse_args()
    need_gpu(model=args.model)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    low, high = map(int, args.lengths.split(":"))
    alone_in, alone_out = map(int, args.alone.split("/"))
    works = [Work(1, alone_in, alone_in, alone_out)]
    works += [Work(int(level), low, high, args.out) for level in args.levels.split(",")]
    values = open_checkpoint(args.model, files="config").config
    peer = peer_model(values, device, dtype) if args.peer and not args.profile else None
    model = our_model(args.model, device, dtype, peer)
    if args.profile:
        for level in map(int, args.profile.split(",")):
            profile(model, level, works[-1], args.beams)
        return
    limits = Limits.measure() if device.type == "cuda" else None
    rows = []
    for work in works:
        found = measure(model, peer, work, args, limits)
        for row in found:
            if args.model == PUBLISHED and (row.unit == RATE or work is works[0]):
                row.target = TARGETS[row.unit]
        rows += found
    if args.eager:
        print_table("eager", rows)
        return
    versions = {name: metadata.version(name) for name in ("torch", "triton", "transformers")}
    notes = [f"{args.beams} beams, {str(dtype).removeprefix('torch.')}, random weights, equal output lengths"]
    write_result(rows, versions, notes, subject=args.model, gpus=int(device.type == "cuda"))


if __name__ == "__main__":
    main()
