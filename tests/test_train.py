"""
train.py against references (transformers, a second run of itself) and against its own promises.

Runs are in this process where they can be: main() by runpy costs no new import of torch.
"""
import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import prepare
import train

ROOT = Path(train.__file__).parent
TINY = ("--dataset=toy", "--out_dir=out", "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16",
        "--batch_size=4", "--total_batch_size=128", "--max_iters=10", "--warmup_iters=2",
        "--learning_rate=1e-3", "--min_lr=1e-4", "--eval_interval=4", "--eval_tokens=256",
        "--save_interval=3", "--log_interval=1", "--dropout=0.1", "--device=cpu", "--dtype=float32",
        "--compile=False")


def write_shard(path, tokens):
    """llm.c's form, written here without prepare.py."""
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes())


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A working folder with data/toy: bytes with some structure, two train shards, 63 windows of 16."""
    rng = np.random.default_rng(0)
    text = rng.choice([97, 98, 99, 100], 2000, p=[0.6, 0.2, 0.1, 0.1])
    folder = tmp_path / "data" / "toy"
    write_shard(folder / "toy_val_000000.bin", text[:400])
    write_shard(folder / "toy_train_000001.bin", text[400:1000])
    write_shard(folder / "toy_train_000002.bin", text[1000:1430])
    prepare.save_tokenizer(prepare.load_tokenizer("bytes"), folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args):
    """train.py's main() with these arguments; returns its exit status."""
    handlers = [(s, signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)]
    argv, sys.argv = sys.argv, [str(ROOT / "train.py"), *args]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    finally:
        sys.argv = argv
        for signum, handler in handlers:
            signal.signal(signum, handler)
        while prepare.LOCKS:
            prepare.LOCKS.pop().close()
    return 0


