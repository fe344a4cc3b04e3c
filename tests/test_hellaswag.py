"""hellaswag.py against transformers, against rows worked out by hand, and as its users run it."""
import doctest
import json
import math
import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from conftest import REPO
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

import hellaswag
from prepare import load_tokenizer, save_tokenizer
from train import load_model

VAL_500 = REPO / "../shared/data/hellaswag_val_500.jsonl"

# Three rows in the manner of the set, of our own making: a WikiHow one with its markup, one of
# ActivityNet whose ctx_b is capitalized, and one with an empty ctx_b.
WIKIHOW = dict(
    ind=7, activity_label="Home and Garden", label="2", source_id="wikihow~7",
    ctx_a="How to dry herbs [title] Pick them in the  morning. [step] Wait for the dew to go.",
    ctx_b="then the U.S. way", endings=[
        "[title] Hang them up. [substeps] Keep them dark.", "Wash [them] twice.  Then wait.",
        " Lay them on paper.", "Eat."])
WIKIHOW["ctx"] = WIKIHOW["ctx_a"] + " " + WIKIHOW["ctx_b"]
ACTIVITY = dict(
    ind=24, activity_label="Rope skipping", label=0, source_id="activitynet~v_1", ctx_b="the boy",
    ctx_a="A boy stands on a mat.", ctx="A boy stands on a mat. the boy", endings=[
        "jumps over a rope.", "eats a rope.", "is a mat, it's 12 years old.", "stands."])
