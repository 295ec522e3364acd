"""Embeddings per second of our engine against transformers' BertModel in the same process, dtype and batch size.

Both get token ids and return vectors on the host, so tokenizers are left out. The peer does what sentence-transformers
does: texts are sorted by length, batches are padded to their longest text, and hidden states are pooled on the GPU.
Weights are random, in the shapes of all-MiniLM-L6-v2. The limit counts GEMMs at the GPU's measured rate.

    python benchmarks/embeddings.py [--dtype float16] [--texts 16384]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import torch
from bench_output import Row, Target, write_result

from meltcore.engine.embedding.engine import EmbeddingTask
from meltcore.engine.tasks.batch_engine import BatchEngine
from meltcore.models.loader import TORCH_DTYPES
from meltcore.protocol.embedding import Embed
from meltcore.settings.config import EngineConfig

HIDDEN, FFN, LAYERS, VOCAB, POSITIONS = 384, 1536, 6, 30_522, 512
CONFIG = {
    "architectures": ["BertModel"], "model_type": "bert", "hidden_size": HIDDEN, "intermediate_size": FFN,
    "num_hidden_layers": LAYERS, "num_attention_heads": 12, "vocab_size": VOCAB,
    "max_position_embeddings": POSITIONS, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
}  # fmt: skip
LENGTHS = {"128 tokens": (128, 128), "16 to 512 tokens": (16, 512)}
TARGETS = {"128 tokens": 1.2, "16 to 512 tokens": 2.0}
BATCH = 256  # texts of a batch of the peer
ARRIVALS = 256  # texts that come between two steps of ours
TFLOPS = 790.0  # GEMMs of an H200 in 16 bits, as floors.py has them
PASSES = 3


MODULES = [
    {"type": f"sentence_transformers.models.{name}", "path": path}
    for name, path in (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
]


def write_checkpoint(folder: Path) -> None:
    """Write the files of a checkpoint without weights, which pools by the mean and normalizes."""
    (folder / "1_Pooling").mkdir()
    for name, content in (
        ("config.json", CONFIG),
        ("modules.json", MODULES),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True}),
    ):
        (folder / name).write_text(json.dumps(content))


def make_texts(count: int, lengths: tuple[int, int]) -> list[bytes]:
    """Random token ids of each text, int32."""
    rng = random.Random(7)
    sizes = [rng.randint(*lengths) for _ in range(count)]
    return [torch.randint(4, VOCAB, (size,), dtype=torch.int32).numpy().tobytes() for size in sizes]


def ours(task: EmbeddingTask, texts: list[bytes]) -> float:
    """Seconds for all texts through the batch engine, which forms its own batches.

    Texts arrive between steps, as at a server, ARRIVALS at a time until all are there.
    """
    engine: BatchEngine[Embed, object] = BatchEngine(task)  # type: ignore[arg-type]
    started = time.perf_counter()
    for index, token_ids in enumerate(texts):
        engine.add(Embed(request_id=str(index), token_ids=token_ids))
        if index % ARRIVALS == ARRIVALS - 1:
            engine.step()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started


def theirs(model: torch.nn.Module, texts: list[bytes]) -> float:
    """Seconds for all texts in batches of BATCH, sorted by length and padded to the longest of a batch."""
    started = time.perf_counter()
    rows = sorted((torch.frombuffer(bytearray(text), dtype=torch.int32) for text in texts), key=len, reverse=True)
    with torch.inference_mode():
        for first in range(0, len(rows), BATCH):
            part = rows[first : first + BATCH]
            ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True).long().cuda()
            mask = (torch.arange(ids.shape[1])[None] < torch.tensor([len(row) for row in part])[:, None]).cuda()
            states = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state.float()
            pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            torch.nn.functional.normalize(pooled, dim=1).cpu()
    return time.perf_counter() - started


def flops(texts: list[bytes]) -> float:
    """Operations of the GEMMs of all texts."""
    sizes = [len(text) // 4 for text in texts]
    linear = 2 * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * FFN) * sum(sizes)
    return LAYERS * (linear + 4 * HIDDEN * sum(size * size for size in sizes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--texts", type=int, default=16_384)
    args = parser.parse_args()
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        task = EmbeddingTask(EngineConfig(model=folder, load_format="dummy", dtype=args.dtype, device="cuda"))
        sizes = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type")}
        peer = (
            transformers.BertModel(transformers.BertConfig(**sizes), add_pooling_layer=False)
            .to("cuda", TORCH_DTYPES[args.dtype])
            .eval()
        )
    rows = []
    for name, lengths in LENGTHS.items():
        texts = make_texts(args.texts, lengths)
        ours(task, texts[:512]), theirs(peer, texts[:512])  # warm up
        seconds = [(ours(task, texts), theirs(peer, texts)) for _ in range(PASSES)]
        own, other = (len(texts) / min(each) for each in zip(*seconds, strict=True))
        limit = TFLOPS * 1e12 * len(texts) / flops(texts)
        rows.append(
            Row(
                work=f"all-MiniLM-L6-v2's shapes, {args.dtype}, {name}",
                unit="embeddings/s",
                value=own,
                peer="transformers",
                peer_value=other,
                ratio=own / other,
                target=Target(TARGETS[name], of="ratio"),
                limit_share=own / limit,
            )
        )
        print(name, f"{own:,.0f} {other:,.0f} {own / other:.2f} of limit {own / limit:.2f}", seconds, flush=True)
    versions = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    write_result(rows, versions, subject="all-MiniLM-L6-v2")


if __name__ == "__main__":
    main()