def log(out="out"):
    """log.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in Path(out, "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("ms", "tok_per_sec", "mfu")} for row in rows]


def weights(out="out", step=10):
    return (Path(out) / f"checkpoint-{step}" / "model.safetensors").read_bytes()


def state(out="out", step=10):
    return torch.load(Path(out) / f"checkpoint-{step}" / "trainer_state.pt", weights_only=True)


def assert_same_run(one, other, step=10):
    assert log(one) == log(other)
    assert weights(one, step) == weights(other, step)
    a, b = state(one, step), state(other, step)
    assert a["best"] == b["best"]
    for left, right in zip(a["optimizers"], b["optimizers"], strict=True):
        assert left.keys() == right.keys()
        for p in left:
            for key in left[p]:
                assert torch.equal(torch.as_tensor(left[p][key]), torch.as_tensor(right[p][key]))


# --- the model against transformers

def tiny_model(**kw):
    torch.manual_seed(0)
    config = dict(block_size=32, vocab_size=300, n_layer=2, n_head=4, n_embd=64, dropout=0.0,
                  gradient_checkpointing=False) | kw
    model = train.GPT(train.GPTConfig(**config))
    with torch.no_grad():
        for name, p in model.named_parameters():  # far from the initial, flat distribution
            p.copy_(torch.randn_like(p) * 0.2 + (p == 1))
        model.transformer.wte.weight[config["vocab_size"]:] = 0
    return model.eval()


def save(model, folder):
    files = {}
    train.save_checkpoint(str(folder), model, files, 299, step=0)


def test_logits_and_gradients_agree_with_transformers(tmp_path):
    model = tiny_model()
    save(model, tmp_path / "checkpoint-0")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-0").train()
    for part in theirs.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    idx = torch.randint(0, 300, (3, 33))
    x, y = idx[:, :-1], idx[:, 1:]
    out = theirs(x)
    assert torch.allclose(model.logits(model.hidden(x)), out.logits, atol=1e-4)
    loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), y.flatten())
    loss.backward()
    ours = model(x, y)
    ours.backward()
    assert ours.item() == pytest.approx(loss.item(), abs=1e-5)
    reference = dict(theirs.named_parameters())
    for name, p in model.named_parameters():
        g = reference[name].grad
        g = g.t() if name.endswith(train.TRANSPOSED) else g
        assert torch.allclose(p.grad[:len(g)], g, atol=1e-5), name
    assert not model.transformer.wte.weight.grad[300:].any()  # padded rows learn nothing


def test_load_model_takes_every_spelling_of_a_gpt2(tmp_path):
    model = tiny_model()
    save(model, tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    from safetensors.torch import load_file, save_file
    tensors = load_file(tmp_path / "ours" / "model.safetensors")
    for kind, rename in (("hub", lambda k: k.removeprefix("transformer.")),
                         ("compiled", lambda k: f"_orig_mod.{k}"), ("ddp", lambda k: f"module.{k}")):
        shutil.copytree(tmp_path / "ours", tmp_path / kind)
        odd = {rename(k): t for k, t in tensors.items()}
        odd["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)  # the causal mask of old exports
        save_file(odd, tmp_path / kind / "model.safetensors")
    theirs.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 1
    x = torch.randint(0, 300, (2, 20))
    for kind in ("ours", "theirs", "parts", "hub", "compiled", "ddp"):
        again = train.load_model(str(tmp_path / kind))
        assert torch.equal(again.logits(again.hidden(x)), model.logits(model.hidden(x))), kind
    assert train.load_model(str(tmp_path / "ours"), block_size=8).config.block_size == 8


@pytest.mark.parametrize("change", [
    {"activation_function": "relu"}, {"model_type": "llama"}, {"n_layer": 3}, {"n_embd": 32},
    {"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}, {"tie_word_embeddings": False}, {"vocab_size": 5000}])
def test_load_model_refuses_what_it_would_get_wrong(tmp_path, capsys, change):
    save(tiny_model(), tmp_path / "x")
    path = tmp_path / "x" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SystemExit) as end:
        train.load_model(str(tmp_path / "x"))
    assert end.value.code == 2 and len(capsys.readouterr().err.strip().splitlines()) == 1


def test_gpt2_small_has_its_size_and_its_initialization():
    with torch.device("meta"):
        model = train.GPT(train.GPTConfig(1024, 50257, 12, 12, 768, 0.0, False))
    padding = (50304 - 50257) * 768
    assert sum(p.numel() for p in model.parameters()) - padding == 124_439_808
    torch.manual_seed(1)
    model = train.GPT(train.GPTConfig(64, 1000, 4, 4, 256, 0.0, False))
    assert model.transformer.wte.weight[:1000].std().item() == pytest.approx(0.02, rel=0.02)
    assert model.transformer.wpe.weight.std().item() == pytest.approx(0.02, rel=0.03)
    for block in model.transformer.h:
        assert block.mlp.c_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.02)
        assert not block.mlp.c_proj.bias.any()
    idx = torch.randint(0, 1000, (4, 64))
    assert model(idx, idx.roll(-1, 1)).item() == pytest.approx(math.log(1000), abs=0.1)


@torch.no_grad()
def test_cached_steps_equal_one_pass():
    model, T = tiny_model(), 32
    c = model.config
    idx = torch.randint(0, 300, (3, T))
    whole = model.hidden(idx)
    keys, values = torch.zeros(2, c.n_layer, 3, c.n_head, T, c.n_embd // c.n_head)
    outs = []
    for first, last in ((0, 5), (5, 6), (6, 20), (20, 32)):  # prefill, one token, several at once
        slots = torch.arange(first, last)
        mask = (torch.arange(last) <= slots[:, None])[None, None]
        outs.append(model.hidden(idx[:, first:last], slots, mask, (keys, values, slots)))
    assert torch.allclose(torch.cat(outs, 1), whole, atol=1e-5)


def test_gradient_checkpointing_keeps_less_and_changes_nothing():
    idx = torch.randint(0, 300, (16, 33))
    grads, kept = [], []
    for again in (False, True):
        model = tiny_model(gradient_checkpointing=again, dropout=0.1).train()
        own, saved = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

        def pack(t, own=own, saved=saved):
            if t.untyped_storage().data_ptr() not in own:
                saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            x = model.hidden(idx[:, :-1])
        kept.append(sum(saved.values()))
        x.square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert kept[1] < 0.4 * kept[0], kept


def largest_with(model, idx):
    """The loss, its gradients, and the most numbers that one tensor with a vocabulary held."""
    from torch.utils._python_dispatch import TorchDispatchMode
    sizes, padded = [0], model.transformer.wte.weight.size(0)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **kwargs or {})
            if isinstance(out, torch.Tensor) and out.dim() and out.size(-1) in (padded, model.config.vocab_size):
                sizes.append(out.numel())
            return out
    with Watch():
        loss = model(idx[:, :-1], idx[:, 1:])
        loss.backward()
    return loss, [p.grad for p in model.parameters()], max(sizes)


def test_gradient_checkpointing_has_few_logits_at_a_time():
    idx = torch.randint(0, 5000, (6, 1025))
    plain, again = (largest_with(tiny_model(vocab_size=5000, n_embd=16, block_size=1024, gradient_checkpointing=g).train(), idx)
                    for g in (False, True))
    assert torch.allclose(plain[0], again[0], atol=1e-6)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain[1], again[1], strict=True))
    assert plain[2] == 6 * again[2] == 6 * 1024 * 5120


# --- optimizer, schedule, choices

def test_every_parameter_is_in_one_group_and_only_matrices_decay():
    model = tiny_model()
    for name in ("adamw", "muon"):
        groups = [g for o in train.make_optimizers(model, name, 0.1, (0.9, 0.95)) for g in o.param_groups]
        ids = [id(p) for g in groups for p in g["params"]]
        assert len(ids) == len(set(ids)) == len(list(model.parameters()))
        for g in groups:
            assert all((p.dim() >= 2) == (g["weight_decay"] > 0) for p in g["params"])
    muon = train.make_optimizers(model, "muon", 0.1, (0.9, 0.95))[1]
    assert len(muon.param_groups[0]["params"]) == 4 * model.config.n_layer


@pytest.mark.parametrize("warmup,end", [(0, 100), (10, 100), (100, 100), (200, 100), (0, 1), (5, 0)])
def test_schedule(warmup, end):
    lr = [train.get_lr(i, 1.0, 0.1, warmup, end) for i in range(max(end, warmup) + 1)]
    assert all(0 < x <= 1 and math.isfinite(x) for x in lr)
    assert lr[warmup] == 1.0 or warmup >= end
    if 0 < warmup < end:
        assert lr[:warmup + 1] == sorted(lr[:warmup + 1]) and lr[warmup:] == sorted(lr[warmup:])[::-1]
        assert lr[end] == pytest.approx(0.1)


def test_dtype_and_device_choice(monkeypatch, capsys):
    def choice(dtype, device, cuda=False, cpu=False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: cuda)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: cpu)
        return train.pick_dtype(dtype, device)
    assert choice("auto", "cuda:1", cuda=True) == "bfloat16"
    assert choice("auto", "cuda", cuda=False) == "float16"
    assert choice("auto", "cpu", cpu=True) == "bfloat16"
    assert choice("auto", "cpu", cpu=False) == choice("auto", "mps") == "float32"
    assert choice("bfloat16", "cpu") == "bfloat16" and choice("float32", "cuda") == "float32"
    for dtype, device in (("bfloat16", "cuda"), ("int8", "cpu")):
        with pytest.raises(SystemExit):
            choice(dtype, device)
    for cuda, mps, want in ((True, True, "cuda:0"), (False, True, "mps"), (False, False, "cpu")):
        asked = []  # there is neither here, so see what is tried
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda mps=mps: mps)
        monkeypatch.setattr(torch, "Generator", asked.append)
        monkeypatch.setattr(torch, "zeros", lambda n, device, asked=asked: asked.append(device) or torch.ones(n))
        train.pick_device("auto")
        assert asked == [want.partition(":")[0], want]
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")  # --nproc_per_node=3 on two GPUs
    capsys.readouterr()
    with pytest.raises(SystemExit):
        train.pick_device("auto")
    assert capsys.readouterr().err.startswith("device=cuda:2, 2 GPUs: ")
    monkeypatch.undo()
    for name in ("cuda:7", "tpu", "cpu:x"):
        with pytest.raises(SystemExit):
            train.pick_device(name)
    assert all(len(line) < 300 for line in capsys.readouterr().err.splitlines())


@pytest.mark.parametrize("name,key", [
    ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"),
    ("NVIDIA H100 PCIe", "H100 PCIe"), ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("Tesla T4", "T4"),
    ("NVIDIA L4", "L4"), ("NVIDIA L40S", "L40S"), ("NVIDIA GeForce GTX 1080", None), ("", None)])
def test_peak_flops_by_name(name, key):
    import re
    found = next((k for k in train.PEAK_FLOPS if re.search(rf"\b{k}\b", name)), None)
    assert found == key


# --- the order of the data

def test_an_epoch_shows_every_window_once_and_epochs_differ(toy):
    data = prepare.Windows("data/toy", "train", 16, 257)
    n = len(data)
    assert n == (600 - 1) // 16 + (430 - 1) // 16
    epochs = [[tuple(row.tolist()) for row in data.sample(e * n, n, seed=7)[0]] for e in range(3)]
    windows = sorted(tuple(row.tolist()) for row in data.read(range(n))[0])
    assert all(sorted(epoch) == windows for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    x, y = data.read(range(37))  # the first shard, in order
    assert np.array_equal(x.flatten(), prepare.read_tokens(data.shards[0], 0, 37 * 16))
    assert np.array_equal(y.flatten(), prepare.read_tokens(data.shards[0], 1, 37 * 16))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 255, 256, 257, 1000])
def test_permutation(n):
    assert sorted(prepare.permute(i, n, 5) for i in range(n)) == list(range(n))


# --- runs

def test_a_run_and_what_it_leaves(toy, capsys):
    assert run(*TINY) == 0
    out = capsys.readouterr().out
    for said in ("parameters", "128 tokens a step", "2 micro-batches", "cpu", "float32", "settings:"):
        assert said in out
    rows = log()
    assert [r["step"] for r in rows if "loss" in r] == list(range(1, 11))
    assert [r["step"] for r in rows if "val_loss" in r] == [0, 4, 8, 10]
    assert {"loss", "lr", "grad_norm", "tokens"} <= rows[1].keys()
    assert rows[-2]["tokens"] == 1280 and rows[-1]["val_loss"] < rows[0]["val_loss"]
    best = state()["best"]["step"]
    assert {int(p.name[11:]) for p in Path("out").glob("checkpoint-*")} == {9, 10} | {best}
    assert prepare.find_checkpoint("out", "best") == f"out/checkpoint-{best}"
    tok = transformers.AutoTokenizer.from_pretrained("out/checkpoint-10")
    model = transformers.AutoModelForCausalLM.from_pretrained("out/checkpoint-10")
    made = model.generate(**tok("ab", return_tensors="pt"), max_new_tokens=5, do_sample=True, top_k=40)
    assert made.shape == (1, 7)


@pytest.mark.parametrize("stops", [[1], [3], [5], [7, 8], [9]])
@pytest.mark.parametrize("more", [(), ("--optimizer=muon", "--total_batch_size=64")])
def test_a_resumed_run_is_the_same_run(toy, stops, more, monkeypatch):
    """63 windows, 8 a step: the epoch ends inside step 8; max_iters stays, a signal stops the run."""
    assert run(*TINY, *more, "--out_dir=whole") == 0
    step = train.nn.utils.clip_grad_norm_
    for stop in stops + [0]:
        count = 0

        def stopping(*args, **kw):  # called once a step
            nonlocal count
            count += 1
            if count + done == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(*args, **kw)

        done = max(prepare.checkpoints_in("halves"), default=0)
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", stopping)
        assert run(*TINY, *more, "--out_dir=halves", "--init_from=auto") == (143 if stop else 0)
        assert not stop or prepare.checkpoints_in("halves")[-1] == stop
    assert_same_run("whole", "halves")


def test_rows_past_the_checkpoint_are_dropped(toy):
    run(*TINY, "--out_dir=whole")
    run(*TINY)
    shutil.rmtree("out/checkpoint-10")
    with open("out/log.jsonl", "ab") as f:
        f.write(b'{"step": 11, "loss": 1.0}\nrubbish\n\n\xff\x00\n{"a": 1}\n{"step": 12, "lo')
    assert run(*TINY, "--init_from=resume") == 0
    assert_same_run("whole", "out")
    assert run(*TINY, "--init_from=resume") == 0  # finished: nothing changes
    assert_same_run("whole", "out")


def test_looking_does_not_touch(toy):
    run(*TINY)
    run(*TINY, "--out_dir=blind", "--eval_interval=0", "--save_interval=0", "--log_interval=0")
    assert weights("out") == weights("blind")
    assert Path("blind/log.jsonl").read_text() == ""


def test_accumulation_and_batch_size_are_not_hyperparameters(toy):
    for B in (1, 2, 4, 8):
        run(*TINY, "--dropout=0", f"--batch_size={B}", f"--out_dir=b{B}")
    for B in (1, 2, 4):
        for a, b in zip(log(f"b{B}"), log("b8"), strict=True):
            assert a == pytest.approx(b, rel=1e-4)
    from safetensors.torch import load_file
    a, b = (load_file(f"{d}/checkpoint-10/model.safetensors") for d in ("b1", "b8"))
    assert all(torch.allclose(a[k], b[k], atol=2e-5) for k in a)


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory (injected)"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
                 "you tried to allocate 26352812032 bytes"),
    RuntimeError("MPS backend out of memory (MPS allocated: 5 GiB)")])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_halves_the_batch_and_keeps_the_trajectory(toy, monkeypatch, capsys, where, error):
    run(*TINY, "--dropout=0", "--out_dir=whole")
    real = torch.nn.functional.cross_entropy

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise error

    calls = 0

    def oom(logits, targets, **how):
        nonlocal calls
        calls += torch.is_grad_enabled()
        if logits.requires_grad and len(targets) > 32 and calls > 3:
            if where == "forward":
                raise error
            return Fails.apply(real(logits, targets, **how))
        return real(logits, targets, **how)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", oom)
    assert run(*TINY, "--dropout=0") == 0
    assert "batch_size=2" in capsys.readouterr().out
    for a, b in zip(log("whole"), log("out"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_out_of_memory_at_one_sequence_is_one_line(toy, monkeypatch, capsys):
    def oom(logits, targets, **how):
        if logits.requires_grad:
            raise torch.OutOfMemoryError("injected")
        return torch.zeros(())
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", oom)
    assert run(*TINY) == 2
    err = capsys.readouterr().err
    assert "gradient_checkpointing" in err and "batch_size" in err and err.count("\n") == 1


@pytest.mark.parametrize("what", ["loss", "norm"])
def test_a_non_finite_step_ends_the_run_and_spares_the_checkpoints(toy, monkeypatch, capsys, what):
    real, clip = torch.nn.functional.cross_entropy, torch.nn.utils.clip_grad_norm_
    calls = 0

    def bad_loss(logits, targets, **how):
        nonlocal calls
        calls += logits.requires_grad
        return real(logits, targets, **how) * (math.nan if logits.requires_grad and calls > 8 else 1)

    def bad_norm(parameters, limit):
        nonlocal calls
        calls += 1
        return clip(parameters, limit) * (math.inf if calls == 5 else 1)

    if what == "loss":
        monkeypatch.setattr(torch.nn.functional, "cross_entropy", bad_loss)
    else:
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", bad_norm)
    assert run(*TINY, "--log_interval=0", "--eval_interval=0") == 2
    assert "step 5:" in capsys.readouterr().err
    assert prepare.checkpoints_in("out") == [0, 3]
    monkeypatch.undo()
    os.chdir(toy)
    assert run(*TINY, "--init_from=resume") == 0


def test_a_last_step_that_is_not_finite_is_told_with_every_interval_off(toy, monkeypatch, capsys):
    real, calls = torch.nn.functional.cross_entropy, []

    def bad_loss(*args, **how):  # of the last of 4 steps of 2 micro-batches
        calls.append(1)
        return real(*args, **how) * (math.nan if len(calls) > 6 else 1)
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", bad_loss)
    off = [f"--{key}_interval=0" for key in ("log", "eval", "save", "hellaswag")]
    assert run(*TINY, *off, "--max_iters=4", "--dtype=float16") == 2
    assert "step 4: " in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_removed_does_not_end_the_run(toy, monkeypatch):
    """NFS and Windows refuse while somebody has a file of it open."""
    rename = os.rename

    def held(old, new):
        if "checkpoint-3" in str(old) and "tmp-" not in str(old):
            raise PermissionError("in use")
        rename(old, new)
    monkeypatch.setattr(os, "rename", held)
    assert run(*TINY, "--keep_checkpoints=1") == 0
    assert {3, 10} <= {*prepare.checkpoints_in("out")}


def test_float16_skips_a_step_for_all_optimizers_and_resumes_its_scale(toy, monkeypatch):
    args = (*TINY, "--dtype=float16", "--optimizer=muon", "--max_iters=4", "--save_interval=1",
            "--keep_checkpoints=9")
    clip = torch.nn.utils.clip_grad_norm_
    steps = 0

    def overflow(parameters, limit):
        nonlocal steps
        steps += 1
        return clip(parameters, limit) * (math.inf if steps == 3 else 1)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", overflow)
    assert run(*args) == 0
    assert weights(step=2) == weights(step=3) != weights(step=4)
    assert [row["grad_norm"] for row in log() if row.get("grad_norm", 0) is None] == [None]  # and no Infinity
    assert state(step=4)["scaler"]["scale"] > 0


@pytest.mark.parametrize("more,said", [
    ("--total_batch_size=100", "--total_batch_size=128"),
    ("--batch_size=0", "batch_size=0"),
    ("--n_head=3", "n_head"),
    ("--optimizer=sgd", "optimizer"),
    ("--device=cuda:9", "device=cuda:9"),
    ("--dtype=int8", "dtype=int8"),
    ("--dataset=nothing", "prepare.py"),
    ("--block_size=512", "block_size"),
    ("--init_from=resume", "no checkpoint in out"),
    ("--init_from=no/such/model", "no/such/model"),
    ("--learning_rate=-1", "learning_rate"),
    ("--learing_rate=1", "learning_rate"),
    ("--hellaswag_interval=1", "hellaswag_data")])
def test_a_mistake_is_one_line(toy, capsys, more, said):
    more = (more, "--hellaswag_data=missing.jsonl") if "hellaswag" in more else (more,)
    assert run(*TINY, *more) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.strip().splitlines()) == 1, err


def test_a_token_past_the_vocabulary_is_named(toy, capsys):
    write_shard(toy / "data/toy/toy_train_000001.bin", [300] * 600)
    assert run(*TINY) == 2
    assert "toy_train_000001.bin" in (err := capsys.readouterr().err) and "300" in err and "257" in err


def test_scratch_refuses_a_folder_with_a_run_and_resume_refuses_another_run(toy, capsys):
    run(*TINY)
    before = weights()
    assert run(*TINY) == 2
    assert "--init_from=resume" in capsys.readouterr().err
    for more in ("--seed=1", "--n_layer=3", "--total_batch_size=64", "--block_size=8", "--optimizer=muon"):
        assert run(*TINY, "--init_from=resume", more) == 2
        key, _, value = more[2:].partition("=")
        err = capsys.readouterr().err
        assert key in err and value in err and err.count("\n") == 1
    write_shard(toy / "data/toy/toy_train_000003.bin", [97] * 100)
    assert run(*TINY, "--init_from=resume") == 2
    assert "shards" in (err := capsys.readouterr().err) and weights() == before
    assert len(err) < 150  # of hundreds of shards only the first that differs


def test_max_iters_0_and_1(toy):
    assert run(*TINY, "--max_iters=0", "--out_dir=zero") == 0
    assert [r["step"] for r in log("zero")] == [0] and prepare.checkpoints_in("zero") == [0]
    assert run(*TINY, "--max_iters=1", "--out_dir=one", "--warmup_iters=700") == 0
    assert prepare.checkpoints_in("one")[-1] == 1


def test_patience(toy):
    """A learning rate of 0 never gets better: the first evaluation is the best, two more are too many."""
    still = ("--learning_rate=0", "--min_lr=0", "--patience=2", "--eval_interval=2", "--dropout=0")
    assert run(*TINY, *still) == 0
    assert prepare.checkpoints_in("out")[-1] == 4
    assert run(*TINY, *still, "--init_from=resume") == 0  # and it isn't counted again
    assert [r["step"] for r in log() if "val_loss" in r] == [0, 2, 4]


def test_a_run_that_loses_patience_ends_with_hellaswag(toy):
    Path("h.jsonl").write_text("".join(json.dumps(row) + "\n" for row in HELLASWAG))
    assert run(*TINY, "--learning_rate=0", "--min_lr=0", "--patience=2", "--eval_interval=2", "--dropout=0",
               "--hellaswag_interval=3", "--hellaswag_data=h.jsonl") == 0
    assert [r["step"] for r in log() if "hellaswag_acc" in r] == [0, 3, 4]


def test_finetuning_takes_the_architecture_and_the_smaller_context(toy, capsys):
    save(tiny_model(vocab_size=257), toy / "given")
    args = [a for a in TINY if not a.startswith(("--n_", "--block"))] + ["--block_size=16"]
    assert run(*args, "--init_from=given", "--max_iters=2") == 0
    assert "n_embd=64" in capsys.readouterr().out
    assert train.load_model("out/checkpoint-2").config.block_size == 16
    assert run(*args, "--init_from=resume", "--max_iters=3") == 0
    save(tiny_model(vocab_size=300), toy / "other")
    assert run(*args, "--init_from=other", "--out_dir=x") == 2


def test_a_checkpoint_with_another_tokenizer_of_the_same_size_is_refused(toy, capsys):
    assert run(*TINY, "--max_iters=3") == 0
    vocab = json.loads(Path("data/toy/vocab.json").read_text())
    vocab |= {"a": vocab["b"], "b": vocab["a"]}
    Path("data/toy/vocab.json").write_text(json.dumps(vocab))
    for more in ("--init_from=out/checkpoint-3", "--out_dir=x"), ("--init_from=resume",):
        assert run(*TINY, *more) == 2
        assert "different tokenizers" in (err := capsys.readouterr().err) and err.count("\n") == 1


def test_a_full_disk_or_a_failing_sync_spares_the_old_checkpoint(toy, monkeypatch, capsys):
    run(*TINY, "--max_iters=3", "--save_interval=3")
    before = weights(step=3)
    sync, calls = os.fsync, 0

    def failing(fd):
        nonlocal calls
        calls += 1
        if calls > 4:
            raise OSError(28, "No space left on device")
        return sync(fd)

    monkeypatch.setattr(os, "fsync", failing)
    assert run(*TINY, "--max_iters=6", "--init_from=resume") == 2
    err = capsys.readouterr().err
    assert "No space left" in err and err.count("\n") == 1
    assert weights(step=3) == before and not list(Path("out").glob("tmp-*"))
    monkeypatch.undo()
    os.chdir(toy)
    assert run(*TINY, "--max_iters=6", "--init_from=resume") == 0


def test_a_second_run_in_the_same_folder_is_refused(toy):
    import fcntl
    Path("out").mkdir()
    with open("out/.lock", "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        done = subprocess.run([sys.executable, ROOT / "train.py", *TINY], capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1


def test_compile_without_a_compiler_trains_eagerly(toy):
    env = os.environ | {"PATH": os.path.dirname(sys.executable), "CXX": "/nonexistent",
                        "TORCHINDUCTOR_CACHE_DIR": str(toy / "cache")}
    args = [*TINY, "--compile=True", "--max_iters=2"]
    done = subprocess.run([sys.executable, ROOT / "train.py", *args], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("torch.compile failed") == 1
    assert log()[-2]["step"] == 2


HELLASWAG = [{"ind": i, "activity_label": "x", "ctx_a": "ab" * i, "ctx_b": "", "ctx": "ab" * i, "label": i % 4,
              "endings": ["a" * j for j in (1, i % 3 + 1, 4, 2)]} for i in range(1, 6)]


def test_compiled_once_whatever_is_looked_at_and_equal_to_eager(toy):
    """Evaluation and HellaSwag of many lengths use the plain module: one graph, no second compilation."""
    Path("h.jsonl").write_text("".join(json.dumps(row) + "\n" for row in HELLASWAG))
    look = ("--hellaswag_interval=2", "--hellaswag_data=h.jsonl", "--eval_interval=2", "--dropout=0")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert run(*TINY, *look, "--compile=True") == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["recompiles"]
    assert run(*TINY, *look, "--out_dir=eager") == 0
    assert [r["step"] for r in log() if "hellaswag_acc" in r] == [0, 2, 4, 6, 8, 10]
    for a, b in zip(log(), log("eager"), strict=True):
        assert a == pytest.approx(b, rel=1e-3)
    assert run(*TINY, "--dropout=0", "--eval_interval=0", "--out_dir=blind") == 0
    assert weights("eager") == weights("blind")
    from safetensors import safe_open
    names = [set(safe_open(f"{d}/checkpoint-10/model.safetensors", "pt").keys()) for d in ("out", "eager")]
    assert names[0] == names[1] and all(name.startswith("transformer.") for name in names[0])


def test_evaluation_takes_few_windows_at_a_time_whatever_batch_size_is(toy, monkeypatch):
    """Its logits are not compiled away: 4096 tokens' at once at most; so the val loss is the same to the bit."""
    write_shard(toy / "data/long/long_val_000000.bin", np.random.default_rng(1).integers(0, 256, 20000))
    write_shard(toy / "data/long/long_train_000001.bin", np.random.default_rng(2).integers(0, 256, 20000))
    for name in prepare.TOKENIZER_FILES:
        shutil.copy(toy / "data/toy" / name, toy / "data/long")
    read, sizes, losses = prepare.Windows.read, [], []
    monkeypatch.setattr(prepare.Windows, "read", lambda *args: sizes.append(len(args[1])) or read(*args))
    for batch_size in (64, 128):
        assert run(*TINY, "--dataset=long", "--block_size=64", f"--batch_size={batch_size}", "--max_iters=0",
                   "--total_batch_size=8192", "--eval_tokens=16384", f"--out_dir=out/{batch_size}") == 0
        losses.append(log(f"out/{batch_size}")[0]["val_loss"])
    assert max(sizes) == 64 and sum(sizes) == 2 * 256 and losses[0] == losses[1]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_kept():
    """Taking and freeing 100 MB again and again faults its pages in once, not each time."""
    code = ("import resource, prepare, numpy as np\n"
            "keep = KEEP and prepare.keep_freed_memory()\n"
            "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
            "np.full(10**8, 1, np.uint8); before = faults()\n"
            "for _ in range(10): np.full(10**8, 1, np.uint8)\n"
            "print(faults() - before)")
    given_back, kept = (int(subprocess.run([sys.executable, "-c", code.replace("KEEP", keep)], cwd=ROOT, check=True,
                                           capture_output=True).stdout) for keep in ("False", "True"))
    assert kept < given_back / 10


