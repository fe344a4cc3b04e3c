"""
Muon against AdamW: after what share of AdamW's steps has Muon AdamW's final val loss?

    python tests/bench_muon.py books.parquet fineweb_sample.parquet           two cores: over an hour

Both train the same model from the same weights on the same batches, with the same warm-up, cosine and
weight decay, at three learning rates or more around each one's best, which counts. The corpus
is the same number of characters of each file, in pieces of 5,000, shuffled. The runs are train.py's,
one core each, as many at a time as there are cores; killed, the same command goes on.
"""
import argparse
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
MODEL = dict(n_layer=13, n_head=4, n_embd=256, block_size=128, batch_size=4, total_batch_size=4 * 128)
RUN = dict(dataset="muon", warmup_iters=100, eval_interval=100, eval_tokens=16384, save_interval=300,
           keep_checkpoints=1, log_interval=25, init_from="auto")


def make_corpus(paths, folder):
    texts = [pq.read_table(path, columns=["text"])["text"].to_pylist() for path in paths]
    same, pieces = min(sum(map(len, text)) for text in texts), []
    for text in texts:
        joined = "\n\n".join(text)[:same]
        pieces += [joined[i:i + 5000] for i in range(0, same, 5000)]
    random.Random(0).shuffle(pieces)
    with open(folder / "muon.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": piece}) + "\n" for piece in pieces)
    subprocess.run([sys.executable, ROOT / "prepare.py", "--dataset=muon", "--source=muon.jsonl",
                    "--val_tokens=200000"], cwd=folder, check=True)


def train(folder, name, **settings):
    """One run of train.py -> its rows of the log."""
    flags = [f"--{key}={value}" for key, value in (MODEL | RUN | settings).items()]
    with open(folder / f"{name}.txt", "a", encoding="utf-8") as terminal:
        subprocess.run([sys.executable, ROOT / "train.py", *flags, f"--out_dir=out/{name}"], cwd=folder,
                       env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=terminal, stderr=terminal,
                       check=True)
    return [json.loads(line) for line in open(folder / f"out/{name}/log.jsonl", encoding="utf-8")]


def reached(rows, loss):
    """The step at which the val losses pass below loss, between two evaluations by their line."""
    before = None
    for row in rows:
        if "val_loss" in row:
            if row["val_loss"] <= loss:
                step, then = before
                return step + (row["step"] - step) * (then - loss) / (then - row["val_loss"])
            before = row["step"], row["val_loss"]
    return float("nan")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", help=".parquet files with a column text")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--adamw", default="5e-4,1e-3,2e-3,4e-3", help="learning rates")
    parser.add_argument("--muon", default="1e-3,2e-3,4e-3", help="learning rates")
    parser.add_argument("--out", type=Path, default=Path("out/muon"), help="folder for the runs")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not list(args.out.glob("data/muon/*_train_*.bin")):
        make_corpus(args.texts, args.out)
    pool, runs = ThreadPoolExecutor(os.cpu_count()), {}
    for optimizer in ("adamw", "muon"):
        for rate in map(float, getattr(args, optimizer).split(",")):
            runs[optimizer, rate] = pool.submit(
                train, args.out, f"{optimizer}-{rate}", optimizer=optimizer, learning_rate=rate,
                min_lr=rate / 10, max_iters=args.steps)
    runs = {key: run.result() for key, run in runs.items()}
    final = {key: [row for row in rows if "val_loss" in row][-1]["val_loss"] for key, rows in runs.items()}
    best = {name: min((loss, rate) for (n, rate), loss in final.items() if n == name)
            for name in ("adamw", "muon")}
    print("| learning rate | AdamW | Muon |\n|---|---|---|")
    for rate in sorted({rate for _, rate in runs}):
        cells = (f"{final[name, rate]:.3f}" if (name, rate) in final else "" for name in ("adamw", "muon"))
        print(f"| {rate:g} | {' | '.join(cells)} |")
    step = reached(runs["muon", best["muon"][1]], best["adamw"][0])
    print(f"Muon (lr {best['muon'][1]:g}) has AdamW's final {best['adamw'][0]:.3f} (lr {best['adamw'][1]:g}) "
          f"after {step:.0f} of {args.steps} steps: {step / args.steps:.0%}")


if __name__ == "__main__":
    main()
