"""
hellaswag.py against the plain way: one example at a time, four padded rows with all logits.

    python tests/bench_eval.py hellaswag_val.jsonl             500 rows, two to four minutes
    python tests/bench_eval.py hellaswag_val.jsonl --rows=100  shorter

Both score the same rows with the same model, a random GPT-2 of 6 layers, 384 wide, 6 heads, gpt2's
vocabulary and block_size 1024 (with rows of 30 to 300 tokens its length costs nothing). They take
turns, a part of the rows each, so that what else the machine does meets both. Not on the clock:
loading, tokenizing, one warm-up of each. "products" is the share of the profiled time in the linear
layers and the output matrix.
"""
import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import hellaswag  # noqa: E402
from prepare import load_tokenizer  # noqa: E402
from train import load_model, pick_dtype  # noqa: E402

PARTS = 4  # turns that each takes


@torch.no_grad()
def plain(model, examples):
    """(n, 4) losses by transformers in float32: four rows padded to one length, all logits."""
    losses = []
    for example in examples:
        rows = [example.context + ids for ids in example.endings]
        T, c = max(map(len, rows)), len(example.context)
        idx, scored = torch.zeros(4, T, dtype=torch.long), torch.zeros(4, T)
        for i, row in enumerate(rows):
            idx[i, :len(row)] = torch.tensor(row)
            scored[i, c:len(row)] = 1
        logits = model(idx).logits[:, :-1].contiguous()
        nll = F.cross_entropy(logits.flatten(0, 1), idx[:, 1:].flatten(), reduction="none")
        losses.append((nll.view(4, -1) * scored[:, 1:]).sum(-1))
    return torch.stack(losses).double()


def packed(directory, dtype, compile):
    """hellaswag.py's evaluate() on the model in directory, set up as its main() does."""
    model = load_model(directory)
    for module in (model.transformer.wte, *model.transformer.h.modules()):
        if isinstance(module, (torch.nn.Embedding, torch.nn.Linear)):
            module.to(getattr(torch, dtype))
    options = {}
    if compile:
        options["logsumexp"] = torch.compile(hellaswag.logsumexp, dynamic=True)

    def evaluate(examples):
        with torch.autocast("cpu", getattr(torch, dtype), dtype != "float32"):
            return hellaswag.evaluate(model, examples, **options)
    return evaluate


def share_of_products(evaluate, examples):
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        evaluate(examples)
    events = profiled.key_averages()
    products = ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise")
    total = sum(event.self_cpu_time_total for event in events)
    return sum(event.self_cpu_time_total for event in events if event.key in products) / total


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="rows of HellaSwag, .jsonl")
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's choice")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    auto = pick_dtype("auto", "cpu")
    examples = hellaswag.load(args.data, load_tokenizer("gpt2"), 1024, limit=args.rows)
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        shape = dict(n_layer=6, n_embd=384, n_head=6, initializer_range=0.1)
        GPT2LMHeadModel(GPT2Config(**shape)).save_pretrained(directory)
        reference = GPT2LMHeadModel.from_pretrained(directory).eval()
        runs = {"plain, float32": lambda part: plain(reference, part)}
        for dtype in dict.fromkeys((auto, "float32")):
            for compile in (False, True):
                name = f"hellaswag.py, {dtype}" + " (auto)" * (dtype == auto)
                runs[name + ", compiled" * compile] = packed(directory, dtype, compile)

    parts = [examples[i::PARTS] for i in range(PARTS)]
    seconds = dict.fromkeys(runs, 0.0)
    losses = {name: [] for name in runs}
    for run in runs.values():
        run(parts[0][:4])
    for part in parts:
        for name, run in runs.items():
            began = time.perf_counter()
            losses[name].append(run(part))
            seconds[name] += time.perf_counter() - began

    print(f"\n{len(examples)} examples, {torch.get_num_threads()} threads, {torch.__version__}")
    print(f"{'':42} examples/s  times plain  products  same choice  largest loss difference")
    want = torch.cat(losses["plain, float32"])
    for name, run in runs.items():
        got = torch.cat(losses[name])
        same = (got.argmin(-1) == want.argmin(-1)).double().mean()
        print(f"{name:42} {len(examples) / seconds[name]:10.1f} "
              f"{seconds['plain, float32'] / seconds[name]:12.2f} "
              f"{share_of_products(run, parts[0][:40]):9.0%} {same:12.1%} "
              f"{(got - want).abs().max():12.1e}")


if __name__ == "__main__":
    main()