def test_a_rank_runs_its_exit_hooks_and_flushes_before_it_leaves():
    code = ("import atexit, sys, prepare; atexit.register(print, 'hook'); sys.stdout.write('text '); "
            "prepare.leave(143)")
    for env in ({}, {"WORLD_SIZE": "2"}):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **env},
                              stdout=subprocess.PIPE, text=True)
        assert done.returncode == 143 and done.stdout == "text hook\n"


@pytest.mark.parametrize("then,now", [("float32", "float16"), ("float16", "float32")])
def test_a_run_resumes_in_another_dtype(toy, then, now):
    assert run(*TINY, "--max_iters=2", f"--dtype={then}") == 0
    assert run(*TINY, "--max_iters=4", f"--dtype={now}", "--init_from=resume") == 0
    assert prepare.checkpoints_in("out")[-1] == 4


def test_ctrl_c_before_the_first_step_saves_and_says_how_to_go_on(toy):
    code = ("import os, runpy, signal, sys, torch; real, sent = torch.manual_seed, []\n"
            "def seeding(seed):\n"  # first called before there is a model
            "    sent or sent.append(os.kill(os.getpid(), signal.SIGINT))\n"
            "    return real(seed)\n"
            "torch.manual_seed = seeding\n"
            f"sys.argv[0] = {str(ROOT / 'train.py')!r}; sys.path.insert(0, {str(ROOT)!r})\n"
            "runpy.run_path(sys.argv[0], run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", code, *TINY], capture_output=True, text=True)
    assert done.returncode == 130 and not done.stderr, done.stderr
    assert "--init_from=resume" in done.stdout and prepare.checkpoints_in("out") == [0]


