"""
Tokens a second of sample.py, against samplers that read the whole prefix again for each token.

    python tests/bench_sample.py                two cores: about two minutes
    python tests/bench_sample.py float32 1      another dtype than auto takes, another prompt length

A GPT-2 of 6 layers, 384 wide, with random weights, goes on from a prompt of 64 tokens for 256: one
sample, then ten at a time. The others are plain, in float32, one sample after another, so that ten
take ten times as long. One gets logits for the last position only (as nanoGPT does), the other for
all (as build-nanogpt). All go forward in turns of 8 tokens, twice over, and the faster of the two
times of a turn counts: what else the machine does hits them alike, and seldom.
"""
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import sample  # noqa: E402
from train import GPT, GPTConfig, pick_dtype  # noqa: E402

TOKENS, TURN = 256, 8
CHOICE = dict(temperature=0.8, top_k=200)
MATRIX_PRODUCTS = "aten::addmm", "aten::mm", "aten::bmm", "mkldnn::_linear_pointwise"


@torch.no_grad()
def recompute(model, prompt, logits_everywhere):
    """The prefix again for each token; the output matrix at its last position, or everywhere."""
    idx = torch.tensor([prompt])
    while True:
        x = model.hidden(idx)
        logits = model.logits(x if logits_everywhere else x[:, -1:])[:, -1] / CHOICE["temperature"]
        least = logits.topk(CHOICE["top_k"]).values[:, -1:]
        logits[logits < least] = -torch.inf
        token = torch.multinomial(F.softmax(logits, -1), 1)
        idx = torch.cat((idx, token), 1)
        yield token


def ours(model, prompt, B):
    return sample.generate(model, [prompt] * B, range(B), TOKENS, **CHOICE)


def main():
    torch.manual_seed(0)
    dtype, length = sys.argv[1:] if len(sys.argv) == 3 else ("auto", 64)
    dtype = pick_dtype(dtype, "cpu")
    prompt = torch.randint(50257, (int(length),)).tolist()
    plain = GPT(GPTConfig(1024, 50257, 6, 6, 384, 0.0, False)).eval()
    model = GPT(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    sample.cast(model, "cpu", getattr(torch, dtype))
    contestants = {  # name: (rows, what makes its steps)
        "prefix again, last logits": (1, lambda: recompute(plain, prompt, False)),  # nanoGPT
        "prefix again, all logits": (1, lambda: recompute(plain, prompt, True)),  # build-nanogpt
        f"1 sample, {dtype}": (1, lambda: ours(model, prompt, 1)),
        f"10 samples, {dtype}": (10, lambda: ours(model, prompt, 10))}

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

    speeds = []
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, prompt of {length}")
    print(f"{'':27}{'tokens/s':>9}{'ms/step':>9}{'times last':>12}{'times all':>11}"
          f"{'matrix products':>17}")
    for name, (rows, start) in contestants.items():
        speeds.append(rows * TOKENS / sum(turns[name]))
        last, all_ = speeds[-1] / speeds[0], speeds[-1] / speeds[min(1, len(speeds) - 1)]
        steps = start()
        for _ in range(TOKENS // 2):
            next(steps)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            next(steps)
        spent = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
        share = sum(spent.get(key, 0) for key in MATRIX_PRODUCTS) / sum(spent.values())
        print(f"{name:27}{speeds[-1]:9.0f}{1e3 * rows / speeds[-1]:9.2f}{last:12.1f}{all_:11.1f}"
              f"{share:17.0%}")


if __name__ == "__main__":
    main()
