"""
Tokens a second of sample.py, against samplers that read the whole prefix again for each token.

    python tests/bench_sample.py            two cores: about a minute
    python tests/bench_sample.py float32    in another dtype than auto takes

A GPT-2 of 6 layers, 384 wide, with random weights, goes on from <|endoftext|> for 256 tokens: one
sample, then ten at a time. The others are plain: float32, one sample after another, so that ten take
ten times as long. All go forward in turns of 8 tokens, twice over, and the faster of the two times
of a turn counts: what else the machine is doing hits each of them alike, and seldom.
"""
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import sample  # noqa: E402
from train import GPT, GPTConfig, pick_dtype  # noqa: E402

TOKENS, TURN, EOT = 256, 8, 50256
CHOICE = dict(temperature=0.8, top_k=200)
MATRIX_PRODUCTS = "aten::addmm", "aten::mm", "aten::bmm", "mkldnn::_linear_pointwise"


@torch.no_grad()
def recompute(model, logits_everywhere):
    """The prefix again for each token; the output matrix at its last position, or everywhere."""
    idx = torch.tensor([[EOT]])
    while True:
        x = model.hidden(idx)
        logits = model.logits(x if logits_everywhere else x[:, -1:])[:, -1] / CHOICE["temperature"]
        least = logits.topk(CHOICE["top_k"]).values[:, -1:]
        logits[logits < least] = -torch.inf
        token = torch.multinomial(F.softmax(logits, -1), 1)
        idx = torch.cat((idx, token), 1)
        yield token


def ours(model, B):
    return sample.generate(model, [[EOT]] * B, range(B), TOKENS, **CHOICE)


def main():
    torch.manual_seed(0)
    dtype = pick_dtype(sys.argv[1] if len(sys.argv) > 1 else "auto", "cpu")
    plain = GPT(GPTConfig(1024, 50257, 6, 6, 384, 0.0, False)).eval()
    model = GPT(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    sample.cast(model, "cpu", getattr(torch, dtype))
    contestants = {  # name: (rows, what makes its steps)
        "prefix again, as nanoGPT": (1, lambda: recompute(plain, False)),
        "and all its logits": (1, lambda: recompute(plain, True)),
        f"1 sample, {dtype}": (1, lambda: ours(model, 1)),
        f"10 samples, {dtype}": (10, lambda: ours(model, 10))}

    turns = {name: [float("inf")] * (TOKENS // TURN) for name in contestants}
    for _ in range(2):
        steps = {name: start() for name, (_, start) in contestants.items()}
        for turn in range(TOKENS // TURN):
            for name in contestants:
                began = time.perf_counter()
                for _ in range(TURN):
                    next(steps[name])
                seconds = time.perf_counter() - began
                turns[name][turn] = min(turns[name][turn], seconds)

    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'':26}{'tokens/s':>10}{'ms/step':>10}{'times nanoGPT':>16}{'matrix products':>18}")
    first = None
    for name, (rows, start) in contestants.items():
        speed = rows * TOKENS / sum(turns[name])
        first = first or speed
        steps = start()
        for _ in range(TOKENS // 2):
            next(steps)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            next(steps)
        spent = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
        share = sum(spent.get(key, 0) for key in MATRIX_PRODUCTS) / sum(spent.values())
        print(f"{name:26}{speed:10.0f}{1e3 * rows / speed:10.2f}{speed / first:16.1f}{share:18.0%}")


if __name__ == "__main__":
    main()
