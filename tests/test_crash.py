"""SIGKILL at random moments, a full disk, signals: what a run leaves is always good to go on from."""
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from test_train import ROOT, TINY, assert_same_run, run, toy, weights, write_shard  # noqa: F401

import prepare

EVERY = (*TINY, "--save_interval=1", "--eval_interval=5", "--max_iters=30", "--init_from=auto")


@pytest.mark.parametrize("kills", [4, pytest.param(25, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_ends_as_if_it_had_not_been(toy, kills):  # noqa: F811
    assert run(*EVERY, "--out_dir=whole") == 0
    rng, killed = random.Random(kills), 0
    while killed < kills:
        process = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *EVERY], text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for line in process.stdout:
            if line.startswith("step"):  # it is in its loop, and saves all the time
                break
        time.sleep(rng.random() * 0.4)
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed += 1
        for step in prepare.checkpoints_in("out"):  # whatever a reader finds is whole
            assert (Path("out") / f"checkpoint-{step}" / "trainer_state.pt").exists()
            assert len(weights(step=step)) == len(weights("whole", 30))
    assert run(*EVERY) == 0
    assert_same_run("whole", "out", 30)
    assert not list(Path("out").glob("tmp-*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")
def test_a_full_disk_ends_in_one_line_with_the_old_checkpoint(toy):  # noqa: F811
    disk = toy / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1100k", "tmpfs", disk]).returncode:
        pytest.skip("no tmpfs here")
    try:
        args = [a for a in TINY if not a.startswith("--out_dir")] + ["--out_dir=disk/out", "--eval_interval=0"]
        done = subprocess.run([sys.executable, ROOT / "train.py", *args, "--save_interval=1"],
                              capture_output=True, text=True)
        assert done.returncode == 2, done.stderr
        assert "bytes free" in done.stderr and len(done.stderr.strip().splitlines()) == 1
        steps = prepare.checkpoints_in("disk/out")
        assert steps and not list(Path("disk/out").glob("tmp-*"))
        subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
        assert run(*args, "--init_from=resume") == 0
    finally:
        subprocess.run(["umount", disk])


def test_a_corpus_of_any_size_starts_at_once(tmp_path):
    """Sparse shards that stand for 10**11 tokens: start-up under 2 s, memory flat, batches as fast."""
    code = """
import resource, sys, time
sys.path.insert(0, sys.argv[1])
import prepare
t = time.perf_counter()
data = prepare.Windows("big", "train", 1024, 50257)
started = time.perf_counter() - t
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
import torch
data.sample(0, 4, 1)
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
t = time.perf_counter()
for step in range(500):
    data.sample(step * 4, 4, 1)
each = (time.perf_counter() - t) / 500
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base
print(len(data), started, each, grown / 1024)
"""
    (tmp_path / "big").mkdir()
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 10**8
    for i in range(1, 1001):
        with open(tmp_path / "big" / f"big_train_{i:06}.bin", "wb") as f:
            f.write(header.tobytes())
            f.truncate(1024 + 2 * 10**8)
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], cwd=tmp_path, capture_output=True, text=True,
                          check=True)
    windows, started, each, grown = map(float, done.stdout.split())
    assert windows == 1000 * ((10**8 - 1) // 1024)
    assert started < 2 and each < 0.02 and grown < 50, done.stdout


def test_short_shards_are_passed_over_with_a_note(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i, n in ((1, 100), (2, 5), (3, 17), (4, 16)):
        write_shard(tmp_path / f"data/x/x_train_{i:06}.bin", np.arange(n))
    data = prepare.Windows("data/x", "train", 16, 257)
    assert len(data) == 6 + 0 + 1 + 0
    said = capsys.readouterr().out
    assert "x_train_000002.bin" in said and "x_train_000004.bin" in said and "000003" not in said
    assert data.read([6])[0].tolist() == [list(range(16))]
