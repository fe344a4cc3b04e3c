"""sample.py against transformers, against a sampler without a cache, and as its users run it."""
import json
import os
import runpy
import subprocess
import sys

import pytest
import torch
from conftest import REPO
from transformers import GPT2Config, GPT2LMHeadModel, TopKLogitsWarper, TopPLogitsWarper

import sample
from prepare import load_tokenizer, save_tokenizer
from train import load_model

BLOCK = 32
EOT = 256  # of the bytes tokenizer


def make(folder, vocab_size=257, tokenizer="bytes"):
    """A random GPT-2 as transformers saves it, its logits far from flat."""
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=vocab_size, n_positions=BLOCK, n_embd=32, n_layer=2, n_head=2,
                        bos_token_id=EOT, eos_token_id=EOT, initializer_range=0.3)
    GPT2LMHeadModel(config).save_pretrained(folder)
    if tokenizer:
        save_tokenizer(load_tokenizer(tokenizer), folder)
    return str(folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(tiny):
    return load_model(tiny)


@pytest.fixture
def cli(monkeypatch, capsys):
    """cli("--seed=1") runs sample.py in this process -> (exit status, stdout, stderr)."""
    def cli(*args):
        monkeypatch.setattr(sys, "argv", ["sample.py", *map(str, args)])
        code = 0
        try:
            runpy.run_path(str(REPO / "sample.py"), run_name="__main__")
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()
    return cli


def prompt(length, seed=0):
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def rows(model, prompts, steps, seeds=None, **options):
    """generate() as a list of B lists of tokens, greedy unless options say otherwise."""
    options = {"temperature": 0.0} | options
    columns = sample.generate(model, prompts, seeds or [0] * len(prompts), steps, **options)
    return torch.stack(list(columns), 1).tolist()


@torch.no_grad()
def recompute(model, ids, steps):
    """Greedy without a cache: the whole window again for each token -> (tokens, their logits)."""
    window, tokens, logits = list(ids), [], []
    for _ in range(steps):
        if len(window) > model.config.block_size:
            window = window[-(model.config.block_size // 2):]
        logits.append(model.logits(model.hidden(torch.tensor([window]))[0, -1]))
        tokens.append(logits[-1].argmax().item())
        window.append(tokens[-1])
    return tokens, torch.stack(logits)


@pytest.fixture
def seen(monkeypatch):
    """The logits (B, V) that each step of generate chose from."""
    seen, choose = [], sample.choose

    def spy(logits, *args, **choice):
        seen.append(logits)
        return choose(logits, *args, **choice)
    monkeypatch.setattr(sample, "choose", spy)
    return seen


# --- The cache -----------------------------------------------------------------------------------

@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK])
def test_greedy_equals_transformers(tiny, model, length):
    hf, steps = GPT2LMHeadModel.from_pretrained(tiny), max(1, BLOCK - length)
    ids = torch.tensor([prompt(length)])
    theirs = hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                         eos_token_id=None, pad_token_id=0, max_new_tokens=steps)
    assert rows(model, ids.tolist(), steps) == theirs[:, length:].tolist()


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK])
def test_cache_equals_recomputing_past_the_window(model, seen, length):
    tokens, logits = recompute(model, prompt(length), 3 * BLOCK)
    assert rows(model, [prompt(length)], 3 * BLOCK) == [tokens]
    torch.testing.assert_close(torch.cat(seen), logits, rtol=1e-4, atol=1e-4)


def test_prompts_of_all_lengths_in_one_batch(model, seen):
    lengths = [1, BLOCK, 2, 17, BLOCK - 1, 17]  # the last twice, with other tokens
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    alone = [recompute(model, ids, 3 * BLOCK) for ids in prompts]
    assert rows(model, prompts, 3 * BLOCK) == [tokens for tokens, _ in alone]
    logits = torch.stack([logits for _, logits in alone], 1)
    torch.testing.assert_close(torch.stack(seen), logits, rtol=1e-4, atol=1e-4)


