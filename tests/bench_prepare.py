"""
prepare.py against the tokenizer's own speed, in one interleaved run: minutes of two cores.

    python tests/bench_prepare.py FILE.parquet [--repeat=4] [--rounds=3]

(a) prepare.py with 2 threads, from Parquet (the file, repeat times) to synced shards
(b) bare tiktoken in two processes, the same texts in memory, nothing written: the ceiling
(c) a pool of two workers that maps encode_ordinary over the rows of datasets, 16 a chunk, and sends
    arrays back into one buffer, as public scripts do; nothing written

All clocks start when imports are done, processes up and tokenizers loaded: for (a) when it opens
the source. CPU seconds are those of all threads and processes over the same time: on a machine that
is shared they are the steadier measure.
"""
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

os.environ["USE_TORCH"] = "0"  # else datasets imports torch
REPO = Path(__file__).resolve().parent.parent
ENCODING = None  # a worker's

# run by (a) in a process of its own, so that its memory is its own
COMMAND = """
import json, os, resource, sys, time
sys.path.insert(0, sys.argv.pop(1))
import datasets, tiktoken, tqdm, prepare
open_source = prepare.open_source
def opening(*args):
    global start, cpu
    start, cpu = time.time(), time.process_time()
    return open_source(*args)
prepare.open_source = opening
prepare.main()
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on Linux the parent's where larger
if os.path.exists("/proc/self/status"):
    used = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0]
used = int(used) / (2**20 if sys.platform == "darwin" else 2**10)
print(json.dumps([time.time() - start, time.process_time() - cpu, used]))
"""


def load():
    global ENCODING
    import tiktoken
    ENCODING = tiktoken.get_encoding("gpt2")


def bare(texts, begin, end):
    load()
    begin.wait()
    cpu = time.process_time()
    for text in texts:
        ENCODING.encode_to_numpy(text, disallowed_special=())
    end.put(time.process_time() - cpu)


def ordinary(row):
    tokens = [ENCODING.eot_token]
    tokens.extend(ENCODING.encode_ordinary(row["text"]))
    tokens = np.array(tokens)
    assert (0 <= tokens).all() and (tokens < 2**16).all()
    return tokens.astype(np.uint16)


def run_prepare(files, folder):
    command = [sys.executable, "-c", COMMAND, str(REPO), f"--source={files}/*.parquet",
               "--num_proc=2", f"--dataset={folder}", "--tokenizer=gpt2",
               "--shard_size=10000000", "--val_tokens=10000000"]  # so that some are written
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, encoding="utf-8", check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run_bare(texts, repeat):
    context = multiprocessing.get_context("fork")  # the texts are there without being sent
    begin, end = context.Barrier(3), context.Queue()
    halves = texts[0::2] * repeat, texts[1::2] * repeat
    workers = [context.Process(target=bare, args=(half, begin, end)) for half in halves]
    for worker in workers:
        worker.start()
    begin.wait()
    start = time.time()
    cpu = sum(end.get() for _ in workers)
    seconds = time.time() - start
    for worker in workers:
        worker.join()
    return seconds, cpu


def run_pool(files):
    import datasets
    rows = datasets.load_dataset("parquet", data_files=f"{files}/*.parquet", split="train",
                                 streaming=True)
    shard, filled = np.empty(10**7, np.uint16), 0
    with multiprocessing.get_context("fork").Pool(2, load) as pool:
        pool.map(ordinary, [{"text": "warm"}] * 64)
        start, before = time.time(), os.times()
        for tokens in pool.imap(ordinary, rows, chunksize=16):
            if filled + len(tokens) > len(shard):
                filled = 0
            shard[filled:filled + len(tokens)] = tokens
            filled += len(tokens)
        seconds, own = time.time() - start, os.times()
        pool.close()
        pool.join()
    after = os.times()  # holds the workers' once they are joined
    cpu = own.user + own.system - before.user - before.system
    cpu += after.children_user - before.children_user
    return seconds, cpu + after.children_system - before.children_system


def main():
    options = dict(word.lstrip("-").split("=") for word in sys.argv[1:] if word.startswith("--"))
    repeat, rounds = int(options.get("repeat", 4)), int(options.get("rounds", 3))
    paths = [word for word in sys.argv[1:] if not word.startswith("--")]
    if not paths:
        sys.exit(__doc__)
    import pyarrow.parquet
    import tiktoken
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python "
          f"{platform.python_version()}, tiktoken {tiktoken.__version__}; medians of {rounds}\n")
    print("| file | text | (a) prepare.py | (b) ceiling | (c) plain pool | a/b | a/c | memory |")
    print("|---|---|---|---|---|---|---|---|")
    for path in paths:
        texts = pyarrow.parquet.read_table(path, columns=["text"])["text"].to_pylist()
        size = sum(len(text.encode("utf-8")) for text in texts) * repeat / 1e6
        times = {"a": [], "b": [], "c": []}
        memory = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                files = Path(folder, "files")
                files.mkdir()
                for i in range(repeat):
                    (files / f"{i}.parquet").symlink_to(Path(path).resolve())
                *clock, used = run_prepare(files, Path(folder, "set"))
                times["a"].append(clock)
                memory.append(used)
                times["b"].append(run_bare(texts, repeat))
                times["c"].append(run_pool(files))
        for i, unit in enumerate(("MB/s", "MB per CPU second")):
            a, b, c = (size / statistics.median(clock[i] for clock in times[key]) for key in "abc")
            print(f"| {Path(path).name} | {size:.0f} MB | {a:.1f} {unit} | {b:.1f} | {c:.1f} | "
                  f"{a / b:.2f} | {a / c:.2f} | {max(memory):.0f} MB |", flush=True)


if __name__ == "__main__":
    main()
