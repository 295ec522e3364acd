"""Seconds of speech per second that IndicF5 and Vocos make offline, and the time to the first sound, beside f5-tts.

A level of c is c texts of one chunk that start together through the batch engine, with random weights, a reference of
5 s and as much text as takes --seconds to speak. A request's first sound is its only one here: the median of all
requests is quoted, and the rate is that of all. f5-tts (--peer) speaks them one by one, as it does, with the same
sizes and number of steps, in the type that it chooses itself: float16 on a GPU, float32 elsewhere. In bfloat16 its
steps' times would repeat, which torchdiffeq refuses. The share of the limit is that of the matrix operations at the
measured rate.

    pip install --no-deps f5-tts vocos torchdiffeq x-transformers  # and what they import, for --peer
    python benchmarks/synthesis.py --peer
    python benchmarks/synthesis.py --device cpu --threads 4,8,16 --levels 1 --dtype bfloat16
    python benchmarks/synthesis.py --profile      # kernels of the largest level by their time; prints only
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
import types
from importlib import import_module, metadata

import torch
from bench_output import Row, Target, need_gpu, write_result
from floors import Limits

from meltcore.engine.synthesis.engine import SynthesisTask
from meltcore.engine.tasks.batch_engine import BatchEngine
from meltcore.models.configs.task_configs import IndicF5Config
from meltcore.models.tasks.indicf5 import GUIDANCE, SWAY, IndicF5
from meltcore.protocol.synthesis import Synthesize
from meltcore.settings.config import EngineConfig

PUBLISHED = "ai4bharat/IndicF5"
RATE, FIRST = "x real time", "ms to first sound"
FAST_ALONE = Target(3.0, of="ratio")
SOON = {1: Target(250.0, better="lower"), 16: Target(1000.0, better="lower")}
LATENCY_BOUND_S = 3600.0  # offline, no request waits for the end of a batch
GUIDED = 2


def request_text(task: SynthesisTask, voice: str, seconds: float) -> str:
    """Letters without an end of a sentence, as many as take `seconds` at the voice's rate."""
    words = task._voices[voice].text
    size = round(seconds * len(words.text.encode()) / words.seconds)
    return ("letters of words " * size)[:size].strip().ljust(size, "s")


def speak(task: SynthesisTask, requests: list[Synthesize]) -> tuple[float, list[float], int]:
    """The seconds of all requests, those until the first sound of each, and the samples of all."""
    engine = BatchEngine(task, max_start_s=LATENCY_BOUND_S)
    started = time.perf_counter()
    for request in requests:
        engine.add(request)
    firsts: dict[str, float] = {}
    samples = 0
    while engine.has_work:
        for result in engine.step().outputs:
            if result.error is not None:
                raise RuntimeError(result.error)
            firsts.setdefault(result.request_id, time.perf_counter() - started)
            samples += len(result.samples) // 4
    return time.perf_counter() - started, list(firsts.values()), samples


def utterance_flops(config: IndicF5Config, frames: int, num_steps: int) -> float:
    """Operations of the transformer's GEMMs, convolutions and attention for one utterance."""
    size, inner = config.hidden_size, config.num_heads * config.head_size
    layer = 4 * size * inner + 2 * size * config.feed_forward_size + 2 * frames * inner
    once = 2 * size * config.mel.num_mels + 2 * 31 * size * size // 16
    return 2.0 * GUIDED * num_steps * frames * (config.num_layers * layer + once)


def peer_dtype(device: torch.device) -> torch.dtype:
    """The type that f5-tts loads its transformer in."""
    return torch.float16 if device.type == "cuda" else torch.float32


class Peer:
    """f5-tts and vocos with random weights of the same sizes: one utterance after another."""

    def __init__(self, model: IndicF5) -> None:
        """Build it on the model's device, in its own default type. Raises ImportError where a package is missing."""
        package = import_module("f5_tts")
        inner = types.ModuleType("f5_tts.model")  # its __init__ imports what training needs
        inner.__path__ = [f"{path}/model" for path in package.__path__]
        sys.modules.setdefault("f5_tts.model", inner)
        config, vocoder = model.config, model.config.vocoder
        dit = import_module("f5_tts.model.backbones.dit").DiT(
            dim=config.hidden_size, depth=config.num_layers, heads=config.num_heads, dim_head=config.head_size,
            ff_mult=config.feed_forward_size // config.hidden_size, text_dim=config.text_size,
            conv_layers=config.num_text_layers, mel_dim=config.mel.num_mels, text_num_embeds=config.vocab_size,
            text_mask_padding=False, pe_attn_head=1, attn_mask_enabled=False,
        )  # fmt: skip
        flow = import_module("f5_tts.model.cfm").CFM(dit, mel_spec_kwargs={"n_mel_channels": config.mel.num_mels})
        self._flow = flow.to(model.device, peer_dtype(model.device)).eval()
        backbone = import_module("vocos.models").VocosBackbone(
            config.mel.num_mels, vocoder.hidden_size, vocoder.intermediate_size, vocoder.num_layers
        )
        head = import_module("vocos.heads").ISTFTHead(vocoder.hidden_size, config.mel.n_fft, config.mel.hop, "center")
        self._vocoder = torch.nn.Sequential(backbone, head).to(model.device).eval()

    @torch.inference_mode()
    def speak(self, reference: torch.Tensor, token_ids: list[int], frames: int, num_steps: int) -> int:
        """Speak one utterance; returns its samples. reference: [reference frames, num_mels]."""
        text = torch.tensor([token_ids], device=reference.device) - 1
        options = {"cfg_strength": GUIDANCE, "sway_sampling_coef": SWAY, "use_epss": False}
        mels, _ = self._flow.sample(reference[None], text, frames, steps=num_steps, seed=0, **options)
        return len(self._vocoder(mels[:, len(reference) - 1 :].float().transpose(1, 2)).cpu()[0])