EMPTY = dict(ACTIVITY, ind=25, ctx_b="", ctx="A boy stands on a mat. ", label="3")
ROWS = [WIKIHOW, ACTIVITY, EMPTY]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def make(folder, tokenizer="gpt2", n_positions=256, vocab_size=None, **settings):
    """A random GPT-2 as transformers saves it, its logits far from flat."""
    torch.manual_seed(1)
    encoding = load_tokenizer(tokenizer)
    shape = dict(n_embd=32, n_layer=2, n_head=2, initializer_range=0.3)
    config = GPT2Config(vocab_size=vocab_size or encoding.n_vocab, n_positions=n_positions,
                        bos_token_id=encoding.eot_token, eos_token_id=encoding.eot_token,
                        **(shape | settings))
    GPT2LMHeadModel(config).save_pretrained(folder)
    save_tokenizer(encoding, folder)
    return str(folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def in_bytes(tmp_path_factory):
    return make(tmp_path_factory.mktemp("bytes"), tokenizer="bytes")


@pytest.fixture(scope="module")
def gpt2():
    return load_tokenizer("gpt2")


@pytest.fixture
def data(tmp_path):
    return write(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture
def cli(monkeypatch, capsys):
    """cli("--limit=1") runs hellaswag.py in this process -> (exit status, stdout, stderr)."""
    def cli(*args):
        monkeypatch.setattr(sys, "argv", ["hellaswag.py", "--device=cpu", *map(str, args)])
        code = 0
        try:
            runpy.run_path(str(REPO / "hellaswag.py"), run_name="__main__")
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()
    return cli


# --- Text and tokens -----------------------------------------------------------------------------

def test_docstrings():
    assert doctest.testmod(hellaswag) == (0, 1)


def test_nanogpt_tokens(data, gpt2):
    wikihow, activity, empty = hellaswag.load(data, gpt2, 256)
    # ids looked up in OpenAI's encoder.json
    assert activity.context == [32, 2933, 6296, 319, 257, 2603, 13, 262, 2933]
    assert activity.endings[1] == [25365, 257, 17182, 13]
    assert activity.lengths == [5, 4, 10, 2]
    assert empty.context == activity.context[:-2] + [220]  # ctx as it stands, with its last space
    text = [gpt2.decode(ids) for ids in (wikihow.context, *wikihow.endings)]
    assert text == [WIKIHOW["ctx"]] + [" " + ending for ending in WIKIHOW["endings"]]
    assert [e.label for e in (wikihow, activity, empty)] == [2, 0, 3]
    assert [e.ind for e in (wikihow, activity, empty)] == [7, 24, 25]


def test_lm_eval_tokens(data, gpt2):
    wikihow, activity, empty = hellaswag.load(data, gpt2, 256, "lm_eval")
    assert gpt2.decode(wikihow.context) == ("Home and Garden: How to dry herbs. Pick them in the "
                                            "morning. Wait for the dew to go. Then the u.s. way")
    # a bracket at the start leaves a space that the harness neither strips nor counts as its own
    assert [gpt2.decode(ids) for ids in wikihow.endings] == [
        "  Hang them up. Keep them dark.", " Wash twice. Then wait.", " Lay them on paper.",
        " Eat."]
    assert wikihow.lengths == [30, 22, 18, 4]
    assert activity.context == [49, 3008, 31017, 25, 317, 2933, 6296, 319, 257, 2603, 13, 383, 2933]
    assert activity.endings[1] == [25365, 257, 17182, 13]
    assert activity.lengths == [18, 12, 28, 7]
    assert empty.context == activity.context[:-2]
    assert empty.endings == activity.endings


def test_lm_eval_space_at_the_end_goes_to_the_ending(tmp_path, gpt2):
    """A bracket may leave a space there; the harness moves it over, and so changes the tokens."""
    row = dict(ACTIVITY, ctx_a="A boy", ctx_b="runs [step]", endings=["on"] * 4)
    example, = hellaswag.load(write(tmp_path / "a.jsonl", [row]), gpt2, 64, "lm_eval")
    assert gpt2.decode(example.context) == "Rope skipping: A boy Runs"
    assert example.endings == [gpt2.encode("  on")] * 4


def test_empty_context_is_endoftext(tmp_path, gpt2):
    example, = hellaswag.load(write(tmp_path / "a.jsonl", [dict(ACTIVITY, ctx="")]), gpt2, 64)
    assert example.context == [50256]


def test_pack():
    """The row of pack()'s docstring, letters a, b, c being 1, 2, 3, with a shorter row below it."""
    first = hellaswag.Example(0, 0, [1, 2, 3], [[4, 5, 6], [7, 8], [9], [10, 11]], None, False)
    second = hellaswag.Example(1, 0, [1], [[2], [3], [4, 5], [6]], None, False)
    idx, pos, mask, source, target, ending = hellaswag.pack([first, second])
    assert idx.tolist() == [[1, 2, 3, 4, 5, 7, 10], [1, 4, 0, 0, 0, 0, 0]]
    assert pos.tolist() == [[0, 1, 2, 3, 4, 3, 3], [0, 1, 0, 0, 0, 0, 0]]
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 0, 1]]
    assert mask.any(-1).all()  # a row that sees nothing would be NaN
    assert source.tolist() == [2, 3, 4, 2, 5, 2, 2, 6, 7, 7, 7, 8, 7]
    assert target.tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 2, 3, 4, 5, 6]
    assert ending.tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 4, 5, 6, 6, 7]