def test_the_first_logged_step_prints_the_peak_memory(toy, capsys):
    assert run(*TINY) == 0
    lines = capsys.readouterr().out.splitlines()
    found = [line for line in lines if re.fullmatch(r"peak memory \d+\.\d\d of \d+\.\d GiB", line)]
    assert len(found) == 1 and " loss " in lines[lines.index(found[0]) + 1]
    used, there = map(float, re.findall(r"[\d.]+", found[0]))
    assert 0.05 < used < there


@pytest.mark.parametrize("env,kept", [({}, [0]), (dict(WORLD_SIZE="1", RANK="0"), [0, 1])])
def test_a_second_ctrl_c_leaves_at_once_but_under_torchrun(toy, env, kept):
    code = ("import os, runpy, signal, sys, torch; real = torch.nn.utils.clip_grad_norm_\n"
            "def slow(*args):\n"
            "    os.kill(os.getpid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGINT)\n"
            "    return real(*args)\n"
            "torch.nn.utils.clip_grad_norm_ = slow\n"
            f"sys.argv[0] = {str(ROOT / 'train.py')!r}; sys.path.insert(0, {str(ROOT)!r})\n"
            "runpy.run_path(sys.argv[0], run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", code, *TINY], env={**os.environ, **env})
    assert done.returncode in (130, -2) and prepare.checkpoints_in("out") == kept


