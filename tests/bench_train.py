"""
Tokens a second of train.py's real step, against two yardsticks measured in the same run.

    python tests/bench_train.py                    6 layers of 384, gpt2 vocabulary, batch 8 x 256
    python tests/bench_train.py --device=cuda      124M, batch 16 x 1024; about 4 minutes
    python tests/bench_train.py --what=scaling     ms a step against sizes; loader against corpus size
    python tests/bench_train.py --what=loss        ways to compute the output matrix's loss
    python tests/bench_train.py --what=memory      what gradient checkpointing saves, and its price
    python tests/bench_train.py --what=precision   300 steps in bfloat16 and in float32: same curve?

Variants of train.py run as the commands people type, in turn, round after round; a figure is the
median of its rounds. The bare loop is what one writes in an evening: the plain model compiled whole,
bf16 autocast, cross-entropy on float logits, fused AdamW, clip. The ceiling is the matrix products of
a step alone, at their real shapes.
"""
import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import prepare  # noqa: E402
import train  # noqa: E402

SIZES = {"cpu": dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=8),
         "cuda": dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=16)}
V = 50257


def flags(settings):
    return [f"--{key}={value}" for key, value in settings.items()]


def make_data(folder, tokens=2_000_000):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, tokens
    (folder / "data/bench").mkdir(parents=True)
    for name in ("val_000000", "train_000001"):
        ids = np.random.default_rng(0).integers(0, V, tokens, dtype="<u2")
        (folder / f"data/bench/bench_{name}.bin").write_bytes(header.tobytes() + ids.tobytes())