def test_a_window_longer_than_64_slots(tmp_path):
    config = GPT2Config(vocab_size=300, n_positions=200, n_embd=32, n_layer=1, n_head=2,
                        initializer_range=0.3)
    torch.manual_seed(2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    prompts = [prompt(60), prompt(130), prompt(config.n_positions)]
    assert rows(model, prompts, 250) == [recompute(model, ids, 250)[0] for ids in prompts]


def test_equal_prompts_are_read_once(model, monkeypatch):
    batches, hidden = [], model.hidden
    monkeypatch.setattr(model, "hidden", lambda *a: batches.append(len(a[0])) or hidden(*a))
    made = rows(model, [prompt(9)] * 5, 3, seeds=range(5), temperature=1.0)
    assert batches == [1, 5, 5] and len(set(map(tuple, made))) == 5


def test_a_cache_that_already_holds_something(model):
    idx, cut = torch.tensor([prompt(20), prompt(20, 1)]), 7
    keys, values = torch.zeros(2, 2, 2, 2, 20, 16).unbind()
    pos = torch.arange(20)
    mask = pos[:, None] >= pos
    with torch.no_grad():
        whole = model.hidden(idx)
        for t in (pos[:cut], pos[cut:]):
            part = model.hidden(idx[:, t], t, mask[t][:, :t[-1] + 1], (keys, values, t))
            torch.testing.assert_close(part, whole[:, t], rtol=1e-4, atol=1e-4)


def test_half_precision_stays_close(tiny, model, seen):
    rows(model, [prompt(20)], 1)
    rows(sample.cast(load_model(tiny), "cpu", torch.bfloat16), [prompt(20)], 1)
    exact, rough = (logits.float() for logits in seen)
    assert 0 < (exact - rough).abs().max() < 0.05 * exact.std()


# --- The choice ----------------------------------------------------------------------------------

def test_a_row_depends_on_its_prompt_and_seed_alone(model):
    prompts = [prompt(length, length) for length in (3, 30, 12)]
    options = dict(temperature=0.9, top_k=50, top_p=0.9)
    together = rows(model, prompts, 2 * BLOCK, seeds=[5, 6, 7], **options)
    for ids, seed, tokens in zip(prompts, [5, 6, 7], together, strict=True):
        assert rows(model, [ids], 2 * BLOCK, seeds=[seed], **options) == [tokens]
        assert rows(model, [ids], 20, seeds=[seed], **options) == [tokens[:20]]


@pytest.mark.parametrize("top_k,top_p", [(0, 1.0), (5, 1.0), (0, 0.7), (20, 0.5), (1000, 1e-9)])
def test_choose_draws_from_the_distribution_of_transformers(top_k, top_p):
    torch.manual_seed(0)
    logits, n = 3 * torch.randn(1, 100), 20000
    want = logits / 0.7
    for warp in [TopKLogitsWarper(top_k or 100)] + [TopPLogitsWarper(top_p)]:
        want = warp(None, want)
    draws = (torch.arange(n) + 0.5) / n  # evenly spread: the counts are n p to within one
    tokens = sample.choose(logits.expand(n, -1), draws, 0.7, top_k, top_p)
    counts = tokens.bincount(minlength=100)
    torch.testing.assert_close(counts / n, want.softmax(-1)[0], atol=2 / n, rtol=0)
    assert not counts[want[0].isinf()].any()


def test_temperature_zero_takes_the_likeliest():
    logits = torch.randn(7, 50)
    assert sample.choose(logits, torch.rand(7), 0.0, 3, 0.5).tolist() == logits.argmax(-1).tolist()


def test_ends_of_the_draw_are_safe():
    logits = torch.tensor([[-1e9, 0.0, 1.0, -1e9]])
    for draw, token in ((0.0, 1), (1 - 2**-24, 2)):
        assert sample.choose(logits, torch.tensor([draw])).tolist() == [token]


def test_ids_that_the_tokenizer_lacks_never_come(tmp_path, cli):
    folder = make(tmp_path / "padded", vocab_size=264)
    padded = load_model(folder)
    padded.transformer.wte.weight.data[257:] *= 50  # they would win every time
    assert max(rows(padded, [prompt(5)], 20)[0]) > 256
    for temperature in (0.0, 1.0):
        ids = rows(padded, [prompt(5)] * 8, 60, range(8), vocab_size=257, temperature=temperature)
        assert max(map(max, ids)) < 257
    assert cli(f"--checkpoint={folder}", "--max_new_tokens=50", "--top_k=0")[0] == 0


# --- Text ----------------------------------------------------------------------------------------

def test_collect_cuts_at_the_end_and_stops_when_all_have_ended():
    encoding, columns = load_tokenizer("bytes"), torch.full((100, 2), 97)
    columns[3, 0] = columns[8, 0] = columns[5, 1] = EOT
    steps = iter(columns)
    assert sample.collect(steps, 2, encoding) == [[97] * 3, [97] * 5]
    assert len(list(steps)) == 100 - 16  # it looks every sixteen
    assert sample.collect(iter(()), 3, encoding) == [[], [], []]


def test_streaming_shows_whole_characters():
    encoding, shown = load_tokenizer("bytes"), []
    text = "é中🙂a"
    steps = iter(torch.tensor([[byte] for byte in text.encode()]))
    sample.collect(steps, 1, encoding, shown.append)
    assert [piece for piece in shown if piece] == list(text)


def test_streaming_and_not_show_the_same(tiny, cli):
    options = f"--checkpoint={tiny}", "--start=é", "--max_new_tokens=90", "--dtype=float32"
    code, streamed, err = cli(*options, "--num_samples=1")
    both = cli(*options, "--num_samples=2")[1]
    assert code == 0 and "settings:" in err and "tokens/s" in err
    assert streamed.startswith("é") and len(streamed) > 20
    samples = both.split("\n---------------\n")
    assert samples[0] == streamed[:-1] and samples[1] != samples[0] and samples[2:] == [""]
    assert cli(*options, "--num_samples=2")[1] == both
    assert cli(*options, "--num_samples=2", "--seed=7")[1] != both


def test_out_lines_and_single_prompts_agree(tiny, cli, tmp_path):
    lines = ["One", "Two and a half", "One", "é<|endoftext|>x", "far too long " * 9]
    (tmp_path / "lines").write_text("\n".join(lines[:2]) + "\n\n" + "\n".join(lines[2:]), "utf-8")
    options = f"--checkpoint={tiny}", "--max_new_tokens=40", "--dtype=float32"
    code, shown, err = cli(*options, f"--start=LINES:{tmp_path}/lines", "--num_samples=2",
                           f"--out={tmp_path}/out")
    made = [json.loads(line) for line in (tmp_path / "out").open(encoding="utf-8")]
    assert code == 0 and [row["prompt"] for row in made] == [line for line in lines for _ in (0, 1)]
    assert "".join(f"{row['prompt']}{row['text']}\n{'-' * 15}\n" for row in made) == shown
    assert "117 tokens: the model sees the last 32" in err
    assert len({row["text"] for row in made}) == len(made)  # the second One goes on otherwise
    for i in (0, 1, 3, 4):
        cli(*options, f"--start={lines[i]}", "--num_samples=2", f"--out={tmp_path}/alone")
        assert list(map(json.loads, (tmp_path / "alone").open())) == made[2 * i:2 * i + 2]
    for row in made:
        assert len(row["tokens"]) <= 40 and EOT not in row["tokens"]
        assert bytes(row["tokens"]).decode("utf-8", "replace") == row["text"]


def test_endoftext_ends_a_sample_and_starts_one(tmp_path, cli):
    folder = make(tmp_path)
    encoding = load_tokenizer("bytes")
    assert sample.encode(encoding, "", 9) == [EOT]
    assert sample.encode(encoding, "a<|endoftext|>b", 9) == [97, EOT, 98]
    hf = GPT2LMHeadModel.from_pretrained(folder)  # hi, then <|endoftext|> for ever
    hf.transformer.ln_f.weight.data.zero_()
    hf.transformer.ln_f.bias.data = hf.transformer.wte.weight.data[EOT].clone() * 9
    hf.save_pretrained(folder)
    options = f"--checkpoint={folder}", "--start=hi", "--temperature=0"
    code, shown, err = cli(*options, "--num_samples=2")
    assert shown == ("hi\n" + "-" * 15 + "\n") * 2 and "\n0 tokens" in err
    assert cli(*options, "--num_samples=1")[1] == "hi\n"


def test_no_new_tokens_and_prompt_from_a_file(tiny, cli, tmp_path):
    (tmp_path / "p").write_text("two\nlines", "utf-8")
    options = f"--checkpoint={tiny}", "--max_new_tokens=0", "--num_samples=1"
    assert cli(*options, f"--start=FILE:{tmp_path}/p")[:2] == (0, "two\nlines\n")
    assert cli(*options)[:2] == (0, "\n")
    cli(*options, f"--start=FILE:{tmp_path}/p", "--num_samples=2", f"--out={tmp_path}/out")
    row = dict(prompt="two\nlines", text="", tokens=[])
    assert list(map(json.loads, (tmp_path / "out").open())) == [row, row]


# --- Tokenizers and checkpoints ------------------------------------------------------------------

def test_checkpoint_of_a_run_by_name(tiny, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.makedirs("out/run")
    options = "--out_dir=out/run", "--max_new_tokens=5", "--num_samples=1", "--start=x"
    code, shown, err = cli(*options)
    assert code == 2 and shown == "" and "no checkpoint in out/run; train first" in err
    for step in (5, 40):
        make(f"out/run/checkpoint-{step}")
    code, shown, err = cli(*options)
    assert code == 0 and os.path.join("out/run", "checkpoint-40") in err and shown[0] == "x"


def test_without_tokenizer_files_it_is_gpt2s(tmp_path, cli):
    folder = make(tmp_path / "m", vocab_size=50257, tokenizer=None)
    code, shown, err = cli(f"--checkpoint={folder}", "--max_new_tokens=9", "--start=Hello there")
    assert code == 0 and shown.startswith("Hello there")


def test_only_tokenizer_json(tiny, tmp_path, cli):
    """What transformers 5 saves, and all that it saves."""
    from transformers import AutoTokenizer
    folder = make(tmp_path, tokenizer=None)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    assert not os.path.exists(os.path.join(folder, "vocab.json"))
    options = "--start=Ab<|endoftext|>c", "--num_samples=1", "--max_new_tokens=20"
    code, shown, err = cli(f"--checkpoint={folder}", *options)
    assert code == 0 and shown == cli(f"--checkpoint={tiny}", *options)[1], err


@pytest.mark.parametrize("vocab_size,tokenizer", [(300, "bytes"), (250, "bytes"), (257, None)])
def test_another_tokenizer_is_refused(tmp_path, cli, vocab_size, tokenizer):
    code, shown, err = cli(f"--checkpoint={make(tmp_path, vocab_size, tokenizer)}")
    assert code == 2 and f"the model has {vocab_size} ids" in err.splitlines()[-1] and shown == ""


# --- Users' mistakes, terminals, compilers -------------------------------------------------------

@pytest.mark.parametrize("arg", [
    "--num_samples=0", "--max_new_tokens=-1", "--temperature=-0.1", "--top_k=-1", "--top_p=0",
    "--top_p=1.1", "--device=cuda:99", "--dtype=float8", "--tempertaure=1", "--out=nowhere/out",
    "--checkpoint=nowhere/at-all", "--start=FILE:nowhere", "--start=FILE:latin1",
    "--start=LINES:nowhere", "--start=LINES:blank", "--max_new_tokens=1e12"])
def test_a_mistake_is_one_line(tiny, cli, tmp_path, monkeypatch, arg):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blank").write_text("\n \n", "utf-8")
    (tmp_path / "latin1").write_bytes(b"caf\xe9")
    code, shown, err = cli(f"--checkpoint={tiny}", "--max_new_tokens=1", arg)
    notes = ("settings:", tiny)
    said = [line for line in err.splitlines() if not line.startswith(notes)]
    assert code == 2 and shown == "" and len(said) == 1, err


def test_a_terminal_without_unicode(tiny, run, tmp_path):
    (tmp_path / "p").write_text("é中", encoding="utf-8")
    strict = ",".join(f"error::EncodingWarning:{name}" for name in ("__main__", "train", "prepare"))
    done = run("sample.py", f"--checkpoint={tiny}", f"--start=FILE:{tmp_path}/p", "--num_samples=1",
               "--max_new_tokens=60", f"--out={tmp_path}/out",
               env={"PYTHONIOENCODING": "ascii", "PYTHONWARNDEFAULTENCODING": "1",
                    "PYTHONWARNINGS": strict})
    assert done.returncode == 0 and done.stdout.startswith("??"), done.stderr


@pytest.mark.parametrize("num_samples", [1, 3])
def test_a_broken_pipe_ends_quietly(tiny, offline, num_samples):
    command = [sys.executable, REPO / "sample.py", f"--checkpoint={tiny}", "--start=line\nline",
               "--max_new_tokens=2000", f"--num_samples={num_samples}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        if num_samples == 1:  # in the middle of it; several come all at the end
            assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        said = process.stderr.read().decode()
        assert process.wait(60) == 1 and "Traceback" not in said and "BrokenPipe" not in said, said


def test_a_broken_pipe_with_a_file_is_no_success(tiny, offline, tmp_path):
    command = [sys.executable, REPO / "sample.py", f"--checkpoint={tiny}", "--max_new_tokens=9",
               "--num_samples=200", f"--out={tmp_path}/o"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.stdout.close()
        assert process.wait(60) == 1
    assert 0 < len((tmp_path / "o").read_text().splitlines()) < 200


def test_a_byte_order_mark_is_no_prompt(tiny, cli, tmp_path):
    (tmp_path / "p").write_bytes("\ufeffOne\r\nTwo\r\n".encode())
    assert cli(f"--checkpoint={tiny}", f"--start=LINES:{tmp_path}/p", "--num_samples=1",
               "--max_new_tokens=3", f"--out={tmp_path}/o")[0] == 0
    rows = [json.loads(line) for line in (tmp_path / "o").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["One", "Two"]


@pytest.mark.parametrize("broken", ["nan", "inf"])
def test_logits_that_are_not_finite(tmp_path, cli, broken):
    folder = make(tmp_path)
    model = GPT2LMHeadModel.from_pretrained(folder)
    model.transformer.ln_f.bias.data[3] = float(broken)
    model.save_pretrained(folder)
    code, shown, err = cli(f"--checkpoint={folder}", "--max_new_tokens=3")
    assert code == 2 and "aren't finite" in err.splitlines()[-1] and shown == ""


def test_a_prompt_that_cannot_be_tokenized(tmp_path, cli):
    (tmp_path / "p").write_text(" " * 3_000_000 + "x")
    folder = make(tmp_path, vocab_size=50257, tokenizer="gpt2")
    code, shown, err = cli(f"--checkpoint={folder}", f"--start=FILE:{tmp_path}/p", "--max_new_tokens=1")
    assert code == 2 and "can't tokenize" in err.splitlines()[-1]


@pytest.mark.parametrize("choice", [dict(temperature=1e-38), dict(temperature=1e-10), dict(top_p=1e-50)])
def test_hardly_any_choice_is_the_likeliest(choice):
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0)) * 20
    assert sample.choose(logits, torch.full((20,), 0.999), **choice).equal(logits.argmax(-1))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_one_line(tiny, run):
    done = run("sample.py", f"--checkpoint={tiny}", "--max_new_tokens=3", "--num_samples=2", "--out=/dev/full")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "can't write" in done.stderr.splitlines()[-1]


def test_compiled_gives_the_same_tokens(model):
    torch._dynamo.reset()
    prompts = [prompt(3), prompt(20)]
    with torch._dynamo.config.patch(error_on_recompile=True):  # one shape for all steps
        compiled = rows(model, prompts, 2 * BLOCK, compile=True)
    assert compiled == rows(model, prompts, 2 * BLOCK)


def test_no_compiler_is_one_warning(tiny, run, tmp_path):
    options = f"--checkpoint={tiny}", "--max_new_tokens=30", "--num_samples=1", "--dtype=float32"
    env = {"PATH": str(tmp_path), "CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = run("sample.py", *options, "--compile=True", env=env)
    assert done.returncode == 0 and done.stderr.count("can't compile") == 1, done.stderr
    assert len(done.stderr.splitlines()) == 4 and done.stdout == run("sample.py", *options).stdout


# --- Faults that were put in on purpose and that no test had seen

def test_a_long_prompt_keeps_its_end():
    assert sample.encode(load_tokenizer("bytes"), "abcde", 3) == [99, 100, 101]


def test_the_settings_of_the_choice_arrive(tiny, cli, tmp_path):
    def made(*args):
        assert cli(f"--checkpoint={tiny}", "--num_samples=4", "--max_new_tokens=30", f"--out={tmp_path}/o", *args)[0] == 0
        return [json.loads(line)["tokens"] for line in (tmp_path / "o").open()]
    plain = ("--dtype=float32", "--temperature=1", "--top_k=0")
    likeliest = made(*plain, "--temperature=0")
    assert made(*plain, "--top_k=1") == made(*plain, "--top_p=1e-9") == likeliest != made(*plain)
    assert made(*plain, "--temperature=0.5") != made(*plain)


def test_the_dtype_arrives(tiny, cli, monkeypatch):
    seen, real = set(), torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention",
                        lambda q, *a, **k: seen.add(q.dtype) or real(q, *a, **k))
    for dtype in ("float32", "bfloat16", "float16"):
        seen.clear()
        assert cli(f"--checkpoint={tiny}", "--num_samples=1", "--max_new_tokens=3", f"--dtype={dtype}")[0] == 0
        assert seen == {getattr(torch, dtype)}


def test_best_is_the_best(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in (5, 40):
        folder = make(f"out/run/checkpoint-{step}")
        state = dict.fromkeys(("step", "settings", "shards", "scaler", "optimizers")) | {"best": {"step": 5}}
        torch.save(state, f"{folder}/trainer_state.pt")
    err = cli("--out_dir=out/run", "--checkpoint=best", "--max_new_tokens=1")[2]
    assert "checkpoint-5 on" in err


def test_more_samples_than_a_batch(tiny, cli, tmp_path):
    assert cli(f"--checkpoint={tiny}", "--num_samples=70", "--max_new_tokens=3", f"--out={tmp_path}/o")[0] == 0
    assert len((tmp_path / "o").read_text().splitlines()) == 70


def test_other_prompts_have_other_draws(tiny, cli, tmp_path, monkeypatch):
    (tmp_path / "l").write_text("a\nb\na\n")
    seen = []
    stack = torch.stack
    monkeypatch.setattr(torch, "stack", lambda ts, *a: seen.append(ts) or stack(ts, *a))
    cli(f"--checkpoint={tiny}", f"--start=LINES:{tmp_path}/l", "--num_samples=2", "--max_new_tokens=9")
    draws = seen[0]
    assert len({tuple(d.tolist()) for d in draws}) == 6
