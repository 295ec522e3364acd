"""Training for a given time: the learning rate falls to zero as the time ends."""

from __future__ import annotations

import time

import torch
from bundled_data import Packed, PageCurriculum, TrainingStream, pack
from bundled_model import Trainee
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from meltcore.measure.problems import generate

_PEAK_RATE = 3e-3
_WARM_UP = 0.02
_REPORT_EVERY_S = 30.0
_CLIP = 1.0


def train(
    trainee: Trainee,
    tokenizer: Tokenizer,
    *,
    minutes: float,
    tokens: int,
    workers: int,
    seed: int,
    pages: PageCurriculum,
) -> None:
    """Train in place for `minutes`, in steps of about `tokens` tokens; print loss and held-out accuracy as it goes."""
    device = trainee.device
    progress = torch.zeros(1).share_memory_()
    stream = TrainingStream(tokenizer, tokens=tokens, seed=seed, progress=progress, pages=pages)
    batches = iter(DataLoader(stream, batch_size=None, num_workers=workers, pin_memory=device.type == "cuda"))
    checks = _held_out(tokenizer, seed)
    optimizers = _optimizers(trainee.model)
    began = reported = time.monotonic()
    step, seen = 0, 0
    while (elapsed := (time.monotonic() - began) / (60 * minutes)) < 1:
        progress[0] = elapsed
        rate = _PEAK_RATE * min(1.0, elapsed / _WARM_UP) * (1 - elapsed)
        batch = next(batches).to(device)
        loss = _step(trainee, batch, optimizers, rate)
        step, seen = step + 1, seen + len(batch.ids)
        if time.monotonic() - reported > _REPORT_EVERY_S:
            reported = time.monotonic()
            shares = ", ".join(f"{kind} {exact(trainee, check.to(device)):.2%}" for kind, check in checks.items())
            print(
                f"{reported - began:5.0f} s  step {step}  {seen / 1e6:.0f} M tokens  loss {loss.item():.4f}  {shares}",
                flush=True,
            )


@torch.no_grad()
def exact(trainee: Trainee, batch: Packed) -> float:
    """Return the fraction of conversations whose whole answer is the greedy one, token by token."""
    with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=batch.ids.is_cuda):
        wrong = trainee.answer_logits(batch)[0].argmax(-1) != batch.targets
    count = len(batch.starts) - 1
    return float(
        (torch.zeros(count, device=wrong.device).index_add(0, batch.owners, wrong.float()) == 0).float().mean()
    )


def _step(trainee: Trainee, batch: Packed, optimizers: list[torch.optim.Optimizer], rate: float) -> torch.Tensor:
    with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=batch.ids.is_cuda):
        logits, further = trainee.answer_logits(batch)
    losses = cross_entropy(logits.float(), batch.targets, reduction="none")
    loss = (losses * batch.weights).sum() / batch.weights.sum()
    (loss + further).backward()
    torch.nn.utils.clip_grad_norm_(trainee.model.parameters(), _CLIP)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def _optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for all else, including experts; one learning rate suits both."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
    others = [p for _, p in named if all(p is not matrix for matrix in matrices)]
    return [
        torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0, fused=others[0].is_cuda),
    ]


def _held_out(tokenizer: Tokenizer, seed: int) -> dict[str, Packed]:
    mixed = generate("heldout", kind="mixed", num_problems=400, seed=seed + 1)
    return {
        "short": pack(tokenizer, generate("heldout", kind="short", num_problems=400, seed=seed + 1)),
        "medium": pack(tokenizer, [each for each in mixed if each.kind == "medium"]),
        "long": pack(tokenizer, [each for each in mixed if each.kind == "long"]),
    }