def run_train(folder, size, device, steps, first="", **more):
    """train.py for some steps as a command -> seconds a step (its log's, the first ones left out), peak MB."""
    T, B = size["block_size"], size["batch_size"]
    settings = dict(size, total_batch_size=B * T, max_iters=steps, eval_interval=0, save_interval=0,
                    log_interval=1, warmup_iters=0, dataset="bench", device=device, out_dir="out/bench") | more
    subprocess.run(["rm", "-rf", folder / "out/bench"], check=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [ROOT / "train.py"]
    if first:  # Python to run before it in the same process
        command = ["-c", f"import sys, runpy; sys.path.insert(0, {str(ROOT)!r}); {first}; "
                   f"runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')"]
    done = subprocess.run([sys.executable, *command, *flags(settings)], cwd=folder,
                          capture_output=True, text=True, env={**os.environ, "TIKTOKEN_CACHE_DIR": "/none"})
    if done.returncode:
        sys.exit(done.stderr)
    rows = [json.loads(line) for line in (folder / "out/bench/log.jsonl").open()]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (statistics.median(row["ms"] for row in rows[3:]) / 1000,
            after.ru_maxrss / 1024 if after.ru_maxrss > before.ru_maxrss else float("nan"))


def bare_loop(size, device, steps):
    """Seconds a step of the yardstick, and of a fresh process: this function is its own command."""
    torch.manual_seed(0)
    T, B = size["block_size"], size["batch_size"]
    shape = size["n_layer"], size["n_head"], size["n_embd"]
    model = train.GPT(train.GPTConfig(T, V, *shape, 0.0, False)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)

    def loss_of(x, y):
        with torch.autocast(device, torch.bfloat16):
            logits = F.linear(model.hidden(x), model.transformer.wte.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())

    compiled, times = torch.compile(loss_of), []
    for _ in range(steps):
        batch = torch.randint(0, V, (B, T + 1), device=device)
        begun = time.perf_counter()
        loss = compiled(batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[3:])


def products(size, device, dtype):
    """The matrix products of a step, forward and both of backward, as functions to call."""
    C, T, B, L, H = (size[k] for k in ("n_embd", "block_size", "batch_size", "n_layer", "n_head"))
    N, kw = B * T, dict(device=device, dtype=dtype)
    calls = []
    for n_in, n_out, times in ((C, 3 * C, L), (C, C, L), (C, 4 * C, L), (4 * C, C, L), (C, 50304, 1)):
        x, w, g = torch.randn(N, n_in, **kw), torch.randn(n_out, n_in, **kw), torch.randn(N, n_out, **kw)
        calls += [(lambda x=x, w=w: x @ w.t(), times), (lambda g=g, w=w: g @ w, times),
                  (lambda g=g, x=x: g.t() @ x, times)]
    q, s = torch.randn(B * H, T, C // H, **kw), torch.randn(B * H, T, T, **kw)
    calls += [(lambda: q @ q.transpose(1, 2), 2 * L), (lambda: s @ q, 4 * L)]
    return calls


def ceiling(size, device, dtype):
    """Seconds that the products of one step take alone."""
    total = 0.0
    for call, times in products(size, device, getattr(torch, dtype)):
        call()
        taken = []
        for _ in range(3):
            if device == "cuda":
                torch.cuda.synchronize()
            begun = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - begun)
        total += times * min(taken)
    return total


def throughput(folder, device, rounds):
    size, steps = SIZES[device], 12 if device == "cpu" else 40
    T, B = size["block_size"], size["batch_size"]
    best = train.pick_dtype("auto", device)
    variants = {f"train.py ({best}, compile: the defaults)": {},
                "  freed memory given back to the system":
                    dict(first="import prepare; prepare.keep_freed_memory = lambda: None"),
                "  compile=False": dict(compile=False),
                "  gradient_checkpointing=True": dict(gradient_checkpointing=True),
                "  optimizer=muon": dict(optimizer="muon"),
                "  dtype=" + ("float32" if best != "float32" else "bfloat16"):
                    dict(dtype="float32" if best != "float32" else "bfloat16")}
    times, memory = {name: [] for name in (*variants, "bare loop", "ceiling")}, {}
    for _ in range(rounds):
        for name, more in variants.items():
            seconds, peak = run_train(folder, size, device, steps, **more)
            times[name].append(seconds)
            memory.setdefault(name, peak)
        done = subprocess.run([sys.executable, __file__, "--what=bare", f"--device={device}"],
                              capture_output=True, text=True, check=True)
        times["bare loop"].append(float(done.stdout))
        times["ceiling"].append(ceiling(size, device, best))
    median = {name: statistics.median(t) for name, t in times.items()}
    ours = median[next(iter(variants))]
    print(f"\n| {'step of ' + str(B * T) + ' tokens':46} | ms | tokens/s | of bare loop | of ceiling |")
    print("|---|---|---|---|---|")
    for name, t in median.items():
        print(f"| {name:46} | {1000 * t:.0f} | {B * T / t:,.0f} | {median['bare loop'] / t:.2f} | "
              f"{median['ceiling'] / t:.2f} |")
    print(f"train.py has {median['bare loop'] / ours:.2f} times the bare loop's speed and "
          f"{median['ceiling'] / ours:.2f} of the ceiling's ({best} products)")


def saved_bytes(model, x, y):
    """Bytes that a step's forward keeps for backward, eager, in float32."""
    own, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(x, y)
    del loss
    return sum(kept.values())


def checkpointing(device):
    """What gradient checkpointing saves at batch 16, and its price: forward and backward, compiled."""
    size, compute = SIZES["cpu"], train.pick_dtype("auto", device)
    shape = size["n_layer"], size["n_head"], size["n_embd"]
    models = [train.GPT(train.GPTConfig(size["block_size"], V, *shape, 0.0, again)).train() for again in (False, True)]
    batch = torch.randint(0, V, (16, size["block_size"] + 1))
    x, y = batch[:, :-1], batch[:, 1:]
    plain, again = (saved_bytes(model, x, y) for model in models)
    prepare.keep_freed_memory()
    engines, times = [torch.compile(model, dynamic=False) for model in models], ([], [])
    for turn in range(6):
        for engine, taken in zip(engines, times, strict=True):
            begun = time.perf_counter()
            with torch.autocast(device, getattr(torch, compute), enabled=compute != "float32"):
                loss = engine(x, y)
            loss.backward()
            taken += [time.perf_counter() - begun] * (turn > 0)
    ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
    print(f"\ngradient checkpointing at batch 16: {plain / 1e6:.0f} MB saved for backward become "
          f"{again / 1e6:.0f} MB ({1 - again / plain:.0%} less), forward and backward take {ratio:.2f} times as long "
          f"({compute}, compiled)")


def profile(folder, device):
    """Where an eager step's time goes; eager, because compiled kernels mix what is told apart here."""
    size, compute = SIZES[device], train.pick_dtype("auto", device)
    groups = {"matrix products": ("mm", "bmm", "addmm", "linear"), "cross-entropy": ("log_softmax", "nll_loss"),
              "attention": ("scaled_dot",), "normalization": ("layer_norm",), "GELU": ("gelu",),
              "clipping and AdamW": ("adamw", "foreach", "norm"), "loader": ("loader",)}
    shape = size["n_layer"], size["n_head"], size["n_embd"]
    prepare.keep_freed_memory()
    model = train.GPT(train.GPTConfig(size["block_size"], V, *shape, 0.0, False)).to(device).train()
    optimizer, = train.make_optimizers(model, "adamw", 0.1, (0.9, 0.95))
    data = prepare.Windows(folder / "data/bench", "train", size["block_size"], V)
    context = torch.autocast(device, getattr(torch, compute), enabled=compute != "float32")

    def step(i):
        with torch.profiler.record_function("loader"):
            x, y = data.sample(i * size["batch_size"], size["batch_size"], 0, device)
        with context:
            loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()

    for i in range(5):  # the first ones pay for memory that later ones find
        step(i)
    with torch.profiler.profile() as prof:
        for i in range(5, 9):
            step(i)
    spent = dict.fromkeys((*groups, "the rest: casts, residuals, biases"), 0.0)
    for event in prof.key_averages():
        name = event.key.removeprefix("aten::").removeprefix("_")
        group = next((g for g, keys in groups.items() if any(k in name for k in keys)), list(spent)[-1])
        on_gpu = device == "cuda" and group != "loader"
        if on_gpu and event.device_type != torch.autograd.DeviceType.CPU:
            continue  # a kernel's own row: its time stands at the operator that launched it
        spent[group] += event.self_device_time_total if on_gpu else event.self_cpu_time_total
    print(f"\n| part of an eager step, {compute} | ms | share |\n|---|---|---|")
    for name, t in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"| {name} | {t / 4000:.1f} | {t / sum(spent.values()):.1%} |")