def test_signals_in_a_real_process(toy):
    """SIGINT saves and says how to go on; a second one leaves at once."""
    args = [sys.executable, str(ROOT / "train.py"), *TINY, "--max_iters=100000", "--save_interval=0",
            "--eval_interval=0", "--init_from=auto", "--hellaswag_data=no such file"]
    process = subprocess.Popen(args, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step") and "loss" in line:
            process.send_signal(signal.SIGINT)
            break
    out = process.stdout.read()
    assert process.wait(60) == 130 and "'--hellaswag_data=no such file' --init_from=resume" in out  # to paste
    assert prepare.checkpoints_in("out")


def test_what_others_left_in_out_dir_is_not_ours_to_remove(toy):
    for name in ("tmp-precious", "checkpoint-9", "checkpoint-0007"):
        (toy / "out" / name).mkdir(parents=True)
    (toy / "out/tmp-precious/f").write_text("keep")
    (toy / "out/tmp-notes.txt").write_text("keep")
    assert run(*TINY, "--init_from=auto") == 0
    assert (toy / "out/tmp-precious/f").exists() and (toy / "out/tmp-notes.txt").exists()
    assert prepare.checkpoints_in("out")[-1] == 10  # an empty folder is no checkpoint


def test_a_reader_of_the_terminal_that_leaves_does_not_end_a_run(toy):
    done = subprocess.run(f"{sys.executable} {ROOT / 'train.py'} {' '.join(TINY)} | head -3", shell=True,
                          capture_output=True, text=True)
    assert "Traceback" not in done.stderr and prepare.checkpoints_in("out")[-1] == 10


def test_a_full_disk_under_the_log_is_one_line(toy, capsys):
    full = open("/dev/full", "w")
    with pytest.raises(SystemExit) as end:
        prepare.show_row(1, {"loss": 2.0}, 9, "?", full)
    with pytest.raises(OSError):
        full.close()
    assert end.value.code == 2 and "No space left" in (err := capsys.readouterr().err) and err.count("\n") == 1


def test_resume_from_another_folder_and_spelling(toy, monkeypatch, capsys):
    run(*TINY, "--max_iters=3")
    (toy / "elsewhere").mkdir()
    monkeypatch.chdir(toy / "elsewhere")
    where = (f"--dataset={toy}/data/toy/", f"--out_dir={toy}/out", "--init_from=resume")
    assert run(*TINY, *where) == 0
    shutil.copytree(toy / "data/toy", toy / "data/toy2")
    assert run(*TINY, *where, f"--dataset={toy}/data/toy2", "--max_iters=12") == 2
    assert "toy2" in capsys.readouterr().err


@pytest.mark.parametrize("name,content,said", [
    ("data/toy/vocab.json", "{bad", "vocab.json"), ("data/toy/vocab.json", "{}", "vocab.json"),
    ("data/toy/merges.txt", None, "merges.txt"), ("out/checkpoint-10/trainer_state.pt", "x", "trainer_state"),
    ("out/checkpoint-10/trainer_state.pt", None, "trainer_state"),
    ("out/checkpoint-10/model.safetensors", "x", "checkpoint-10")])
def test_a_broken_file_is_named_in_one_line(toy, capsys, name, content, said):
    run(*TINY)
    capsys.readouterr()
    Path(name).unlink()
    if content is not None:
        Path(name).write_text(content)
    assert run(*TINY, "--init_from=resume", "--max_iters=12") == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


# --- the log and the folder of a run that was touched

def test_a_log_that_others_wrote_is_kept(tmp_path):
    path = tmp_path / "log.jsonl"
    rows = [json.dumps({"step": n, "loss": 1.0}, separators=s) for n, s in ((0, (",", ":")), (3, None), (6, None))]
    path.write_text("\n".join(rows) + '\n{"step": 3, "lo')
    prepare.open_log(str(path), 3, resume=True).close()
    assert path.read_text() == "\n".join(rows[:2]) + "\n"
    prepare.open_log(str(path), 0, resume=False).close()  # its checkpoints were moved away, perhaps
    assert path.read_text() == "" and (tmp_path / "log.jsonl.old").read_text() == "\n".join(rows[:2]) + "\n"


def test_a_disk_still_full_at_the_resume_is_one_line(toy, monkeypatch, capsys):
    assert run(*TINY) == 0
    real, before = os.fsync, Path("out/log.jsonl").read_bytes()

    def fsync(handle):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", fsync)
    capsys.readouterr()
    assert run(*TINY, "--init_from=resume", "--max_iters=12") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "No space left" in err and Path("out/log.jsonl").read_bytes() == before
    monkeypatch.setattr(os, "fsync", real)
    assert run(*TINY, "--init_from=resume", "--max_iters=12") == 0


def test_a_stray_folder_does_not_stop_a_checkpoint(toy):
    Path("out/checkpoint-6").mkdir(parents=True)
    Path("out/checkpoint-6/vocab.json").write_text("{}")
    assert run(*TINY) == 0
    assert Path("out/checkpoint-6/config.json").exists() or 6 not in prepare.checkpoints_in("out")
    assert Path("out/checkpoint-6-old/vocab.json").exists()


# --- Faults that were put in on purpose and that no test had seen

def test_min_lr_above_the_peak_keeps_the_peak():
    assert [train.get_lr(i, 1e-5, 6e-5, 2, 10) for i in range(2, 11)] == pytest.approx([1e-5] * 9)


def test_the_best_is_kept_beside_the_newest(toy):
    """A learning rate of 0 never gets better: the first checkpoint is the best."""
    assert run(*TINY, "--learning_rate=0", "--min_lr=0", "--dropout=0", "--keep_checkpoints=1") == 0
    assert prepare.checkpoints_in("out") == [0, 10]


def test_keep_checkpoints_0_keeps_one(toy):
    assert run(*TINY, "--keep_checkpoints=0", "--eval_interval=0") == 0
    assert prepare.checkpoints_in("out") == [10]


def test_the_scale_of_float16_goes_on(toy, monkeypatch):
    args = (*TINY, "--dtype=float16", "--max_iters=2")
    init = torch.amp.GradScaler.__init__
    monkeypatch.setattr(torch.amp.GradScaler, "__init__", lambda self, *a, **k: init(self, *a, init_scale=8.0, **k))
    assert run(*args) == 0
    monkeypatch.undo()
    os.chdir(toy)
    assert run(*args, "--max_iters=3", "--init_from=resume") == 0
    assert state(step=2)["scaler"]["scale"] == state(step=3)["scaler"]["scale"] == 8.0


def test_ms_are_of_one_step_and_of_learning_only(toy, monkeypatch):
    """By a clock on which a step takes 1 s and a batch of an evaluation 100."""
    now, clip, read = [0], torch.nn.utils.clip_grad_norm_, prepare.Windows.read

    def passes(seconds, result):
        now[0] += seconds
        return result
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *a: passes(1, clip(*a)))
    monkeypatch.setattr(prepare.Windows, "read", lambda self, i, place: passes(
        100 * isinstance(i, range), read(self, i, place)))
    assert run(*TINY, "--log_interval=5", "--eval_interval=3", "--save_interval=0") == 0
    rows = [row for row in map(json.loads, Path("out/log.jsonl").open()) if "ms" in row]
    assert [(row["step"], row["ms"], row["tok_per_sec"]) for row in rows] == [(n, 1000, 128) for n in (1, 5, 10)]


