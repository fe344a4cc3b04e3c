"""torchrun with gloo on this machine: the number of processes is not a hyperparameter."""
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from test_train import ROOT, TINY, log, run, state, toy  # noqa: F401

import prepare


def launch(n, *args, **kw):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}",
               str(ROOT / "train.py"), *TINY, "--dropout=0", *args]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **kw)


def finish(process, timeout=300):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def assert_close(one, other, loss=1e-4, weight=2e-5):
    assert len(log(one)) == len(log(other))
    for a, b in zip(log(one), log(other), strict=True):
        assert a == pytest.approx(b, rel=loss)
    a, b = (load_file(f"{d}/checkpoint-10/model.safetensors") for d in (one, other))
    assert all(abs(a[k] - b[k]).max() < weight for k in a)


@pytest.mark.parametrize("n,more", [(2, ()), (3, ()), (2, ("--optimizer=muon",)), (2, ("--compile=True",))])
def test_any_number_of_processes_makes_the_same_run(toy, n, more):  # noqa: F811
    """Accumulation over 4 micro-batches; a lost gradient sync or a rank's own loss would show."""
    batch = ("--batch_size=1", f"--total_batch_size={16 * 4 * n}")
    assert run(*TINY, "--dropout=0", *batch, *[m for m in more if "compile" not in m], "--out_dir=one") == 0
    code, out, err = finish(launch(n, *batch, *more, "--out_dir=many"))
    assert code == 0, err
    # Muon orthogonalizes in bfloat16, which makes steps of a thousandth of what float32 would
    assert_close("one", "many", *((1e-3, 1e-3) if "--optimizer=muon" in more else ()))
    assert out.count("val_loss") == 4 and "destroy_process_group" not in err
    assert not [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(toy) and p.pid != os.getpid()]


def test_a_checkpoint_resumes_on_another_number_of_processes(toy):  # noqa: F811
    assert run(*TINY, "--dropout=0", "--out_dir=one") == 0
    assert finish(launch(2, "--out_dir=a", "--max_iters=6"))[0] == 0
    # max_iters shapes the cosine, so both halves belong to a schedule of their own: compare those
    assert run(*TINY, "--dropout=0", "--out_dir=b", "--max_iters=6") == 0
    assert run(*TINY, "--dropout=0", "--out_dir=a", "--init_from=resume") == 0
    assert finish(launch(2, "--out_dir=b", "--init_from=resume"))[0] == 0
    assert_close("a", "b")


def test_three_processes_resume_bit_equal(toy):  # noqa: F811
    """Three addends' order shows in a sum; DDP would change it after a process's first step."""
    batch = "--batch_size=1", f"--total_batch_size={16 * 4 * 3}", "--keep_checkpoints=9"
    assert finish(launch(3, *batch))[0] == 0
    shutil.copytree("out/checkpoint-3", "again/checkpoint-3")
    assert finish(launch(3, *batch, "--out_dir=again", "--init_from=resume"))[0] == 0
    one, other = (Path(f"{d}/checkpoint-10/model.safetensors").read_bytes() for d in ("out", "again"))
    assert one == other


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_torchrun_saves_and_leaves_nobody_behind(toy, signum):  # noqa: F811
    process = launch(2, "--max_iters=100000", "--eval_interval=0", "--save_interval=0")
    for line in process.stdout:
        if "loss" in line:
            break
    process.send_signal(signum)
    finish(process, 60)
    steps = prepare.checkpoints_in("out")
    assert len(steps) == 1 and steps[-1] > 0  # the signal's, which no interval would have saved
    assert state(step=steps[-1])["step"] == steps[-1]
    time.sleep(1)
    assert not [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(toy) and p.pid != os.getpid()]


def test_all_machines_have_to_see_out_dir(toy, tmp_path):  # noqa: F811
    """Two nodes of one process each; the second works in a folder without the first one's disk."""
    other = tmp_path / "elsewhere"
    (other / "data").mkdir(parents=True)
    os.symlink(tmp_path / "data" / "toy", other / "data" / "toy")
    nodes = []
    for rank, cwd in enumerate((tmp_path, other)):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1",
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29573"}
        nodes.append(subprocess.Popen([sys.executable, ROOT / "train.py", *TINY], cwd=cwd, env=env, text=True,
                                      stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
    _, err = nodes[1].communicate(timeout=120)
    assert nodes[1].returncode == 2 and "out_dir" in err
    nodes[0].kill()
    nodes[0].wait()


WATCH = """
import runpy, sys, torch, torch.distributed as dist
real = torch.nn.utils.clip_grad_norm_
def watched(parameters, limit):  # called once a step, with the gradients of it in place
    parameters = list(parameters)
    for mine in (torch.cat([p.detach().flatten() for p in parameters]),
                 torch.cat([p.grad.flatten() for p in parameters])):
        theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(theirs, mine)
        assert all(torch.equal(mine, other) for other in theirs)
    return real(parameters, limit)
torch.nn.utils.clip_grad_norm_ = watched
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_weights_and_gradients_are_bit_equal_across_ranks(toy):  # noqa: F811
    (toy / "watch.py").write_text(WATCH)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               "watch.py", str(ROOT / "train.py"), *TINY, "--batch_size=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert prepare.checkpoints_in("out")[-1] == 10