def peer_seconds(task: SynthesisTask, request: Synthesize, num_steps: int, reps: int) -> float:
    """The median seconds of the peer for one request, from the reference's spectrogram to samples on the host."""
    peer, voice = Peer(task.model), task._voices[request.voice]
    task.cost(request)
    _, (chunk,) = task._plans.pop(request.request_id)
    with torch.inference_mode():
        reference = task.model.mel_spectrogram(torch.from_numpy(voice.samples).to(task.model.device))
    times = []
    for _ in range(reps + 1):
        started = time.perf_counter()
        peer.speak(reference, chunk.token_ids, chunk.frames, num_steps)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def profile(task: SynthesisTask, requests: list[Synthesize]) -> None:
    """Print the kernels by their time."""
    speak(task, requests)
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profiler:
        speak(task, requests)
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=80), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=PUBLISHED, help="Published name, or a folder with a config.json.")
    parser.add_argument("--levels", default="1,16,64", help="Texts that start together.")
    parser.add_argument("--seconds", type=float, default=10.0, help="Speech of a text.")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--threads", help="Numbers of torch's threads on the CPU, such as 4,8,16. Default: all cores.")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--peer", action="store_true", help="Also measure f5-tts.")
    parser.add_argument("--profile", action="store_true", help="Only print the kernels of the largest level.")
    args = parser.parse_args()
    if args.device == "auto":
        need_gpu(model=args.model)

    is_gpu = args.device == "auto" and torch.cuda.is_available()
    if args.threads and is_gpu:
        parser.error("--threads needs --device cpu")
    device = "cuda" if is_gpu else "cpu"
    task = SynthesisTask(EngineConfig(model=args.model, load_format="dummy", device=device, dtype=args.dtype))
    ready = task.ready()
    voice, text = ready.voices[0], request_text(task, ready.voices[0], args.seconds)
    levels = [int(level) for level in args.levels.split(",")]
    requests = [
        Synthesize(request_id=f"text-{index}", text=text, voice=voice, seed=index, num_steps=args.steps)
        for index in range(max(levels))
    ]
    if args.profile:
        profile(task, requests)
        return
    limits = Limits.measure() if is_gpu else None
    peer_s = peer_seconds(task, requests[0], args.steps, args.reps) if args.peer else None
    versions = {name: metadata.version(name) for name in ("torch", *(("f5-tts", "vocos") if args.peer else ()))}
    rows, notes = [], [f"{ready.dtype}, random weights, {args.steps} steps, {args.seconds:g} s of speech per text"]
    if args.peer:
        notes.append(f"f5-tts in {str(peer_dtype(task.model.device)).removeprefix('torch.')}, one text after another")
    thread_counts = [int(count) for count in (args.threads or "0").split(",")]
    for threads, level in itertools.product(thread_counts, levels):
        if threads:
            torch.set_num_threads(threads)
        speak(task, requests[:level])
        runs = [speak(task, requests[:level]) for _ in range(args.reps)]
        taken_s = statistics.median(run[0] for run in runs)
        audio_s = runs[0][2] / ready.sample_rate
        work = f"{level} text{'s' * (level != 1)}" + f", {threads} thread{'s' * (threads != 1)}" * bool(threads)
        rate = Row(work=work, unit=RATE, value=audio_s / taken_s)
        if peer_s is not None:
            rate.peer, rate.peer_value = f"f5-tts {versions['f5-tts']}", audio_s / level / peer_s
            rate.ratio = rate.value / rate.peer_value
        rate.target = FAST_ALONE if level == 1 and args.model == PUBLISHED and is_gpu else None
        if limits:
            flops = level * utterance_flops(task.model.config, task.cost(requests[0]), args.steps)
            rate.limit_share = flops / limits.flops_per_us / 1e6 / taken_s
        first_ms = 1000 * statistics.median(statistics.median(run[1]) for run in runs)
        target = SOON.get(level) if args.model == PUBLISHED and is_gpu else None
        rows += [rate, Row(work=work, unit=FIRST, value=first_ms, target=target)]
        factor = f"{rate.value:,.2f} x real time (real-time factor {1 / rate.value:,.2f})"
        print(f"{work}: {factor}, {first_ms:,.0f} ms to the first sound", flush=True)
    write_result(rows, versions, notes, subject=args.model, gpus=int(is_gpu))


if __name__ == "__main__":
    main()