def test_what_the_optimizers_are_told(toy, monkeypatch):
    seen, real = [], torch.nn.utils.clip_grad_norm_

    def clip(parameters, limit):
        parameters = list(parameters)
        norm = real(parameters, limit)
        seen.append((limit, norm.item(), torch.stack([p.grad.norm() for p in parameters]).norm().item()))
        return norm
    steps = []
    for kind in (torch.optim.AdamW, torch.optim.Muon):
        def step(self, real=kind.step):
            steps.append((type(self).__name__, self.param_groups[0]["lr"], self.param_groups[0].get("betas"), self.param_groups[0]["weight_decay"]))
            return real(self)
        monkeypatch.setattr(kind, "step", step)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    more = ("--optimizer=muon", "--max_iters=4", "--beta1=0.8", "--beta2=0.9", "--weight_decay=0.3")
    assert run(*TINY, *more, "--grad_clip=0.01") == 0
    lrs = [train.get_lr(i, 1e-3, 1e-4, 2, 4) for i in range(4)]
    assert steps == [step for lr in lrs for step in (("AdamW", lr, (0.8, 0.9), 0.3), ("Muon", lr, None, 0.3))]
    assert all(before > 0.011 > after > 0.009 for _, before, after in seen)
    assert [row["lr"] for row in log() if "lr" in row] == lrs
    seen.clear()
    assert run(*TINY, *more, "--grad_clip=0", "--out_dir=b") == 0
    assert all(before == pytest.approx(after, rel=1e-4) for _, before, after in seen)