@pytest.mark.parametrize("batch_tokens", [1, 30, 64, 10**9])
def test_batches(batch_tokens):
    sizes = [7, 30, 8, 8, 21, 1, 30, 2]
    examples = [hellaswag.Example(0, 0, [0] * n, [[0]] * 4, None, False) for n in sizes]
    batches = hellaswag.make_batches(examples, batch_tokens)
    assert sorted(sum(batches, [])) == list(range(len(sizes)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(sizes[i] for i in batch) <= batch_tokens
    assert sizes[batches[0][0]] == 30


# --- Losses --------------------------------------------------------------------------------------

def one_at_a_time(directory, path, protocol, block_size, limit=None):
    """(n, 4) losses and lengths by transformers, one ending at a time, no padding."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = GPT2LMHeadModel.from_pretrained(directory).eval()
    losses, lengths = [], []

    def encode(text):
        return tokenizer(text)["input_ids"] if text else []

    for line in Path(path).read_text(encoding="utf-8").splitlines()[:limit]:
        row = json.loads(line)
        if protocol == "nanogpt":
            context = encode(row["ctx"])
            endings = [encode(" " + ending) for ending in row["endings"]]
            lengths.append([len(ids) for ids in endings])
        else:
            query = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
            query, *choices = (hellaswag.clean(text) for text in (query, *row["endings"]))
            context = encode(query.rstrip())
            endings = [encode(query + " " + choice)[len(context):] for choice in choices]
            lengths.append([len(choice) for choice in choices])
        context = context[-(block_size + 1 - max(map(len, endings))):]
        for ids in endings:
            idx = torch.tensor([context + ids])
            with torch.no_grad():
                logits = model(idx, logits_to_keep=len(ids) + 1).logits[0, :-1]
            logprob = logits.log_softmax(-1)[range(len(ids)), ids]
            losses.append(-logprob.double().sum())
    return torch.stack(losses).view(-1, 4), torch.tensor(lengths)


def check_parity(directory, path, protocol="nanogpt", block_size=256, limit=None, **options):
    encoding = load_tokenizer(directory)
    want, lengths = one_at_a_time(directory, path, protocol, block_size, limit)
    examples = hellaswag.load(path, encoding, block_size, protocol, limit or 0)
    got = hellaswag.evaluate(load_model(directory), examples, **options)
    assert got.shape == want.shape
    assert torch.tensor([example.lengths for example in examples]).equal(lengths)
    assert (got - want).abs().max() < 1e-4
    for loss, reference in (got, want), (got / lengths, want / lengths):
        assert loss.argmin(-1).equal(reference.argmin(-1))
    return want / lengths


@pytest.mark.parametrize("protocol", ["nanogpt", "lm_eval"])
@pytest.mark.parametrize("batch_tokens", [1, 2048])
def test_parity_with_transformers(tiny, data, protocol, batch_tokens):
    check_parity(tiny, data, protocol, batch_tokens=batch_tokens)


def test_parity_with_padded_vocabulary(in_bytes, data):
    """257 ids lie in 384 rows: the other 127 have no share in the sum."""
    check_parity(in_bytes, data, "lm_eval")


def test_parity_of_cropped_contexts(tiny, data, gpt2):
    block_size = 20
    cropped = [example.cropped for example in hellaswag.load(data, gpt2, block_size)]
    assert cropped == [True, False, False]
    check_parity(tiny, data, block_size=block_size)


@pytest.mark.skipif(not VAL_500.exists(), reason="no hellaswag_val_500.jsonl")
@pytest.mark.parametrize("protocol, limit", [
    ("nanogpt", 100), ("lm_eval", 40), pytest.param("nanogpt", 500, marks=pytest.mark.slow),
    pytest.param("lm_eval", 500, marks=pytest.mark.slow)])
def test_parity_on_the_validation_set(tiny, protocol, limit):
    a_token = check_parity(tiny, str(VAL_500), protocol, limit=limit)
    if protocol == "nanogpt":
        assert a_token.std() > 0.4  # nats, of means over some 14 tokens: not flat
        assert (a_token.argmin(-1).bincount() > limit / 8).all()


def test_bfloat16_is_near(tiny, data, gpt2):
    examples = hellaswag.load(data, gpt2, 256)
    model = load_model(tiny)
    want = hellaswag.evaluate(model, examples)
    with torch.autocast("cpu", torch.bfloat16):
        got = hellaswag.evaluate(model, examples)
    assert 0 < (got / want - 1).abs().max() < 0.01


def test_evaluating_leaves_no_trace(tiny, data, gpt2):
    model = load_model(tiny).train()
    model.config.dropout = model.transformer.h[0].attn.dropout = 0.5
    examples = hellaswag.load(data, gpt2, 256)
    before, state = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    first = hellaswag.evaluate(model, examples)
    assert first.equal(hellaswag.evaluate(model, examples))  # no dropout
    assert torch.get_rng_state().equal(state)
    assert all(module.training for module in model.modules())
    for p, old in zip(model.parameters(), before, strict=True):
        assert p.grad is None and p.equal(old)
    assert not first.requires_grad


@pytest.mark.parametrize("world_size", [2, 3, 50])
def test_ranks_add_up(tiny, data, gpt2, world_size):
    examples = hellaswag.load(data, gpt2, 256) * 3
    model = load_model(tiny)
    want = hellaswag.evaluate(model, examples, 64)
    parts = [hellaswag.evaluate(model, examples, 64, r, world_size) for r in range(world_size)]
    assert sum(parts).equal(want)
    assert ((torch.stack(parts) != 0).sum(0) == 1).all()


def one_rank(rank, folder, directory, path):
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    torch.set_num_threads(1)
    examples = hellaswag.load(path, load_tokenizer("bytes"), 256)
    losses = hellaswag.evaluate(load_model(directory), examples, 64, rank, 2)
    torch.save(losses, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes(in_bytes, data, tmp_path):
    mp.spawn(one_rank, (str(tmp_path), in_bytes, data), nprocs=2)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    examples = hellaswag.load(data, load_tokenizer("bytes"), 256)
    want = hellaswag.evaluate(load_model(in_bytes), examples, 64)
    assert found[0].equal(found[1])
    assert torch.allclose(found[0], want, rtol=0, atol=1e-4)


def test_score_by_hand():
    examples = [hellaswag.Example(0, label, [], [], lengths, False) for label, lengths in (
        (1, [1, 1, 1, 1]), (0, [4, 1, 1, 1]), (2, [1, 1, 1, 1]), (3, [1, 1, 9, 3]))]
    losses = torch.tensor([[2., 1, 3, 4], [4, 2, 3, 5], [1, 2, 1, 3], [7, 7, 36, 9]])
    result = hellaswag.score(examples, losses)  # ties go to the first, as argmax has it
    assert (result["acc"], result["acc_norm"], result["n"]) == (0.25, 0.75, 4)
    assert result["acc_stderr"] == pytest.approx(math.sqrt(0.25 * 0.75 / 3))
    assert result["acc_norm_stderr"] == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
    assert hellaswag.score(examples[:1], losses[:1])["acc_stderr"] == 0


# --- The command ---------------------------------------------------------------------------------

def test_command(tiny, tmp_path, cli):
    path = tmp_path / "odd.jsonl"  # blank lines, one of spaces, no line end after the last row
    path.write_text("\n".join(json.dumps(row) + "\n   " for row in ROWS).rstrip(), encoding="utf-8")
    out = tmp_path / "losses.jsonl"
    code, stdout, stderr = cli(f"--checkpoint={tiny}", f"--hellaswag_data={path}", f"--out={out}",
                               "--dtype=float32")
    assert code == 0 and "settings:" in stderr and "HellaSwag" in stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["ind"], row["label"]) for row in rows] == [(7, 2), (24, 0), (25, 3)]
    assert all(set(row) == {"ind", "label", "loss_sum", "loss_norm"} for row in rows)
    want, lengths = one_at_a_time(tiny, write(path, ROWS), "nanogpt", 256)
    assert torch.allclose(torch.tensor([row["loss_sum"] for row in rows]).double(), want, atol=1e-4)
    assert torch.allclose(torch.tensor([row["loss_norm"] for row in rows]).double(), want / lengths)
    acc = (want.argmin(-1) == torch.tensor([2, 0, 3])).double().mean()
    assert f"acc      {acc:.4f} +- " in stdout and "acc_norm " in stdout
    assert "protocol nanogpt: 3 of the 10,042 examples, 0 of them with a context cropped" in stdout
    assert sorted(os.listdir(tmp_path)) == ["losses.jsonl", "odd.jsonl"]


def test_limit_and_protocol(tiny, data, cli):
    args = f"--checkpoint={tiny}", f"--hellaswag_data={data}", "--protocol=lm_eval"
    assert "protocol lm_eval: 1 of" in cli(*args, "--limit=1")[1]
    assert "protocol lm_eval: 3 of" in cli(*args, "--limit=0")[1]
    assert "protocol lm_eval: 3 of" in cli(*args, "--limit=9")[1]


def test_spare_ids_and_no_tokenizer(tmp_path, data, cli):
    """As nanoGPT rounds its vocabulary; without tokenizer files it is taken to be GPT-2's."""
    folder = make(tmp_path / "m", vocab_size=50304)
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        (tmp_path / "m" / name).unlink()
    assert cli(f"--checkpoint={folder}", f"--hellaswag_data={data}")[0] == 0


def test_cropped_contexts_are_counted(tmp_path, data, cli):
    folder = make(tmp_path / "m", n_positions=20)
    stdout = cli(f"--checkpoint={folder}", f"--hellaswag_data={data}")[1]
    assert "1 of them with a context cropped to fit block_size=20" in stdout


GOOD = json.dumps(ACTIVITY)


@pytest.mark.parametrize("text, words", [
    (GOOD + "\n" + GOOD[:50], ["line 2", "cut short"]),
    ("<html>404</html>", ["line 1", "another file"]),
    ("\n" + json.dumps(dict(ACTIVITY, label="")), ["line 2", "no label", "test split"]),
    (json.dumps({key: ACTIVITY[key] for key in ("ctx", "endings")}), ["line 1", "no label"]),
    (json.dumps(dict(ACTIVITY, label=4)), ["line 1", "label 4"]),
    (json.dumps(dict(ACTIVITY, endings=["a", "b", "c"])), ["line 1", "3 endings"]),
    (json.dumps(dict(label=1, endings=["a"] * 4)), ["line 1", "not a row of HellaSwag", "ctx"]),
    ("[1, 2]", ["line 1", "not a row of HellaSwag"]),
    (json.dumps(dict(ACTIVITY, endings=["a", "b", "c", "d " * 300])), ["block_size=256", "line 1"]),
    ("", ["no rows"]),
    (None, ["FileNotFoundError", "hellaswag_interval=0"]),
])
def test_bad_data_is_one_line(tiny, tmp_path, cli, text, words):
    path, out = tmp_path / "x.jsonl", tmp_path / "out.jsonl"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    code, stdout, stderr = cli(f"--checkpoint={tiny}", f"--hellaswag_data={path}", f"--out={out}")
    assert code == 2 and stdout == "" and not out.exists()
    message = stderr.strip().splitlines()[-1]
    assert all(word in message for word in [*words, "x.jsonl"]), message
    assert "Traceback" not in stderr


@pytest.mark.parametrize("flag, words", [
    ("--protocol=harness", "lm_eval"),
    ("--limit=-1", "limit=-1"),
    ("--batch_tokens=0", "batch_tokens=0"),
    ("--out=no/such/folder/x.jsonl", "no/such/folder"),
    ("--out=.", "out=."),
    ("--checkpoint=/no/such/model", "/no/such/model"),
    ("--out_dir=nothing_here", "no checkpoint in nothing_here"),
])
def test_bad_settings_are_one_line(tiny, data, cli, flag, words):
    args = [f"--hellaswag_data={data}", flag]
    if "out_dir" not in flag:
        args.insert(0, f"--checkpoint={tiny}")
    code, stdout, stderr = cli(*args)
    assert code == 2 and stdout == "" and "Traceback" not in stderr
    assert words in stderr.strip().splitlines()[-1]


def test_another_tokenizer_is_refused(tmp_path, data, cli):
    folder = make(tmp_path / "m")
    save_tokenizer(load_tokenizer("bytes"), folder)
    code, _, stderr = cli(f"--checkpoint={folder}", f"--hellaswag_data={data}")
    assert code == 2 and "50257" in stderr and "257" in stderr


def test_losses_that_are_not_finite(tmp_path, data, cli):
    folder = make(tmp_path / "m", tokenizer="bytes", initializer_range=1e30)
    code, stdout, stderr = cli(f"--checkpoint={folder}", f"--hellaswag_data={data}")
    assert code == 2 and stdout == "" and "finite" in stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("count", [10041, 10042])
def test_hub_set_has_to_be_whole(in_bytes, tmp_path, run, count):
    """A folder goes through load_dataset as a hub id does; its labels are strings, as the hub's."""
    from datasets import Dataset
    (tmp_path / "set").mkdir()
    row = dict(ACTIVITY, label="0")
    Dataset.from_list([row] * count).to_parquet(str(tmp_path / "set" / "validation.parquet"))
    done = run("hellaswag.py", f"--checkpoint={in_bytes}", "--hellaswag_data=set", "--limit=3",
               cwd=tmp_path, env=dict(HF_HOME=str(tmp_path / "home")))
    if count == 10042:
        assert done.returncode == 0 and "3 of the 10,042" in done.stdout, done.stderr
    else:
        message = done.stderr.strip().splitlines()[-1]
        assert done.returncode == 2 and "10,041" in message and "10,042" in message


def test_unreachable_hub(in_bytes, cli, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    code, stdout, stderr = cli(f"--checkpoint={in_bytes}")
    message = stderr.strip().splitlines()[-1]
    assert code == 2 and stdout == "" and "Traceback" not in stderr
    assert all(word in message for word in ("hellaswag_data=Rowan/hellaswag", "hellaswag_interval",
                                            "hellaswag_val.jsonl"))


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_compiled_is_the_same(in_bytes, data, cli, tmp_path):
    losses = []
    for flag in ("--compile=True", "--compile=False"):
        out = tmp_path / "o.jsonl"
        code, _, stderr = cli(f"--checkpoint={in_bytes}", f"--hellaswag_data={data}", flag,
                              f"--out={out}", "--batch_tokens=200", "--dtype=float32")
        assert code == 0 and "can't compile" not in stderr
        losses.append([json.loads(line)["loss_sum"] for line in out.read_text().splitlines()])
    assert torch.allclose(*map(torch.tensor, losses), rtol=0, atol=1e-4)


def test_no_compiler(in_bytes, data, run, tmp_path):
    """One warning, then the same result; also: no default text encoding is relied upon."""
    env = dict(PATH=os.path.dirname(sys.executable), CXX="/no/such/compiler",
               TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"), PYTHONIOENCODING="ascii",
               PYTHONWARNDEFAULTENCODING="1")
    done = run("hellaswag.py", f"--checkpoint={in_bytes}", f"--hellaswag_data={data}",
               "--compile=True", env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("can't compile") == 1 and "Traceback" not in done.stderr
    assert "acc_norm " in done.stdout
    assert "EncodingWarning" not in "".join(
        line for line in done.stderr.splitlines() if str(REPO) in line)


@pytest.mark.skipif(os.name != "posix", reason="a pipe by name")
def test_ctrl_c_leaves_no_traceback(in_bytes, tmp_path):
    os.mkfifo(tmp_path / "never.jsonl")  # reading it waits for a writer
    command = [sys.executable, REPO / "hellaswag.py", f"--checkpoint={in_bytes}",
               f"--hellaswag_data={tmp_path / 'never.jsonl'}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline().startswith("settings:")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0 and "Traceback" not in process.stderr.read()


@pytest.mark.skipif(os.name != "posix", reason="pipes and links")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_keeps_the_losses(in_bytes, data, tmp_path, unbuffered):
    (tmp_path / "real").write_text("old")
    os.symlink("real", tmp_path / "link")
    command = [sys.executable, REPO / "hellaswag.py", f"--checkpoint={in_bytes}", f"--hellaswag_data={data}",
               f"--out={tmp_path}/link"]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
        process.stdout.close()
        said = process.stderr.read().decode()
        assert process.wait(60) == 1 and "Traceback" not in said and "Exception" not in said, said
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text().count("loss_sum") == 3


@pytest.mark.skipif(os.name != "posix", reason="no ulimit")
def test_a_full_disk_leaves_the_result(in_bytes, data, tmp_path):
    rows = tmp_path / "many.jsonl"
    rows.write_text(Path(data).read_text(encoding="utf-8") * 9, encoding="utf-8")
    command = (f"ulimit -f 1; {sys.executable} {REPO}/hellaswag.py --checkpoint={in_bytes} "
               f"--hellaswag_data={rows} --out={tmp_path}/o")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 2 and "acc_norm" in done.stdout, done.stderr
    assert "File too large" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no devices")
def test_a_device_is_not_replaced(in_bytes, data, cli):
    code, shown, err = cli(f"--checkpoint={in_bytes}", f"--hellaswag_data={data}", "--out=/dev/full")
    assert code == 2 and "no plain file" in err and not shown


def test_import_only_defines_names():
    code = ("import sys, hellaswag; "
            "assert not {'train', 'datasets', 'tiktoken'} & set(sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout + done.stderr == "", done.stderr


# --- Faults that were put in on purpose and that no test had seen

def test_a_context_of_just_the_room(tmp_path):
    row = dict(ACTIVITY, ctx="abcdef", endings=["xyz"] * 4)  # in bytes 6 and, with a space, 4
    path, encoding = write(tmp_path / "a.jsonl", [row]), load_tokenizer("bytes")
    for block_size, context, cropped in ((9, b"abcdef", False), (8, b"bcdef", True), (4, b"f", True)):
        example, = hellaswag.load(path, encoding, block_size)
        assert (bytes(example.context), example.cropped) == (context, cropped)
    with pytest.raises(SystemExit):
        hellaswag.load(path, encoding, 3)


def test_batch_tokens_arrive(in_bytes, data, cli, monkeypatch):
    from train import GPT
    sizes, real = [], GPT.hidden
    monkeypatch.setattr(GPT, "hidden", lambda self, idx, *a: sizes.append(len(idx)) or real(self, idx, *a))
    for batch_tokens, want in ((1, [1, 1, 1]), (2048, [3])):
        sizes.clear()
        assert cli(f"--checkpoint={in_bytes}", f"--hellaswag_data={data}", f"--batch_tokens={batch_tokens}")[0] == 0
        assert sizes == want


def test_an_ending_of_markup_alone(tmp_path, gpt2):
    row = dict(ACTIVITY, endings=["[step]", "a", "b", "c"])
    example, = hellaswag.load(write(tmp_path / "a.jsonl", [row]), gpt2, 64, "lm_eval")
    assert example.lengths == [1, 1, 1, 1]


def test_evaluating_in_eval_mode_stays_there(tiny, data, gpt2):
    model = load_model(tiny)
    hellaswag.evaluate(model, hellaswag.load(data, gpt2, 256))
    assert not any(module.training for module in model.modules())


def test_the_dtype_arrives(in_bytes, data, cli, tmp_path):
    def losses(dtype):
        assert cli(f"--checkpoint={in_bytes}", f"--hellaswag_data={data}", f"--dtype={dtype}", f"--out={tmp_path}/o")[0] == 0
        return [json.loads(line)["loss_sum"] for line in (tmp_path / "o").open()]
    assert losses("bfloat16") != losses("float32")


def test_rows_in_a_file_of_any_name(tmp_path, gpt2):
    assert len(hellaswag.load(write(tmp_path / "hellaswag_val.json", ROWS), gpt2, 256)) == 3
