"""prepare.py against a naive reference of llm.c's script, against kills, and against odd input."""
import contextlib
import glob
import gzip
import hashlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import prepare

REPO = Path(__file__).resolve().parent.parent
WORDS = "the of and energy Ünïcode 中文 <|endoftext|> it's 2024 \n\n  \t models don't 😀 é".split(" ")


def documents(n, seed=0, words=60):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randrange(1, words))) for _ in range(n)]


def reference(texts, encoding, val_tokens, shard_size):
    """llm.c's FineWeb script, token by token: the tokens of the val shard and of each train shard."""
    shards, size = [[]], val_tokens
    for text in texts:
        for token in [encoding.eot_token, *encoding.encode_ordinary(text or "")]:
            if len(shards[-1]) == size:
                shards.append([])
                size = shard_size
            shards[-1].append(token)
    return shards


def write_parquet(path, texts, row_group_size=7):
    import pyarrow
    import pyarrow.parquet
    table = pyarrow.table({"n": range(len(texts)), "text": pyarrow.array(texts, pyarrow.string())})
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)
    return path


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def fresh(*args):
    """A module of its own, as settings are its globals, and main's arguments in place."""
    spec = importlib.util.spec_from_file_location("prepare_again", REPO / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.argv = ["prepare.py", *map(str, args)]
    return module


@pytest.fixture
def main(monkeypatch, tmp_path):
    """main("--key=value"): prepare.py in this process, in tmp_path; returns the folder data/x."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])

    def main(*args, module=None):
        module = module or fresh()
        sys.argv = ["prepare.py", "--dataset=x", "--tokenizer=bytes", *map(str, args)]
        try:
            module.main()
        finally:
            while module.LOCKS:
                module.LOCKS.pop().close()
        return tmp_path / "data" / "x"
    return main


def tokens_of(folder, split):
    return [prepare.read_tokens(s, 0, s.tokens).tolist() for s in prepare.find_shards(folder, split)]


def hashes(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in Path(folder).glob("*.bin")}


# --- The bytes --------------------------------------------------------------------------------------

@pytest.mark.parametrize("tokenizer", ["gpt2", "bytes"])
@pytest.mark.parametrize("num_proc", [1, 3])
def test_shards_equal_llmc(main, tmp_path, tokenizer, num_proc):
    texts = documents(150) + ["", None, "x" * 3000, "<|endoftext|>"] + documents(50, seed=1)
    source = write_parquet(tmp_path / "t.parquet", texts)
    folder = main(f"--source={source}", f"--tokenizer={tokenizer}", "--shard_size=1000",
                  "--val_tokens=1000", f"--num_proc={num_proc}")
    want = reference(texts, prepare.load_tokenizer(tokenizer), 1000, 1000)
    assert len(want) > 4
    for i, (path, tokens) in enumerate(zip(sorted(folder.glob("*.bin"), key=lambda p: p.name[-10:]),
                                           want, strict=True)):
        header = [20240520, 1, len(tokens)] + [0] * 253
        assert path.name == f"x_{'train' if i else 'val'}_{i:06}.bin"
        assert path.read_bytes() == (np.array(header, "<i4").tobytes()
                                     + np.array(tokens, "<u2").tobytes())
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    assert (meta["documents"], meta["tokens"]) == (len(texts), sum(map(len, want)))
    assert meta["bytes"] == sum(len((text or "").encode()) for text in texts)
    assert {s["file"]: s["sha256"] for s in meta["shards"]} == hashes(folder)


def test_val_and_train_sizes(main, tmp_path):
    texts = documents(100)
    folder = main(f"--source={write_jsonl(tmp_path / 't.jsonl', texts)}", "--val_tokens=300",
                  "--shard_size=2000")
    want = reference(texts, prepare.load_tokenizer("bytes"), 300, 2000)
    assert tokens_of(folder, "val") == want[:1]
    assert tokens_of(folder, "train") == want[1:]


def test_max_tokens(main, tmp_path):
    texts = documents(100)
    folder = main(f"--source={write_jsonl(tmp_path / 't.jsonl', texts)}", "--val_tokens=300",
                  "--shard_size=1000", "--max_tokens=2500")
    want = reference(texts, prepare.load_tokenizer("bytes"), 300, 1000)
    assert tokens_of(folder, "train") == [want[1], want[2], want[3][:200]]


@pytest.mark.parametrize("n", [1, 2, 10])
def test_small_corpus(main, tmp_path, n):
    texts = documents(n, words=90)
    folder = main(f"--source={write_jsonl(tmp_path / 't.jsonl', texts)}", "--shard_size=150")
    whole = sum(reference(texts, prepare.load_tokenizer("bytes"), 10**9, 1), [])
    val, train = tokens_of(folder, "val"), tokens_of(folder, "train")
    assert val == [whole[:len(whole) // 10]]
    assert sum(train, []) == whole[len(whole) // 10:]  # disjoint, and none empty
    assert {len(shard) for shard in train[:-1]} <= {150}


@pytest.mark.parametrize("texts", [[], [""]])
def test_too_small(main, tmp_path, texts, capsys):
    source = write_parquet(tmp_path / "t.parquet", texts)
    with pytest.raises(SystemExit) as exit:
        main(f"--source={source}")
    assert exit.value.code == 2
    assert f"has {len(texts)} tokens" in capsys.readouterr().err


# --- Sources ----------------------------------------------------------------------------------------

def test_every_kind_of_file(main, tmp_path):
    texts = [text.replace("\r", "") for text in documents(20)]
    paths = [write_jsonl(tmp_path / "a.jsonl", texts), write_parquet(tmp_path / "b.parquet", texts)]
    (tmp_path / "c.json").write_text(json.dumps([{"text": t} for t in texts]), encoding="utf-8")
    (tmp_path / "txt").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "txt" / f"{i:02}[x].txt").write_bytes(b"\xef\xbb\xbf" * (i % 2) + text.encode())
        (tmp_path / "txt" / f"{i:02}.txt.gz").write_bytes(gzip.compress(text.encode()))
    for path in [*paths, tmp_path / "c.json"]:
        Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
    want = None
    for source in ("a.jsonl", "a.jsonl.gz", "b.parquet", "b.parquet.gz", "c.json", "c.json.gz",
                   "txt/*.txt", "txt/*.gz", str(tmp_path / "txt" / "*.gz")):
        folder = main(f"--source={source}")
        have = hashes(folder)
        want = want or have
        assert have == want, source
        for path in folder.iterdir():
            path.unlink()


def test_text_key_and_nested_glob(main, tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.jsonl").write_text(json.dumps({"id": i, "body": f"text {i} " * 9}) + "\n")
    folder = main("--source=*.jsonl", "--text_key=body")
    whole = sum(tokens_of(folder, "val") + tokens_of(folder, "train"), [])
    assert prepare.load_tokenizer("bytes").decode(whole) == "".join(
        "<|endoftext|>" + f"text {i} " * 9 for i in range(3))


def test_other_columns_may_differ(main, tmp_path):
    """From file to file, and in JSON lines from row to row: only the text is asked for."""
    import pyarrow
    import pyarrow.parquet
    texts = documents(60)
    others = {"id": 7}, {"id": "x", "url": "y"}, {"m": {"a": 1}}, {"m": [2]}, {}
    rows = [{"text": text} | others[i // 20] for i, text in enumerate(texts)]
    for i in range(3):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[20 * i:20 * i + 20]), f"{i}.parquet")
    folder = main("--source=*.parquet")
    want = hashes(folder)
    for path in folder.iterdir():
        path.unlink()
    rows = [others[i % 5] | {"text": text} for i, text in enumerate(texts)]
    lines = "".join("\n" + json.dumps(row) + "\n" for row in rows)
    Path("t.jsonl").write_text("\ufeff" + lines + "\n\n", encoding="utf-8")
    assert hashes(main("--source=t.jsonl")) == want


def test_json_lines_keep_what_is_in_a_text(main, tmp_path):
    texts = ["a\u2028b\x85c\r\nd", "half \ud800 a pair", "\0", *documents(9)]
    lines = [json.dumps({"text": text}, ensure_ascii=i != 0) for i, text in enumerate(texts)]
    Path("t.jsonl").write_text("\n".join([*lines, '{"text": null}', '{"id": 3}']), encoding="utf-8")
    folder = main("--source=t.jsonl")
    texts[1] = texts[1].replace("\ud800", "\ufffd")
    whole = sum(tokens_of(folder, "val") + tokens_of(folder, "train"), [])
    assert prepare.load_tokenizer("bytes").decode(whole) == "".join(
        "<|endoftext|>" + text for text in [*texts, "", ""])


BAD = {
    "latin.txt": (b"caf\xe9 au lait", "latin.txt"),
    "latin.jsonl": (b'{"text": "caf\xe9"}\n', "latin.jsonl"),
    "cut.jsonl": (b'{"text": "a"}\n{"text": \n', "cut.jsonl"),
    "list.jsonl": (b'{"text": "a"}\n["b"]\n', "list.jsonl: a line that is no JSON object"),
    "object.jsonl": (b'{"text": {"de": "a"}}\n', "no text in column 'text'"),
    "late.jsonl": (b'{"text": "a"}\n' * 9 + b'{"body": "a"}\n' * 9, "pick --text_key from: body"),
    "no.parquet": (b"PAR1 but no more than that", "no.parquet"),
    "empty.jsonl": (b"", "has 0 tokens"),
    "columns.jsonl": (b'{"body": "a", "title": "b"}\n', "body, title"),
    "number.jsonl": (b'{"text": 7}\n', "no text in column 'text'"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "a long enough line"}\n')[:20], "cut.jsonl"),
    "what.doc": (b"no known kind", "what.doc"),
    "bits.txt.gz": (gzip.compress(b"a")[:10] + b"\xff" * 40, "bits.txt"),
    "deep.jsonl": (b'{"text": ' + b"[" * 10**5 + b"\n", "deep.jsonl"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_file_is_one_line(main, tmp_path, name, capfd):
    content, words = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as exit:
        main(f"--source={name}")
    error = capfd.readouterr().err
    assert exit.value.code == 2
    assert words in error
    assert error.count("\n") == 1, error


def test_files_of_two_kinds_are_refused(main, tmp_path, capfd):
    """One reader takes them all: the lines of b.jsonl would be one document's text."""
    write_jsonl(tmp_path / "b.jsonl", documents(9))
    (tmp_path / "a.txt").write_text("text " * 99)
    with pytest.raises(SystemExit) as exit:
        main("--source=*.*")
    assert (exit.value.code, (err := capfd.readouterr().err).count("\n")) == (2, 1) and "in one of" in err


def test_ctrl_c_while_it_starts_is_one_line(tmp_path):
    code = ("import runpy, sys, tiktoken\n"
            "def stop(name): raise KeyboardInterrupt\n"
            "tiktoken.get_encoding = stop\n"
            f"sys.path.insert(0, {str(REPO)!r}); sys.argv = ['prepare.py', '--dataset=x', '--source=pydocs']\n"
            f"runpy.run_path({str(REPO / 'prepare.py')!r}, run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr.strip().count("\n") == 0 and "same command" in done.stderr


@pytest.mark.parametrize("kind", ["t.txt", "t.jsonl.gz", "t.json", "t.parquet", "t.parquet.gz"])
def test_brackets_in_the_working_directory(main, tmp_path, monkeypatch, kind):
    """A glob over run[1]/t.txt finds run1/t.txt."""
    texts = documents(40)
    for folder, some in (("run1", documents(40, seed=5)), ("run[1]", texts)):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / kind.removesuffix(".gz")
        if "parquet" in kind:
            write_parquet(path, some)
        elif kind == "t.txt":
            path.write_text("".join(some), encoding="utf-8")
        else:
            write_jsonl(path, some)
        if kind.endswith(".gz"):
            Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
    monkeypatch.chdir(tmp_path / "run[1]")
    main(f"--source={kind}")
    want = reference(["".join(texts)] if kind == "t.txt" else texts, prepare.load_tokenizer("bytes"), 10**9, 1)
    folder = tmp_path / "run[1]" / "data" / "x"
    got = tokens_of(folder, "val")[0] + tokens_of(folder, "train")[0]
    assert got == want[0]


def test_a_folder_is_no_source(main, tmp_path, capfd):
    """datasets would take a .txt file's lines for documents."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("a\nb\nc\n")
    with pytest.raises(SystemExit) as exit:
        main("--source=notes")
    error = capfd.readouterr().err
    assert (exit.value.code, error.count("\n")) == (2, 1) and "--source='notes/**/*.txt'" in error


@pytest.mark.parametrize("source", ["nothing/*.txt", "missing.jsonl", "someone/no-such-data-set"])
def test_missing_source(main, source, capfd):
    with pytest.raises(SystemExit) as exit:
        main(f"--source={source}")
    error = capfd.readouterr().err
    assert (exit.value.code, error.count("\n")) == (2, 1)
    assert source in error


def test_hub_path(main, tmp_path, monkeypatch):
    import datasets
    texts, real, calls = documents(60), datasets.load_dataset, []
    path = write_parquet(tmp_path / "t.parquet", texts)

    def load_dataset(path_or_id, **options):
        calls.append((path_or_id, options))
        return real("parquet", data_files=[str(path)], split="train", streaming=True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    folder = main("--source=some/where", "--source_config=tiny", "--split=test", "--shard_size=1000",
                  "--val_tokens=1000")
    assert calls == [("some/where", {"name": "tiny", "split": "test", "streaming": True,
                                     "revision": None})]
    want = reference(texts, prepare.load_tokenizer("bytes"), 1000, 1000)
    assert tokens_of(folder, "val") + tokens_of(folder, "train") == want


def flaky(texts, trouble):
    """A load_dataset whose stream calls trouble(i) before text i."""
    import datasets

    def rows():
        for i, text in enumerate(texts):
            trouble(i)
            yield {"text": text}
    return lambda *args, **options: datasets.IterableDataset.from_generator(rows)


def test_source_fails_twice_then_works(main, monkeypatch, capsys):
    import datasets
    texts, failures, waits = documents(80), [], []

    def trouble(i):
        if i == 40 and len(failures) < 2:
            failures.append(i)
            raise TimeoutError("read timed out")
    module = fresh()
    module.GROUP = 500
    monkeypatch.setattr(datasets, "load_dataset", flaky(texts, trouble))
    monkeypatch.setattr(module.time, "sleep", waits.append)
    folder = main("--source=a/b", "--shard_size=1000", "--val_tokens=1000", module=module)
    want = reference(texts, prepare.load_tokenizer("bytes"), 1000, 1000)
    assert tokens_of(folder, "val") + tokens_of(folder, "train") == want
    assert len(failures) == 2
    assert waits == sorted(waits) and len(set(waits)) == 2  # it backs off
    assert capsys.readouterr().err.count("trying again") == 2


def test_source_fails_for_good_then_resumes(main, monkeypatch, capsys):
    import datasets
    texts, broken = documents(80), [True]

    def trouble(i):
        if i == 60 and broken:
            raise ConnectionError("no route")
    monkeypatch.setattr(datasets, "load_dataset", flaky(texts, trouble))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    args = ("--source=a/b", "--shard_size=1000", "--val_tokens=1000")

    def small():
        module = fresh()
        module.GROUP, module.FLIGHT = 500, 0
        return module
    with pytest.raises(SystemExit) as exit:
        main(*args, module=small())
    assert exit.value.code == 2
    assert "no route" in capsys.readouterr().err
    kept = {p: p.stat().st_mtime_ns for p in Path("data/x").glob("*.bin")}
    assert kept
    broken.clear()
    folder = main(*args, module=small())
    want = reference(texts, prepare.load_tokenizer("bytes"), 1000, 1000)
    assert tokens_of(folder, "val") + tokens_of(folder, "train") == want
    assert all(path.stat().st_mtime_ns == then for path, then in kept.items())


def test_lone_surrogates_are_repaired(main, monkeypatch):
    import datasets
    texts = ["a \ud800 b", "pair \ud83d\ude00", "plain"] * 9
    monkeypatch.setattr(datasets, "load_dataset", flaky(texts, lambda i: None))
    folder = main("--source=a/b", "--tokenizer=gpt2")
    whole = sum(tokens_of(folder, "val") + tokens_of(folder, "train"), [])
    assert whole == sum(reference(texts, prepare.load_tokenizer("gpt2"), 10**9, 1), [])


def test_pydocs(tmp_path, monkeypatch):
    def module(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    long = "Words that are long enough to count as a document of their own." * 4
    code = f'''"""Module {long}"""
def spam(eggs):
    """Return spam.

        Indented by hand.
    Eggs.
    """
class Ham:
    "A \\ud800 surrogate."
    async def cure(self): "Wait."
raise SystemExit("imported")
'''
    module("good.py", code)
    module("sub/package.py", code)
    module("broken.py", "print 'two'")
    module("brief.py", '"""Too little."""')
    module("site-packages/other.py", code)
    monkeypatch.setattr(os, "__file__", str(tmp_path / "os.py"))
    texts = prepare.pydocs()
    good, = (text for text in texts if text.startswith("good\n"))
    assert good.split("\n\n\n") == [
        f"good\n\nModule {long}", "spam\n\nReturn spam.\n\n    Indented by hand.\nEggs.",
        "Ham\n\nA ? surrogate.", "cure\n\nWait."]
    assert sum(long in text for text in texts) == 2
    assert len(texts) > 60  # the topics
    assert texts == prepare.pydocs()
    assert texts != sorted(texts)


# --- Odd documents ----------------------------------------------------------------------------------

def test_pathological_documents(main, tmp_path):
    rng = random.Random(0)
    base64 = "".join(rng.choices("ABCDEFGHabcdefgh0123456789+/", k=1_000_000))
    texts = ["before", "a" * 10**6, "^" * 10**6, " " * 10**6, "\u200b" * 300_000, "-" * 10**6,
             base64, "after"]
    start = time.time()
    folder = main(f"--source={write_jsonl(tmp_path / 't.jsonl', texts)}", "--tokenizer=gpt2",
                  "--num_proc=2")
    assert time.time() - start < 30
    whole = np.concatenate([prepare.read_tokens(s, 0, s.tokens) for split in ("val", "train")
                            for s in prepare.find_shards(folder, split)])
    encoding = prepare.load_tokenizer("gpt2")
    pieces = encoding.decode(whole.tolist()).split("<|endoftext|>")
    assert pieces == ["", *texts]


def test_a_panic_names_the_document(main, tmp_path, monkeypatch, capsys):
    import tiktoken

    class Panic(BaseException):
        pass
    real = tiktoken.Encoding.encode_to_numpy

    def encode_to_numpy(self, text, **options):
        if "unlucky" in text:
            raise Panic("stack overflow")
        return real(self, text, **options)
    monkeypatch.setattr(tiktoken.Encoding, "encode_to_numpy", encode_to_numpy)
    source = write_jsonl(tmp_path / "t.jsonl", [*documents(20), "an unlucky one", *documents(20)])
    with pytest.raises(SystemExit) as exit:
        main(f"--source={source}")
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert "41 documents" in error and "stack overflow" in error


@pytest.mark.parametrize("last", [65535, 65536])
def test_ids_past_uint16(main, tmp_path, monkeypatch, last, capsys):
    import tiktoken
    monkeypatch.setattr(tiktoken.Encoding, "encode_to_numpy",
                        lambda self, text, **options: np.array([1, last], np.uint32))
    source = write_jsonl(tmp_path / "t.jsonl", documents(20))
    if last == 65535:
        assert main(f"--source={source}").is_dir()
        return
    with pytest.raises(SystemExit):
        main(f"--source={source}")
    assert "65536" in capsys.readouterr().err
    assert not glob.glob("data/x/*.bin*")


# --- Kills, settings, disks -------------------------------------------------------------------------

def test_killed_at_ten_moments(tmp_path):
    texts = documents(6000)
    write_parquet(tmp_path / "t.parquet", texts, row_group_size=300)
    command = [sys.executable, str(REPO / "prepare.py"), "--source=t.parquet", "--tokenizer=bytes",
               "--shard_size=9000", "--val_tokens=9000", "--num_proc=2"]
    subprocess.run([*command, "--dataset=whole"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    want = {name.replace("whole", "killed"): value for name, value in
            hashes(tmp_path / "data" / "whole").items()}
    assert len(want) > 60
    rng, folder, seen = random.Random(7), tmp_path / "data" / "killed", {}
    for _ in range(10):
        process = subprocess.Popen([*command, "--dataset=killed"], cwd=tmp_path,
                                   stdout=subprocess.DEVNULL)
        goal = len(seen) + rng.randrange(5)
        while len(glob.glob(f"{folder}/*.bin")) <= goal and process.poll() is None:
            time.sleep(0.001)
        time.sleep(rng.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        now = {path: Path(path).stat().st_mtime_ns for path in glob.glob(f"{folder}/*.bin")}
        assert seen.items() <= now.items()  # nothing finished is written again
        for split in ("val", "train"):
            prepare.find_shards(folder, split)  # nor is anything visible incomplete
        assert hashes(folder).items() <= want.items()
        seen = now
    assert len(seen) < len(want)
    subprocess.run([*command, "--dataset=killed"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert hashes(folder) == want
    assert seen.items() <= {str(p): p.stat().st_mtime_ns for p in folder.glob("*.bin")}.items()
    metas = [json.loads((tmp_path / "data" / name / "meta.json").read_text(encoding="utf-8"))
             for name in ("whole", "killed")]
    assert all(metas[0][key] == metas[1][key] for key in ("documents", "tokens", "bytes"))
    assert not list(folder.glob("*.new")) and not list(folder.glob("*.tmp"))


class Stop(BaseException):
    pass


@pytest.mark.parametrize("step", ["write_file", "write_meta", "replace"])
@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize("write", [write_parquet, write_jsonl])
def test_stopped_between_any_two_steps(main, tmp_path, monkeypatch, step, nth, write):
    """Die before the nth time of each step of write_shard: the set comes out the same."""
    texts = documents(100)
    source = write(tmp_path / f"t.{write.__name__[6:]}", texts)
    args = (f"--source={source}", "--shard_size=1000", "--val_tokens=1000")
    module, calls = fresh(), []
    module.GROUP, module.FLIGHT = 500, 1000  # so that the place is amid the file

    def dying(real, count=lambda *args: True):
        def call(*args, **options):
            calls.extend([1] * count(*args))
            if len(calls) == nth:
                raise Stop
            return real(*args, **options)
        return call
    if step == "replace":
        real = os.replace
        monkeypatch.setattr(os, "replace", dying(real, lambda a, b: str(a).endswith(".new")))
    else:
        monkeypatch.setattr(module, step, dying(getattr(module, step),
                                                lambda *a: "meta" in step or ".new" in str(a[0])))
    with pytest.raises(Stop):
        main(*args, module=module)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    folder = main(*args, module=module)
    want = reference(texts, prepare.load_tokenizer("bytes"), 1000, 1000)
    assert tokens_of(folder, "val") + tokens_of(folder, "train") == want


def test_resuming_reads_and_tokenizes_only_the_rest(main, tmp_path, monkeypatch):
    texts = documents(400)
    source = write_parquet(tmp_path / "t.parquet", texts, row_group_size=10)
    args = (f"--source={source}", "--shard_size=2000", "--val_tokens=2000", "--num_proc=1")
    tokenized, shards = [], []

    def watched(stop_at):
        module = fresh()
        module.GROUP, module.FLIGHT = 500, 1000
        tokenize, write_shard = module.tokenize, module.write_shard

        def stopping(*args):
            write_shard(*args)
            shards.append(1)
            if len(shards) == stop_at:
                raise Stop
        module.tokenize = lambda texts: tokenized.extend(texts) or tokenize(texts)
        module.write_shard = stopping
        return module
    with pytest.raises(Stop):
        main(*args, module=watched(5))
    done = 5 * 2000
    tokenized.clear()
    reads = []
    parquet = importlib.import_module("datasets.packaged_modules.parquet.parquet").Parquet
    generate = parquet._generate_tables

    def counted(self, files, row_groups_list):
        reads.extend(row_groups_list)
        return generate(self, files, row_groups_list)
    monkeypatch.setattr(parquet, "_generate_tables", counted)
    folder = main(*args, module=watched(0))
    want = reference(texts, prepare.load_tokenizer("bytes"), 2000, 2000)
    assert tokens_of(folder, "val") + tokens_of(folder, "train") == want
    rest = sum(len(text.encode()) + 1 for text in tokenized)
    assert rest <= sum(map(len, want)) - done + 2000  # at most one group again
    assert 0 < len(reads) < 40 - 40 * done // sum(map(len, want)) + 4  # of 40 row groups


@pytest.mark.parametrize("change", ["--shard_size=2000", "--tokenizer=gpt2", "--text_key=n",
                                    "--max_tokens=500", "--world_size=2 --rank=0"])
def test_other_settings_are_refused(main, tmp_path, change, capsys):
    source = write_parquet(tmp_path / "t.parquet", documents(50))
    args = (f"--source={source}", "--shard_size=1000", "--val_tokens=1000")
    before = hashes(main(*args))
    with pytest.raises(SystemExit) as exit:
        main(*args, *change.split())
    assert exit.value.code == 2
    key, value = change.split()[0].lstrip("-").split("=")
    error = capsys.readouterr().err
    was = {"shard_size": 1000, "tokenizer": "'bytes'", "text_key": "'text'", "max_tokens": 0,
           "world_size": 1}[key]
    assert f"{key}={was}" in error and value in error
    assert hashes(tmp_path / "data" / "x") == before


def test_other_input_is_refused(main, tmp_path, capsys):
    source = write_jsonl(tmp_path / "t.jsonl", documents(50))
    main(f"--source={source}")
    write_jsonl(source, documents(51))
    with pytest.raises(SystemExit):
        main(f"--source={source}")
    assert "revision=" in capsys.readouterr().err


def test_finished_set_says_so(run, tmp_path):
    write_jsonl(tmp_path / "t.jsonl", documents(50))
    args = ("prepare.py", "--dataset=x", "--source=t.jsonl", "--tokenizer=bytes")
    first = run(*args, cwd=tmp_path)
    assert first.returncode == 0
    assert "50 documents" in first.stdout and "MB/s" in first.stdout and "2 shards" in first.stdout
    assert first.stderr == ""  # no bar, no noise where it is no terminal
    start, before = time.time(), hashes(tmp_path / "data" / "x")
    again = run(*args, cwd=tmp_path)
    assert time.time() - start < 2
    assert "finished" in again.stdout
    assert hashes(tmp_path / "data" / "x") == before
    shard = tmp_path / "data" / "x" / "x_train_000001.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    short = run(*args, cwd=tmp_path)  # a shard cut short doesn't pass for finished
    assert short.returncode == 2 and shard.name in short.stderr and short.stderr.count("\n") == 1


def test_shards_from_elsewhere_are_left_alone(main, tmp_path, capsys):
    folder = tmp_path / "data" / "x"
    folder.mkdir(parents=True)
    (folder / "fineweb_train_000001.bin").write_bytes(b"theirs")
    with pytest.raises(SystemExit):
        main(f"--source={write_jsonl(tmp_path / 't.jsonl', documents(9))}")
    assert "elsewhere" in capsys.readouterr().err


def test_full_disk(main, tmp_path, monkeypatch, capsys):
    texts = documents(100)
    args = (f"--source={write_parquet(tmp_path / 't.parquet', texts)}", "--shard_size=1000",
            "--val_tokens=1000")
    module, real, calls = fresh(), os.fsync, []

    def fsync(handle):
        calls.append(1)
        if len(calls) > 20:
            raise OSError(28, "No space left on device")
        real(handle)
    monkeypatch.setattr(module.os, "fsync", fsync)
    with pytest.raises(OSError):  # which is one line, as the next test shows
        main(*args, module=module)
    folder = tmp_path / "data" / "x"
    assert not list(folder.glob("*.tmp"))
    kept = hashes(folder)
    assert kept
    calls[:] = [-1] * -10**6
    monkeypatch.setattr(module.os, "fsync", real)
    assert kept.items() <= hashes(main(*args)).items()
    want = reference(texts, prepare.load_tokenizer("bytes"), 1000, 1000)
    assert tokens_of(folder, "val") + tokens_of(folder, "train") == want


@pytest.mark.skipif(os.name != "posix", reason="no ulimit")
@pytest.mark.parametrize("kilobytes", [1, 6])  # stops it at the tokenizer's files; at a shard
def test_full_disk_is_one_line(tmp_path, kilobytes):
    write_jsonl(tmp_path / "t.jsonl", documents(200))
    command = (f"ulimit -f {kilobytes}; {sys.executable} {REPO}/prepare.py --dataset=x --source=t.jsonl"
               " --tokenizer=bytes --shard_size=5000 --val_tokens=2000")
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "tokens so far" not in line]
    assert done.returncode == 2 and len(said) == 1 and "File too large" in said[0], done.stderr
    assert len(list((tmp_path / "data" / "x").glob("*.bin"))) == (kilobytes > 1)


def test_a_closed_pipe_ends_nothing(tmp_path):
    write_jsonl(tmp_path / "t.jsonl", documents(2000))
    command = [sys.executable, REPO / "prepare.py", "--dataset=x", "--source=t.jsonl", "--tokenizer=bytes",
               "--shard_size=20000", "--val_tokens=20000"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read().decode()
        assert process.wait(60) == 1 and "Traceback" not in said and "roken" not in said, said
    assert json.loads((tmp_path / "data" / "x" / "meta.json").read_text())["resume"] is None


def test_names_the_terminal_cannot_show(run, tmp_path):
    (tmp_path / "ué").mkdir()
    write_jsonl(tmp_path / "ué" / "é.jsonl", documents(50))
    env = {"PYTHONIOENCODING": "ascii", "RANK": "", "WORLD_SIZE": "", "SLURM_NTASKS": ""}
    done = run("prepare.py", "--dataset=ü", "--source=ué/*.jsonl", "--tokenizer=bytes", cwd=tmp_path, env=env)
    assert done.returncode == 0 and "source='u?/*.jsonl'" in done.stdout, done.stderr


def test_one_process_at_a_time(run, tmp_path):
    folder = tmp_path / "data" / "x"
    prepare.lock(folder, ".lock_0")
    write_jsonl(tmp_path / "t.jsonl", documents(50))
    done = run("prepare.py", "--dataset=x", "--source=t.jsonl", "--tokenizer=bytes", cwd=tmp_path)
    prepare.LOCKS.pop().close()
    assert done.returncode == 2
    assert "another process" in done.stderr


# --- Memory, start-up, exit -------------------------------------------------------------------------

def test_work_in_flight_is_bounded_and_keeps_the_threads_busy(monkeypatch):
    monkeypatch.setattr(prepare, "FLIGHT", 10_000)
    read = []

    def groups():
        for i in range(1000):
            read.append(i)
            yield i, ["x" * 1000]
    ahead = [len(read) - done for done, _ in enumerate(prepare.in_order(groups(), prepare.load_tokenizer("bytes"), 2))]
    assert max(ahead) <= 22 and min(ahead[:-30]) > 15  # however slow the consumer is, to the end


@pytest.mark.slow
def test_memory_is_flat(tmp_path):
    import psutil
    texts, peaks = documents(40_000, words=400), []
    for n in (1, 4):
        write_parquet(tmp_path / f"{n}.parquet", texts * n, row_group_size=1000)
        process = psutil.Popen(
            [sys.executable, str(REPO / "prepare.py"), f"--source={n}.parquet", f"--dataset=m{n}",
             "--tokenizer=bytes", "--shard_size=1000000", "--val_tokens=1000000", "--num_proc=2"],
            cwd=tmp_path, stdout=subprocess.DEVNULL)
        peak = 0
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):
                peak = max(peak, process.memory_info().rss / 2**20)
            time.sleep(0.02)
        assert process.returncode == 0
        peaks.append(peak)
    assert peaks[1] < 600
    assert peaks[1] < peaks[0] + 100


def test_help_is_fast_and_imports_little(run, tmp_path):
    start = time.time()
    done = run("prepare.py", "--help", cwd=tmp_path, env={"TIKTOKEN_CACHE_DIR": str(tmp_path)})
    assert time.time() - start < 2  # a second on an idle machine
    assert done.returncode == 0 and "shard_size" in done.stdout
    code = "import sys, prepare; print({'datasets', 'tiktoken', 'torch', 'tqdm'} & set(sys.modules))"
    names = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert names.stdout == "set()\n"


def test_no_encoding_is_left_to_the_platform(run, tmp_path):
    write_jsonl(tmp_path / "t.jsonl", documents(50))
    done = run("prepare.py", "--dataset=x", "--source=t.jsonl", "--tokenizer=bytes", cwd=tmp_path,
               env={"PYTHONWARNDEFAULTENCODING": "1"})
    warned = [line for line in done.stderr.splitlines() if "EncodingWarning" in line]
    assert done.returncode == 0
    assert not [line for line in warned if "prepare.py" in line or "config" in line], warned


def stop_in_the_middle(run, tmp_path, times):
    write_parquet(tmp_path / "t.parquet", documents(20_000, words=200), row_group_size=500)
    for i in range(times):
        done = run("prepare.py", f"--dataset=x{i}", "--source=t.parquet", "--tokenizer=bytes",
                   "--max_tokens=200000", cwd=tmp_path, timeout=20)
        assert (done.returncode, done.stderr) == (0, "")


def test_exits_cleanly_in_mid_stream(run, tmp_path):
    stop_in_the_middle(run, tmp_path, 2)


@pytest.mark.slow
def test_exits_cleanly_in_mid_stream_20_times(run, tmp_path):
    stop_in_the_middle(run, tmp_path, 20)


# --- Several machines -------------------------------------------------------------------------------

@pytest.mark.parametrize("nodes", [2, 3])
def test_nodes_share_the_source(main, tmp_path, nodes):
    texts = documents(300)
    source = write_parquet(tmp_path / "t.parquet", texts, row_group_size=20)  # 15 row groups
    encoding, rest = prepare.load_tokenizer("bytes"), texts
    for node in range(nodes):
        folder = main(f"--source={source}", "--shard_size=700", "--val_tokens=500",
                      f"--rank={node}", f"--world_size={nodes}")
        share = 20 * (15 // nodes + (node < 15 % nodes))
        mine, rest = rest[:share], rest[share:]
        want = reference(mine, encoding, 700 if node else 500, 700)
        meta = json.loads((folder / f"meta_{node}.json").read_text(encoding="utf-8"))
        names = [shard["file"] for shard in meta["shards"]]
        numbers = [1 + node + k * nodes for k in range(len(want) - (node == 0))]
        assert names == ["x_val_000000.bin"] * (node == 0) + [f"x_train_{n:06}.bin" for n in numbers]
        have = [np.fromfile(folder / name, "<u2", offset=1024).tolist() for name in names]
        assert have == want
    assert not rest
    assert len(prepare.find_shards(folder, "val")) == 1
    total = sum(s.tokens for split in ("val", "train") for s in prepare.find_shards(folder, split))
    assert total == sum(map(len, reference(texts, encoding, 10**9, 1)))  # nothing twice


@pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")])
def test_rank_from_the_launcher(main, tmp_path, monkeypatch, names):
    source = write_parquet(tmp_path / "t.parquet", documents(100), row_group_size=10)
    for name, value in zip(names, "12", strict=True):
        monkeypatch.setenv(name, value)
    folder = main(f"--source={source}", "--shard_size=700")
    assert (folder / "meta_1.json").exists()
    assert (folder / "x_train_000002.bin").exists()
    assert not list(folder.glob("*_val_*"))


def test_more_nodes_than_row_groups(main, tmp_path):
    source = write_jsonl(tmp_path / "t.jsonl", documents(50))
    for node in range(3):
        folder = main(f"--source={source}", "--val_tokens=100", f"--rank={node}", "--world_size=3")
    assert [s["shards"] == [] for s in (json.loads((folder / f"meta_{n}.json").read_text())
                                        for n in range(3))] == [False, True, True]


# --- Tokenizers -------------------------------------------------------------------------------------

TEXT = "Hello  world's <|x|> \n\n\t 中文 é 123abc 😀\u200b\r\n end. "


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_tokenizer_files(tmp_path, name):
    encoding = prepare.load_tokenizer(name)
    prepare.save_tokenizer(encoding, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(prepare.TOKENIZER_FILES)
    if name == "gpt2":  # OpenAI's own files
        digests = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in tmp_path.iterdir()}
        assert digests["merges.txt"][:16] == "1ce1664773c50f3e"
        assert digests["vocab.json"][:16] == "196139668be63f3b"
    assert prepare.tokenizer_files(tmp_path)[:2] == (encoding.n_vocab, encoding.eot_token)
    again = prepare.load_tokenizer(str(tmp_path))
    assert again.encode_ordinary(TEXT) == encoding.encode_ordinary(TEXT)
    assert again._mergeable_ranks == encoding._mergeable_ranks
    assert again.eot_token == encoding.eot_token


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_transformers_reads_the_tokenizer(tmp_path, name):
    from transformers import AutoTokenizer
    encoding = prepare.load_tokenizer(name)
    prepare.save_tokenizer(encoding, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = encoding.encode_ordinary(TEXT)
    assert theirs(TEXT)["input_ids"] == ids
    assert theirs.decode(ids) == TEXT
    assert (theirs.eos_token_id, len(theirs)) == (encoding.eot_token, encoding.n_vocab)
    theirs.save_pretrained(tmp_path / "five")  # as tokenizer.json
    assert not (tmp_path / "five" / "merges.txt").exists()
    assert prepare.load_tokenizer(str(tmp_path / "five")).encode_ordinary(TEXT) == ids


@pytest.fixture
def trained(tmp_path):
    """A byte-level BPE as people train them with tokenizers: <|endoftext|> first, tokenizer.json."""
    from tokenizers import ByteLevelBPETokenizer
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(documents(300), vocab_size=400, min_frequency=1,
                                  special_tokens=["<|endoftext|>", "<pad>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_trained_tokenizer(trained):
    from tokenizers import Tokenizer
    theirs = Tokenizer.from_file(str(trained / "tokenizer.json"))
    ours = prepare.load_tokenizer(str(trained))
    text = " ".join(documents(50, seed=3)).replace("<|endoftext|>", "")
    assert ours.encode_ordinary(text) == theirs.encode(text).ids
    assert ours.eot_token == 0
    prepare.save_tokenizer(ours, trained)
    (trained / "tokenizer.json").unlink()
    again = prepare.load_tokenizer(str(trained))
    assert again.encode_ordinary(text) == theirs.encode(text).ids
    assert again._special_tokens == {"<|endoftext|>": 0, "<pad>": 1}


def refused(name, capsys):
    with pytest.raises(SystemExit) as exit:
        prepare.load_tokenizer(str(name))
    error = capsys.readouterr().err
    assert exit.value.code == 2
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("change", ["pre_tokenizer", "normalizer", "order", "endoftext", "ids", "type",
                                    "bytes"])
def test_other_tokenizers_are_refused(trained, change, capsys):
    path = trained / "tokenizer.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    model = whole["model"]
    if change == "pre_tokenizer":
        whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [whole["pre_tokenizer"]]}
    if change == "normalizer":
        whole["normalizer"] = {"type": "NFC"}
    if change == "order":
        model["merges"][3:5] = model["merges"][4:2:-1]
    if change == "endoftext":
        whole["added_tokens"] = []
        del model["vocab"]["<|endoftext|>"]
    if change == "ids":
        whole["added_tokens"].append({"id": 65536, "content": "<last>"})
    if change == "type":
        whole["model"] = {"type": "Unigram", "vocab": [["a", 0.0]]}
    if change == "bytes":
        del model["vocab"]["!"]
    path.write_text(json.dumps(whole), encoding="utf-8")
    words = {"pre_tokenizer": "splits text in another way", "normalizer": "another way",
             "order": "order of its merges", "endoftext": "<|endoftext|>", "ids": "65536",
             "type": "", "bytes": "'!'"}[change]
    assert words in refused(trained, capsys)


def test_cl100k_is_refused(capsys):
    assert "cl100k_base" in refused("cl100k_base", capsys)


def test_unreachable_tokenizers(tmp_path, monkeypatch, capsys):
    assert "no/such-model" in refused("no/such-model", capsys)
    assert "merges.txt" in refused(tmp_path, capsys)
    code = "import prepare; prepare.load_tokenizer('gpt2')"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True,
                          env={**os.environ, "TIKTOKEN_CACHE_DIR": str(tmp_path)}, timeout=60)
    assert done.returncode == 2
    assert "TIKTOKEN_CACHE_DIR" in done.stderr and done.stderr.count("\n") == 1
    assert "6d1cbeee0f20b3d9449abfede4726ed8212e3aee" in done.stderr
    assert "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6" in done.stderr


# --- Shards for readers -----------------------------------------------------------------------------

def shard(path, tokens, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.array(tokens, "<u2").tobytes())


def test_find_shards(tmp_path):
    for i in (10, 9, 1):
        shard(tmp_path / f"fine_web_train_{i:06}.bin", range(i))
    shard(tmp_path / "fine_web_val_000000.bin", range(5))
    (tmp_path / "pytorch_model.bin").write_bytes(b"abc")
    found = prepare.find_shards(str(tmp_path), "train")
    assert [s.tokens for s in found] == [1, 9, 10]
    assert prepare.read_tokens(found[2], 3, 4).tolist() == [3, 4, 5, 6]
    assert prepare.read_tokens(found[2], 0, 1).dtype == np.uint16
    assert len(prepare.find_shards(str(tmp_path), "val")) == 1


def test_other_peoples_shards(tmp_path):
    np.array([50256, 1, 2, 3], "<u2").tofile(tmp_path / "train.bin")  # nanoGPT's
    shard(tmp_path / "tiny_val.bin", range(7))  # llm.c's
    train, = prepare.find_shards(str(tmp_path), "train")
    assert train == (str(tmp_path / "train.bin"), 0, 4)
    assert prepare.read_tokens(train, 1, 3).tolist() == [1, 2, 3]
    assert prepare.find_shards(str(tmp_path), "val")[0].offset == 1024
    assert prepare.tokenizer_files(str(tmp_path))[:2] == (50257, 50256)


@pytest.mark.parametrize("content, words", [
    (b"", "0 bytes"), (b"\x01\0\x02", "3 bytes"), ("plain text, é".encode() * 200, "text"),
    (b"\x93NUMPY\x01\0 and so on", "uint16"),
    (np.array([20240520, 1, 9] + [0] * 253, "<i4").tobytes() + b"\0\0" * 8, "truncated"),
    (np.array([20240520, 7, 8] + [0] * 253, "<i4").tobytes() + b"\0\0" * 8, "bytes"),
    (np.array([20240520, 1, 0] + [0] * 253, "<i4").tobytes(), "0 tokens")])
def test_no_shard(tmp_path, content, words, capsys):
    (tmp_path / "x_train_000001.bin").write_bytes(content)
    with pytest.raises(SystemExit) as exit:
        prepare.find_shards(str(tmp_path), "train")
    error = capsys.readouterr().err
    assert exit.value.code == 2
    assert words in error and "x_train_000001.bin" in error and error.count("\n") == 1


def test_no_folder(tmp_path, capsys):
    np.save(tmp_path / "edufineweb_train_000001.npy", np.arange(3))
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(SystemExit):
            prepare.find_shards(str(folder), "train")
        error = capsys.readouterr().err
        assert str(folder) in error and "python prepare.py" in error and ".npy" in error


def test_two_datasets_in_a_folder(tmp_path, capsys):
    shard(tmp_path / "a_train_000001.bin", range(3))
    shard(tmp_path / "b_train_000001.bin", range(3))
    with pytest.raises(SystemExit):
        prepare.find_shards(str(tmp_path), "train")
    assert "a_train_000001.bin" in capsys.readouterr().err


def test_dataset_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("tests", "sub/folder", "mine", "data/both", "both"):
        os.makedirs(name)
    shard(Path("mine", "train.bin"), range(3))
    shard(Path("both", "train.bin"), range(3))
    assert prepare.dataset_dir("new") == os.path.join("data", "new")
    assert prepare.dataset_dir("tests") == os.path.join("data", "tests")
    assert prepare.dataset_dir("mine") == "mine"
    assert prepare.dataset_dir("both") == os.path.join("data", "both")
    assert prepare.dataset_dir("sub/folder") == "sub/folder"
    assert prepare.dataset_dir(str(tmp_path)) == str(tmp_path)


def test_write_file(tmp_path, monkeypatch):
    path = tmp_path / "f"
    prepare.write_file(str(path), b"old")

    def fsync(handle):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError):
        prepare.write_file(str(path), b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


# --- Faults that were put in on purpose and that no test had seen

def test_nodes_share_max_tokens(main, tmp_path):
    source = write_parquet(tmp_path / "t.parquet", documents(300), row_group_size=20)
    for node in range(3):
        folder = main(f"--source={source}", "--val_tokens=100", "--max_tokens=1000", f"--rank={node}", "--world_size=3")
    taken = [json.loads((folder / f"meta_{node}.json").read_text())["tokens"] for node in range(3)]
    assert taken == [334, 333, 333]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="asks Linux which file it is")
def test_a_written_file_and_its_folder_are_on_the_disk(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: done.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    monkeypatch.setattr(os, "replace", lambda a, b: done.append("rename") or replace(a, b))
    prepare.write_file(str(tmp_path / "f"), b"x")
    assert done == [f"{tmp_path}/f.tmp", "rename", str(tmp_path)]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="asks Linux which file it is")
def test_a_written_folder_is_on_the_disk_before_it_is_shown(tmp_path, monkeypatch):
    done, fsync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: done.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    monkeypatch.setattr(os, "rename", lambda a, b: done.append("rename") or rename(a, b))
    with prepare.write_folder(str(tmp_path / "c")) as aside:
        for name in "ab":
            Path(aside, name).write_text("x")
    aside = str(tmp_path / "tmp-c")
    assert sorted(done[:2]) == [f"{aside}/a", f"{aside}/b"]
    assert [path.rstrip("/") for path in done[2:]] == [aside, "rename", str(tmp_path)]


def test_a_hub_set_is_resumed_at_its_first_revision(main, tmp_path, monkeypatch):
    import datasets
    import huggingface_hub
    texts, real, asked, heads = documents(60), datasets.load_dataset, [], ["abc", "def"]
    path = write_parquet(tmp_path / "t.parquet", texts)

    class Hub:
        def dataset_info(self, name):
            return type("Info", (), dict(sha=heads.pop(0)))

    def load_dataset(source, **options):
        asked.append(options["revision"])
        return real("parquet", data_files=[str(path)], split="train", streaming=True)
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    module = fresh()
    write_shard = module.write_shard

    def stopping(*args):
        write_shard(*args)
        raise Stop
    module.write_shard = stopping
    with pytest.raises(Stop):
        main("--source=a/b", "--shard_size=500", "--val_tokens=500", module=module)
    module.write_shard = write_shard
    folder = main("--source=a/b", "--shard_size=500", "--val_tokens=500", module=module)
    assert asked == ["abc", "abc"]
    assert json.loads((folder / "meta.json").read_text())["revision"] == "abc"


def test_a_source_may_fail_now_and_then_for_ever(main, monkeypatch):
    import datasets
    texts, failed = documents(80), set()

    def trouble(i):
        if i % 10 == 5 and i not in failed:
            failed.add(i)
            raise TimeoutError("read timed out")
    module = fresh()
    module.GROUP = 100
    monkeypatch.setattr(datasets, "load_dataset", flaky(texts, trouble))
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    folder = main("--source=a/b", "--shard_size=1000", "--val_tokens=1000", module=module)
    assert len(failed) == 8
    want = reference(texts, prepare.load_tokenizer("bytes"), 1000, 1000)
    assert tokens_of(folder, "val") + tokens_of(folder, "train") == want


def test_a_source_that_is_gone_is_given_up_in_two_minutes(main, monkeypatch):
    import datasets
    waits = []

    def trouble(i):
        raise ConnectionError("no route")
    module = fresh()
    monkeypatch.setattr(datasets, "load_dataset", flaky(documents(9), trouble))
    monkeypatch.setattr(module.time, "sleep", waits.append)
    with pytest.raises(SystemExit):
        main("--source=a/b", module=module)
    assert waits == [2, 4, 8, 16, 32]


def test_a_renamed_folder_goes_on_with_other_threads(main, tmp_path):
    texts = documents(100)
    args = (f"--source={write_parquet(tmp_path / 't.parquet', texts)}", "--shard_size=1000", "--val_tokens=1000")
    module = fresh()
    write_shard = module.write_shard

    def stopping(folder, meta, *rest):
        write_shard(folder, meta, *rest)
        if len(meta["shards"]) == 3:
            raise Stop
    module.write_shard = stopping
    with pytest.raises(Stop):
        main(*args, "--num_proc=1", module=module)
    (tmp_path / "data/x").rename(tmp_path / "data/y")
    main(*args, "--dataset=y", "--num_proc=2")
    want = reference(texts, prepare.load_tokenizer("bytes"), 1000, 1000)
    assert tokens_of("data/y", "val") + tokens_of("data/y", "train") == want


@pytest.mark.parametrize("change", [{"add_prefix_space": True}, {"use_regex": False}])
def test_a_pre_tokenizer_with_other_options_is_refused(trained, change, capsys):
    path = trained / "tokenizer.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    whole["pre_tokenizer"] |= change
    path.write_text(json.dumps(whole), encoding="utf-8")
    assert "another way" in refused(trained, capsys)


def test_merges_as_strings(trained):
    path = trained / "tokenizer.json"
    want = prepare.load_tokenizer(str(trained))._mergeable_ranks
    whole = json.loads(path.read_text(encoding="utf-8"))
    model = whole["model"]
    model["merges"] = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]  # before tokenizers 0.20
    path.write_text(json.dumps(whole), encoding="utf-8")
    assert prepare.load_tokenizer(str(trained))._mergeable_ranks == want


@pytest.mark.parametrize("newline,mark", [("\n", ""), ("\r\n", ""), ("\n", "\ufeff"), ("\r\n", "\ufeff")])
def test_tokenizer_files_from_windows(trained, newline, mark):
    want = prepare.load_tokenizer(str(trained))
    prepare.save_tokenizer(want, trained)
    (trained / "tokenizer.json").unlink()
    for name in ("merges.txt", "vocab.json"):
        text = mark + (trained / name).read_text(encoding="utf-8").replace("\n", newline)
        (trained / name).write_bytes(text.encode("utf-8"))
    got = prepare.load_tokenizer(str(trained))
    assert (got._mergeable_ranks, got._special_tokens) == (want._mergeable_ranks, want._special_tokens)


def test_a_vocabulary_of_another_size_is_refused(tmp_path):
    prepare.save_tokenizer(prepare.load_tokenizer("bytes"), tmp_path)
    assert prepare.tokenizer_of(tmp_path, 384).n_vocab == 257
    for size in (392, 50304):
        with pytest.raises(SystemExit):
            prepare.tokenizer_of(tmp_path, size)


def test_gpt2s_ids_without_a_network(tmp_path, monkeypatch):
    import tiktoken
    np.array([50256, 1, 2, 3], "<u2").tofile(tmp_path / "train.bin")
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: 1 / 0)
    assert prepare.tokenizer_files(str(tmp_path)) == (50257, 50256, {})


def test_what_is_fetched_from_the_hub(monkeypatch):
    import huggingface_hub
    from fnmatch import fnmatch
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: asked.extend(allow_patterns))
    prepare.find_checkpoint("out", "gpt2")
    wanted = ("config.json", "tokenizer.json", "vocab.json", "merges.txt", "model.safetensors", "model-00001-of-00002.safetensors")
    assert all(any(fnmatch(name, pattern) for pattern in asked) for name in wanted)
    assert not any(fnmatch("pytorch_model.bin", pattern) for pattern in asked)


def test_the_first_id_past_the_vocabulary(tmp_path):
    shard(tmp_path / "x_train_000001.bin", [1, 256] * 20)
    assert prepare.Windows(str(tmp_path), "train", 8, 257).read([0])[0].max() == 256
    with pytest.raises(SystemExit):
        prepare.Windows(str(tmp_path), "train", 8, 256).read([0])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_text_in_any_language_is_no_shard(tmp_path, n):
    (tmp_path / "train.bin").write_bytes(("a" * n + "中" * 500).encode()[:1200])
    with pytest.raises(SystemExit):
        prepare.check_shard(str(tmp_path / "train.bin"))


@pytest.mark.parametrize("args", ["--rank=2 --world_size=2", "--shard_size=0", "--val_tokens=0",
                                  "--shard_size=3e9", "--max_tokens=-1", "--num_proc=-1"])
def test_settings_out_of_range(main, tmp_path, capsys, args):
    write_jsonl(tmp_path / "t.jsonl", documents(20))
    with pytest.raises(SystemExit):
        main("--source=t.jsonl", *args.split())
    assert "out of range" in capsys.readouterr().err


def test_files_in_folders_below(main, tmp_path):
    for folder in ("t", "t/a", "t/a/b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "f.txt").write_text(f"text in {folder} " * 9)
    folder = main("--source=t/**/*.txt")
    whole = sum(tokens_of(folder, "val") + tokens_of(folder, "train"), [])
    text = prepare.load_tokenizer("bytes").decode(whole)
    assert sorted(text.split("<|endoftext|>")) == sorted(["", *(f"text in {f} " * 9 for f in ("t", "t/a", "t/a/b"))])


def test_a_hub_set_of_few_files_is_shared_by_row_groups(main, tmp_path, monkeypatch):
    import datasets
    real, path = datasets.load_dataset, write_parquet(tmp_path / "t.parquet", documents(100), row_group_size=10)
    monkeypatch.setattr(datasets, "load_dataset", lambda source, **options: real(
        "parquet", data_files=[str(path)], split="train", streaming=True))
    for node in range(2):
        folder = main("--source=a/b", "--val_tokens=100", f"--rank={node}", "--world_size=2")
    assert [json.loads((folder / f"meta_{n}.json").read_text())["documents"] for n in range(2)] == [50, 50]