def test_muons_step_has_adamws_size():
    model = tiny_model()
    adamw, muon = train.make_optimizers(model, "muon", 0.0, (0.9, 0.95))
    p = muon.param_groups[0]["params"][0]  # (3 C, C): its update's root mean square is 0.2 lr
    before, p.grad = p.detach().clone(), torch.randn_like(p)
    muon.param_groups[0]["lr"] = 1e-2
    muon.step()
    assert (p - before).square().mean().sqrt().item() == pytest.approx(0.2e-2, rel=0.2)


@pytest.mark.parametrize("dropped", ["step"])
def test_each_step_and_rank_has_its_own_dropout(toy, monkeypatch, dropped):
    seeds, real = [], torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(seed) or real(seed))
    assert run(*TINY, "--max_iters=4", "--out_dir=a") == 0
    one = seeds[1:]
    seeds.clear()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(prepare, "write_folder", None)
    os.makedirs("b")
    assert run(*TINY, "--max_iters=4", "--out_dir=b") == 0
    assert len({*one, *seeds[1:]}) == 8


def test_out_of_memory_takes_a_divisor(toy, monkeypatch, capsys):
    args = [a for a in TINY if "batch_size" not in a] + ["--batch_size=9", "--total_batch_size=144", "--dropout=0"]
    assert run(*args, "--out_dir=whole") == 0
    real = torch.nn.functional.cross_entropy

    def oom(logits, targets, **how):
        if logits.requires_grad and len(targets) > 8 * 16:
            raise torch.OutOfMemoryError("injected")
        return real(logits, targets, **how)
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", oom)
    assert run(*args) == 0 and "batch_size=3" in capsys.readouterr().out
    for a, b in zip(log("whole"), log("out"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_the_first_step_is_logged(toy):
    assert run(*TINY, "--log_interval=4") == 0
    assert [r["step"] for r in log() if "loss" in r] == [1, 4, 8, 10]


def test_evaluation_has_no_dropout(toy):
    assert run(*TINY, "--max_iters=0", "--dropout=0.5", "--out_dir=a") == 0
    assert run(*TINY, "--max_iters=0", "--dropout=0", "--out_dir=b") == 0
    assert log("a") == log("b")


def test_gradient_checkpointing_is_applied(toy, monkeypatch):
    import torch.utils.checkpoint
    calls, real = [], torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda *a, **k: calls.append(1) or real(*a, **k))
    save(tiny_model(vocab_size=257, block_size=16), toy / "given")
    for init in ("scratch", "given", "resume"):
        calls.clear()
        iters = 1 + (init == "resume")
        assert run(*TINY, f"--max_iters={iters}", f"--init_from={init}", f"--out_dir={'b' if init == 'scratch' else 'a'}",
                   "--gradient_checkpointing=True") == 0
        assert calls, init


def test_another_error_is_no_reason_to_try_again(toy, monkeypatch):
    calls, real = [], torch.nn.functional.cross_entropy

    def broken(logits, targets, **how):
        calls.append(logits.requires_grad)
        if sum(calls) == 3:
            raise RuntimeError("mistaken")
        return real(logits, targets, **how)
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", broken)
    with pytest.raises(RuntimeError, match="mistaken"):
        run(*TINY)


@pytest.mark.parametrize("more,said", [("--tracker=tensorboard", "tracker=tensorboard"), ("--tracker=wandb", "tracker=wandb"),
                                       ("--dropout=1", "dropout"), ("--beta2=1", "beta2")])
def test_more_mistakes(toy, capsys, monkeypatch, more, said):
    import importlib.util
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else real(name, *a))
    assert run(*TINY, more) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_device_cuda_is_the_ranks_own(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch, "Generator", str)
    monkeypatch.setattr(torch, "zeros", lambda n, device: asked.append(device) or torch.ones(n))
    for device in ("auto", "cuda", "cuda:1"):
        train.pick_device(device)
    assert asked == ["cuda:3", "cuda:3", "cuda:1"]


def test_the_dtype_is_the_products(toy, monkeypatch):
    seen, real = set(), torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention",
                        lambda q, *a, **k: seen.add(q.dtype) or real(q, *a, **k))
    for dtype in ("float32", "bfloat16", "float16"):
        seen.clear()
        assert run(*TINY, "--max_iters=1", f"--dtype={dtype}", f"--out_dir={dtype}") == 0
        assert seen == {getattr(torch, dtype)}


def test_weights_that_are_not_finite_are_not_written(tmp_path, capsys):
    model = tiny_model()
    model.transformer.wpe.weight.data[1, 1] = math.nan
    with pytest.raises(SystemExit):
        save(model, tmp_path / "checkpoint-0")
    assert "not finite" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_endoftext_in_a_checkpoints_config(tmp_path):
    save(tiny_model(), tmp_path / "x")
    for kind in (transformers.AutoConfig, transformers.GenerationConfig):
        config = kind.from_pretrained(tmp_path / "x")
        assert (config.bos_token_id, config.eos_token_id) == (299, 299)


def test_parameters_are_counted_without_padding(toy, capsys):
    assert run(*TINY, "--max_iters=0") == 0
    model = transformers.AutoModelForCausalLM.from_pretrained("out/checkpoint-0")
    assert f"{model.num_parameters():,} parameters" in capsys.readouterr().out