def losses(device):
    """Output matrix and cross-entropy of a step, forward and backward, in several ways."""
    size, dtype = SIZES[device], torch.bfloat16
    N, C = size["batch_size"] * size["block_size"], size["n_embd"]
    x0, w = torch.randn(N, C, device=device, dtype=dtype), 0.02 * torch.randn(50304, C, device=device)
    w[V:] = 0
    w.requires_grad_()
    y, mask = torch.randint(0, V, (N,), device=device), torch.zeros(50304, device=device, dtype=dtype)
    mask[V:] = -torch.inf

    def as_train(x):
        return F.cross_entropy(F.linear(x, w.to(dtype))[:, :V].float(), y)

    def sixteen_bits(x):  # the softmax in bfloat16 as well
        return F.cross_entropy(F.linear(x, w.to(dtype))[:, :V], y)

    def chunks(x):
        nll = (F.cross_entropy(F.linear(part, w.to(dtype))[:, :V].float(), t, reduction="sum")
               for part, t in zip(x.split(N // 8), y.split(N // 8), strict=True))
        return sum(nll) / N

    def torchs_own(x):
        return F.linear_cross_entropy(x, w.to(dtype), y, linear_bias=mask,
                                      options=torch.nn.LinearCrossEntropyOptions())

    def products(x):
        g = torch.ones(N, 50304, device=device, dtype=dtype)
        torch.autograd.backward(F.linear(x, w.to(dtype)), g)
        return g[0, 0]

    ways = {"as train.py, compiled": torch.compile(as_train), "as train.py, eager": as_train,
            "softmax in bfloat16, compiled": torch.compile(sixteen_bits),
            "eight chunks, compiled": torch.compile(chunks),
            "torch's linear_cross_entropy, its chunks": torchs_own, "the three products alone": products}
    prepare.keep_freed_memory()
    want, times = as_train(x0).item(), {name: [] for name in ways}
    for turn in range(4):
        for name, way in ways.items():
            x = x0.clone().requires_grad_()
            w.grad, begun = None, time.perf_counter()
            loss = way(x)
            if way is not products:
                loss.backward()
            loss = loss.item()
            times[name] += [(time.perf_counter() - begun, loss)] * (turn > 0)
    print(f"\n| {N} x {C} by 50304, bfloat16 | ms | loss off by |\n|---|---|---|")
    for name, taken in times.items():
        off = f"{abs(taken[0][1] - want):.0e}" if ways[name] is not products else ""
        print(f"| {name} | {1000 * statistics.median(t for t, _ in taken):.0f} | {off} |")


def precision(folder):
    """300 steps on Python's documentation: bfloat16 against float32, and float32 with another seed."""
    recipe = ROOT / "config/quickstart.py"
    subprocess.run([sys.executable, ROOT / "prepare.py", recipe], cwd=folder, check=True, capture_output=True)
    runs = {"float32": {}, "bfloat16": dict(dtype="bfloat16"), "float32, another seed": dict(seed=7)}
    curves = {}
    for name, more in runs.items():
        settings = dict(dtype="float32", max_iters=300, log_interval=1, eval_interval=300, save_interval=0,
                        out_dir="out/" + name.replace(" ", "-"), tracker="") | more
        subprocess.run([sys.executable, ROOT / "train.py", recipe, *flags(settings)], cwd=folder, check=True,
                       capture_output=True)
        rows = [json.loads(line) for line in (folder / settings["out_dir"] / "log.jsonl").open()]
        curves[name] = ([row["loss"] for row in rows if "loss" in row], rows[-1]["val_loss"])
    print("\n| 300 steps of the quickstart | val loss | mean difference of a step's loss from float32 |")
    print("|---|---|---|")
    for name, (curve, val) in curves.items():
        away = statistics.mean(abs(a - b) for a, b in zip(curve, curves["float32"][0], strict=True))
        print(f"| {name} | {val:.4f} | {away:.4f} |")


def scaling(folder, device):
    base = SIZES[device]
    print("\n| changed | ms a step |\n|---|---|")
    for key, values in (("batch_size", (2, 4, 8, 16)), ("block_size", (64, 128, 256, 512)), ("n_layer", (2, 4, 6, 12))):
        for value in values:
            seconds, _ = run_train(folder, base | {key: value}, device, 8, compile=False)
            print(f"| {key} {value} | {1000 * seconds:.0f} |")
    print("\n| tokens in the corpus | loader, microseconds a batch of 8 x 256 |\n|---|---|")
    for exponent in range(6, 12):
        with tempfile.TemporaryDirectory(dir=folder) as corpus:
            shards = max(1, 10**exponent // 10**8)
            header = np.zeros(256, "<i4")
            header[:3] = 20240520, 1, 10**exponent // shards
            for i in range(shards):  # sparse: they take no room on the disk
                with open(f"{corpus}/x_train_{i:06}.bin", "wb") as f:
                    f.write(header.tobytes())
                    f.truncate(1024 + 2 * (10**exponent // shards))
            data, taken = prepare.Windows(corpus, "train", 256, V), []
            for i in range(300):
                begun = time.perf_counter()
                data.sample(8 * i, 8, 0)
                taken.append(time.perf_counter() - begun)
            print(f"| 10^{exponent} | {1e6 * statistics.median(taken):.0f} |")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--what", default="all", choices=["all", "throughput", "profile", "memory", "scaling",
                                                             "loss", "precision", "bare"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.what == "bare":
        print(bare_loop(SIZES[args.device], args.device, 12))
        return
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch "
          f"{torch.__version__}" + (f", {torch.cuda.get_device_name()}" if args.device == "cuda" else ""))
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder))
        if args.what in ("all", "throughput"):
            throughput(Path(folder), args.device, args.rounds)
        if args.what in ("all", "profile"):
            profile(Path(folder), args.device)
        if args.what in ("all", "memory") and args.device == "cpu":
            checkpointing(args.device)
        if args.what == "scaling":
            scaling(Path(folder), args.device)
        if args.what == "loss":
            losses(args.device)
        if args.what == "precision":
            precision(Path(folder))


if __name__ == "__main__":
    main()
