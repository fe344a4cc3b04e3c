"""
Tokens a second of sample.py, against a sampler that reads the whole prefix again for each token.

    python tests/bench_sample.py            two cores: about a minute
    python tests/bench_sample.py float32    in another dtype than auto takes

A GPT-2 of 6 layers, 384 wide, with random weights, goes on from <|endoftext|> for 256 tokens, once
and ten at a time. The other one is nanoGPT's way: float32, one sample after another, so that its
speed for ten is its speed for one. All go forward in turns of 32 tokens: what else the machine is
doing slows each of them alike.
"""
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import sample  # noqa: E402
from train import GPT, GPTConfig, pick_dtype  # noqa: E402

TOKENS, TURN, EOT = 256, 32, 50256
CHOICE = dict(temperature=0.8, top_k=200)
MATRIX_PRODUCTS = "aten::addmm", "aten::mm", "aten::bmm", "mkldnn::_linear_pointwise"


@torch.no_grad()
def recompute(model):
    """The plain sampler: the prefix again for each token, output matrix for the last position only."""
    idx = torch.tensor([[EOT]])
    for _ in range(TOKENS):
        logits = model.logits(model.hidden(idx)[:, -1]) / CHOICE["temperature"]
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
    plain = GPT(GPTConfig(1024, 50257, 6, 6, 384)).eval()
    model = GPT(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    sample.cast(model, "cpu", getattr(torch, dtype))

    names = "prefix again, float32", f"1 sample, {dtype}", f"10 samples, {dtype}"
    rows = 1, 1, 10
    seconds = [0.0] * 3
    for warm in (True, False):
        contestants = recompute(plain), ours(model, 1), ours(model, 10)
        for _ in range(1 if warm else TOKENS // TURN):
            for i, steps in enumerate(contestants):
                began = time.perf_counter()
                for _ in range(TURN):
                    next(steps)
                seconds[i] += 0 if warm else time.perf_counter() - began
    speeds = [TOKENS * B / s for B, s in zip(rows, seconds)]

    shares = [None]
    for B in rows[1:]:
        steps = ours(model, B)
        next(steps)  # the prompt
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(TURN):
                next(steps)
        times = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
        shares.append(sum(times.get(key, 0) for key in MATRIX_PRODUCTS) / sum(times.values()))

    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {TOKENS} tokens a sample")
    print(f"{'':24}{'tokens/s':>10}{'times':>8}{'ms/token':>10}{'matrix products':>18}")
    for name, B, speed, share in zip(names, rows, speeds, shares):
        print(f"{name:24}{speed:10.0f}{speed / speeds[0]:8.1f}{1e3 * B / speed:10.2f}"
              + (f"{share:18.0%}" if share else ""))


if __name__ == "__main__":
    main()