def test_dropout_stands_where_gpt2_has_it(monkeypatch):
    F, seen = torch.nn.functional, []
    drop, attend = F.dropout, F.scaled_dot_product_attention
    monkeypatch.setattr(F, "dropout", lambda x, p, training=True: seen.append(p * training) or drop(x, p, training))
    monkeypatch.setattr(F, "scaled_dot_product_attention",
                        lambda q, k, v, mask, p, **how: seen.append(p) or attend(q, k, v, mask, p, **how))
    model, idx = tiny_model(dropout=0.1), torch.randint(0, 300, (1, 9))
    model.train().hidden(idx)
    assert seen == [0.1] * (1 + 3 * model.config.n_layer)
    seen.clear()
    model.eval().hidden(idx)
    assert not any(seen)


def test_another_layer_norm_epsilon_is_refused(tmp_path, capsys):
    save(tiny_model(), tmp_path / "x")
    path = tmp_path / "x" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_norm_epsilon": 1e-6}))
    with pytest.raises(SystemExit):
        train.load_model(str(tmp_path / "x"))


def test_mfu(toy, monkeypatch):
    search = re.search
    monkeypatch.setattr(re, "search", lambda pattern, text, *a: text == "" and r"\bT4\b" == pattern or search(pattern, text, *a))
    assert run(*TINY, "--max_iters=2") == 0
    monkeypatch.undo()
    n = sum(p.numel() for p in train.load_model(toy / "out/checkpoint-2").parameters()) - 127 * 32
    flops = 6 * (n - 16 * 32) + 12 * 2 * 32 * 16
    rows = [r for r in map(json.loads, (toy / "out/log.jsonl").open()) if "mfu" in r]
    assert len(rows) == 2 and all(r["mfu"] == pytest.approx(flops * r["tok_per_sec"] / 65e12) for r in rows)


def test_a_shard_of_another_length_is_another_run(toy, capsys):
    run(*TINY)
    write_shard(toy / "data/toy/toy_train_000002.bin", [97] * 431)
    assert run(*TINY, "--init_from=resume") == 2
    assert "toy_train_000002.bin=431 was 430" in capsys.readouterr().err


def test_both_accuracies(toy, monkeypatch):
    import hellaswag
    Path("h.jsonl").write_text("".join(json.dumps(row) + "\n" for row in HELLASWAG))
    monkeypatch.setattr(hellaswag, "score", lambda *_: dict(acc=0.25, acc_norm=0.5))
    assert run(*TINY, "--max_iters=0", "--hellaswag_interval=1", "--hellaswag_data=h.jsonl") == 0
    assert log()[-1] == {"step": 0, "hellaswag_acc": 0.25, "hellaswag_acc_norm": 0.5}


def test_a_new_best_is_saved_between_intervals(toy):
    assert run(*TINY, "--save_interval=0", "--keep_checkpoints=9", "--dropout=0") == 0
    assert prepare.checkpoints_in("out") == [0, 4, 8, 10]  # the evaluations, each better than the last


def test_another_n_head(toy, capsys):
    run(*TINY, "--max_iters=1")
    for more in ("--n_head=4", "--n_embd=64"):
        assert run(*TINY, "--init_from=resume", more) == 2
        assert more[2:] in capsys.readouterr().err


def test_only_rank_0_tracks(toy, monkeypatch):
    (toy / "wandb.py").write_text("init = lambda **kw: open('tracked', 'w').close()\nlog = lambda row, step: None\n")
    monkeypatch.syspath_prepend(toy)
    for name in "ab":
        Path(name).mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("RANK", "1")
    assert run(*TINY, "--max_iters=0", "--tracker=wandb", "--out_dir=a") == 0 and not Path("tracked").exists()
    monkeypatch.setenv("RANK", "0")
    assert run(*TINY, "--max_iters=0", "--tracker=wandb", "--out_dir=b") == 0 and Path("tracked").exists()
    sys.modules.pop("wandb")


# --- data that changes under a run, and signals that come early

@pytest.mark.parametrize("left", [None, 1024, 1024 + 2 * 17, 1024 + 2 * (16 * 20 + 1)])
def test_a_shard_that_goes_or_shrinks_under_a_run(toy, capsys, left):
    """numpy would repeat a single token that is left to fill the window."""
    data = prepare.Windows("data/toy", "train", 16, 257)
    path = "data/toy/toy_train_000001.bin"
    os.remove(path) if left is None else os.truncate(path, left)
    with pytest.raises(SystemExit):
        data.read([20])
    assert f"{path}: gone or cut short" in (err := capsys.readouterr().err) and err.count("\n") == 1


@pytest.mark.parametrize("kind", ["dangling link", "folder"])
def test_what_is_only_named_like_a_shard(toy, capsys, kind):
    path = Path("data/toy/toy_train_000003.bin")
    path.mkdir() if kind == "folder" else path.symlink_to("nowhere")
    assert run(*TINY) == 2
    assert f"{path}: " in (err := capsys.readouterr().err) and err.count("\n") == 1


@pytest.mark.parametrize("damage", ["no vocab", "no merges", "cut merges"])
def test_damaged_tokenizer_files_are_seen_before_training(toy, capsys, damage):
    folder = toy / "data/toy"
    digests = prepare.digests(prepare.save_tokenizer(prepare.load_tokenizer("gpt2"), folder))
    (folder / "meta.json").write_text(json.dumps({"sha256": digests}))
    assert prepare.tokenizer_files(str(folder))[0] == 50257
    name = "vocab.json" if "vocab" in damage else "merges.txt"
    data = (folder / name).read_bytes()
    (folder / name).unlink()
    if "cut" in damage:
        (folder / name).write_bytes(data[:200_000])
    assert run(*TINY) == 2
    assert "prepare the folder anew" in (err := capsys.readouterr().err) and err.count("\n") == 1


def test_empty_rank_variables_and_any_stdout(toy, monkeypatch):
    """As some launchers leave them; and notebooks' stdout is no TextIOWrapper."""
    import contextlib
    import io

    class Stream(io.TextIOBase):
        def write(self, text):
            return len(text)
    monkeypatch.setenv("RANK", "")
    monkeypatch.setenv("WORLD_SIZE", "")
    with contextlib.redirect_stdout(Stream()):
        assert run(*TINY, "--max_iters=1") == 0


def test_a_dataset_by_any_of_its_paths_is_the_same(toy, monkeypatch):
    monkeypatch.chdir(toy / "data/toy")
    assert run(*TINY, "--dataset=.", f"--out_dir={toy}/out", "--max_iters=2") == 0
    monkeypatch.chdir(toy)
    assert run(*TINY, "--init_from=resume", "--max_iters=3") == 0


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_waits_for_other_ranks_ends_it(toy, signum):
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": "29543", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([sys.executable, ROOT / "train.py", *TINY], env=env, stdout=subprocess.PIPE) as process:
        assert b"settings" in process.stdout.readline()
        time.sleep(3)
        process.send_signal(signum)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:  # Python's own handler waits for torch's C++
            assert signum == signal.SIGINT
            process.terminate()
        assert process.wait(20) == -signal.SIGTERM
