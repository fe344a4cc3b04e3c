"""
Text to uint16 token shards that train.py, llm.c and modded-nanogpt read.

    python prepare.py config/quickstart.py                        Python's own docs: seconds, no download
    python prepare.py --dataset=mine --source='notes/*.txt'       your files; also .parquet .jsonl .json, .gz
    python prepare.py config/fineweb_small.py                     10B tokens of FineWeb-Edu

The same command goes on where a killed one stopped. Start it on every node under torchrun or srun (or
with --rank and --world_size) and they share the source out; put the shards of all in one folder.
"""
import glob
import hashlib
import json
import os
import platform
import random
import re
import sys
import time
from bisect import bisect_right
from collections import deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from config import configure, fail

# what to read
dataset = "fineweb_small"  # name of the folder under data/ (or its path) that gets the shards
source = "HuggingFaceFW/fineweb-edu"  # Hugging Face dataset id, local files by path or glob, or pydocs
source_config = "sample-10BT"  # configuration of a Hugging Face dataset
split = "train"  # split of a Hugging Face dataset
text_key = "text"  # column that holds the text
max_tokens = 0  # stop after this many tokens (over all nodes); 0: take all
# what to write
tokenizer = "gpt2"  # gpt2, bytes, or a folder or Hugging Face id of a GPT-2-style byte-level BPE
shard_size = 100_000_000  # tokens a train shard; memory holds one
val_tokens = 100_000_000  # first tokens of the source, kept for val; of a smaller source its first tenth
# how
num_proc = 0  # tokenizer threads; 0: one a core
rank = -1  # this node's number, of world_size; -1: torchrun's or SLURM's, else 0
world_size = 0  # nodes that share the source; 0: torchrun's or SLURM's, else 1

TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer_config.json")
EOT = "<|endoftext|>"
MAGIC = 20240520  # llm.c's header: 256 int32 of magic, version, token count and zeros
HEADER = 1024  # its bytes
GROUP = 1 << 18  # characters of text that a thread takes at a time, some 30 ms of work

# ---- shards ----------------------------------------------------------------------------------------

Shard = namedtuple("Shard", "path offset tokens")  # offset: bytes before the first token


def dataset_dir(dataset):
    """data/<dataset>, or dataset itself where that is the path of a folder."""
    is_path = os.path.isabs(dataset) or os.sep in dataset or os.path.isdir(dataset)
    return dataset if is_path else os.path.join("data", dataset)


def find_shards(folder, split):
    """The folder's shards of split (train or val) in order, each checked against its size."""
    cure = f"make it with: python prepare.py --dataset={os.path.basename(folder)} --source=..."
    if not os.path.isdir(folder):
        fail(f"{folder}: no such dataset folder; {cure}")
    found = [re.fullmatch(rf"(?:(.+)_)?{split}(?:_(\d+))?\.bin", name) for name in os.listdir(folder)]
    found = sorted((match for match in found if match), key=lambda match: int(match[2] or 0))
    if not found:
        numpy_files = glob.glob(glob.escape(folder) + "/*.npy")
        fail(f"{folder}: no {split} shards (*_{split}_*.bin or {split}.bin)"
             + (", and .npy files are not read" if numpy_files else "") + f"; {cure}")
    if len({match[1] for match in found}) > 1:
        fail(f"{folder}: {split} shards of several datasets: {found[0][0]}, {found[-1][0]}")
    return [check_shard(os.path.join(folder, match[0])) for match in found]


def check_shard(path):
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(HEADER)
    if len(head) < 2 or size % 2 or head.startswith(b"\x93NUMPY"):
        fail(f"{path}: {size} bytes that are no uint16 tokens; delete it and run prepare.py again")
    magic, version, count = (int.from_bytes(head[i:i + 4], "little") for i in (0, 4, 8))
    if magic == MAGIC:
        if version != 1 or count < 1 or size != HEADER + 2 * count:
            fail(f"{path}: header says version {version}, {count:,} tokens, file has {size:,} bytes: "
                 f"truncated or no such shard; delete it and run prepare.py again")
        return Shard(path, HEADER, count)
    # nanoGPT's headerless form could be anything, but tokens always hold a zero byte, and text never
    if b"\0" not in head and len(head) == HEADER:
        fail(f"{path}: looks like text, not like uint16 tokens; run prepare.py --source={path}")
    return Shard(path, 0, size // 2)


def read_tokens(shard, start, count):
    """Tokens start .. start + count of a shard; read, not mapped: a map's pages count as our memory."""
    with open(shard.path, "rb") as file:
        file.seek(shard.offset + 2 * start)
        return np.fromfile(file, dtype="<u2", count=count)


def vocabulary(folder):
    """(vocab_size, eot) of a folder's tokenizer files; GPT-2's where it has none."""
    path = os.path.join(folder, "vocab.json")
    if not os.path.exists(path):
        return 50257, 50256
    vocab = json.loads(Path(path).read_text(encoding="utf-8"))
    return max(vocab.values()) + 1, vocab[EOT]


def write_file(path, data):
    """Write aside, sync, rename: whenever the power goes, path holds its old bytes or all the new."""
    aside = f"{path}.tmp"
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        if os.path.exists(aside):
            os.remove(aside)  # half a file: on a full disk its space is better used
        raise
    sync_folder(os.path.dirname(path) or ".")


def sync_folder(folder):
    if hasattr(os, "O_DIRECTORY"):  # Windows can't open a folder, and needn't
        handle = os.open(folder, os.O_DIRECTORY)
        os.fsync(handle)
        os.close(handle)


LOCKS = []  # open files, for the life of the process


def lock(folder, name=".lock"):
    """Make the folder and hold it against other processes; the system lets go of it with the process."""
    try:
        os.makedirs(folder, exist_ok=True)
        LOCKS.append(open(os.path.join(folder, name), "a", encoding="utf-8"))
    except OSError as error:
        fail(f"{folder}: {error.strerror}; choose a folder that can be written")
    try:
        import fcntl
        fcntl.flock(LOCKS[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass  # Windows: no such lock
    except BlockingIOError:
        fail(f"{folder}: another process is writing there; wait for it, or end it")


# ---- tokenizers ------------------------------------------------------------------------------------

def byte_alphabet():
    """{character: byte}: GPT-2 writes the bytes of its tokens as printable characters, space as Ġ."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def merge_pairs(ranks):
    """The merge that makes each longer token, in order: BPE on the token with only earlier ranks."""
    for token in sorted((token for token in ranks if len(token) > 1), key=ranks.get):
        parts = [token[i:i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, ranks[token]) for a, b in zip(parts, parts[1:])]
            at = pairs.index(min(pairs))
            if pairs[at] >= ranks[token]:
                raise ValueError(f"token {token!r} can't be made of tokens with lower ids")
            parts[at:at + 2] = [parts[at] + parts[at + 1]]
        yield tuple(parts)


def load_tokenizer(name):
    """A tiktoken Encoding: gpt2, bytes, or the GPT-2-style BPE in a folder or on the hub."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str
    if name == "gpt2":
        try:
            return tiktoken.get_encoding("gpt2")
        except Exception as error:
            fail(f"tokenizer gpt2: vocab.bpe and encoder.json can't be fetched ({type(error).__name__}); "
                 "without a network set TIKTOKEN_CACHE_DIR to a folder that holds them under "
                 "tiktoken's names, 6d1cbeee0f20b3d9449abfede4726ed8212e3aee (vocab.bpe) and "
                 "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6 (encoder.json)")
    if name == "bytes":
        vocab, merges = {char: byte for char, byte in byte_alphabet().items()} | {EOT: 256}, []
    elif name in tiktoken.list_encoding_names():
        fail(f"tokenizer {name}: not of GPT-2's kind, which is what the tokenizer files can hold "
             "(its word pattern, at most 65,536 ids); use gpt2, bytes, or a folder or hub id")
    else:
        vocab, merges = read_tokenizer(name)
    alphabet = byte_alphabet()
    try:
        if EOT not in vocab:
            raise ValueError(f"no {EOT}")
        if max(vocab.values()) > 65535:
            raise ValueError(f"its ids go up to {max(vocab.values()):,}, and a shard's end at 65,535")
        if len(set(vocab.values())) < len(vocab):
            raise ValueError("two tokens share an id")
        if not vocab.keys() >= alphabet.keys():
            raise ValueError("not byte-level: some of the 256 bytes have no token")
        merged = {a + b for a, b in merges}
        ranks = {bytes(alphabet[c] for c in token): vocab[token] for token in merged | alphabet.keys()}
        encode = {byte: char for char, byte in alphabet.items()}
        pairs = [tuple("".join(encode[b] for b in part) for part in pair) for pair in merge_pairs(ranks)]
        if pairs != merges:
            raise ValueError("its ids are not in the order of its merges")
    except (ValueError, KeyError) as error:
        fail(f"tokenizer {name}: {error}; only a GPT-2-style byte-level BPE will do")
    special = {token: i for token, i in vocab.items() if token not in merged and token not in alphabet}
    return tiktoken.Encoding(name, pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)


def read_tokenizer(name):
    """(vocab, merges) of a folder or hub id: tokenizer.json, which tells more, else the two files."""
    folder = Path(fetch(name, ["vocab.json", "merges.txt", "tokenizer.json"]))
    try:
        if (folder / "tokenizer.json").exists():
            whole = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
            model, cutter = whole["model"], whole.get("pre_tokenizer") or {}
            plain = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
            odd = [key for key in plain if cutter.get(key, plain[key]) != plain[key] or not cutter]
            odd += [key for key in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback",
                                    "ignore_merges", "dropout") if model.get(key)]
            if model["type"] != "BPE" or odd or whole.get("normalizer"):
                fail(f"tokenizer {name}: tokenizer.json is not plain ByteLevel BPE ({', '.join(odd)})")
            vocab = model["vocab"] | {token["content"]: token["id"] for token in whole["added_tokens"]}
            lines = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        else:
            vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
            lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
            lines = lines[lines[0].startswith("#version"):]
        return vocab, [tuple(line.split(" ")) for line in lines if line]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"tokenizer {name}: needs a tokenizer.json, or vocab.json and merges.txt ({error!r})")


def save_tokenizer(encoding, folder):
    """Write the tokenizer as GPT-2's own two files, which tiktoken and Hugging Face both read."""
    encode = {byte: char for char, byte in byte_alphabet().items()}
    ranks = encoding._mergeable_ranks
    merges = [" ".join("".join(map(encode.get, part)) for part in pair) for pair in merge_pairs(ranks)]
    vocab = {"".join(map(encode.get, token)): i for token, i in ranks.items()} | encoding._special_tokens
    vocab = dict(sorted(vocab.items(), key=lambda item: item[1]))
    config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False,
              "bos_token": EOT, "eos_token": EOT, "unk_token": EOT}
    contents = json.dumps(vocab), "\n".join(["#version: 0.2", *merges, ""]), json.dumps(config, indent=1)
    for name, text in zip(TOKENIZER_FILES, contents):
        write_file(os.path.join(folder, name), text.encode("utf-8"))


def fetch(name, patterns):
    """A folder as it is, else the matching files of a Hugging Face model."""
    if os.path.isdir(name):
        return name
    try:
        from huggingface_hub import snapshot_download
        return snapshot_download(name, allow_patterns=patterns)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        fail(f"{name}: no such folder, and not to be had from the Hugging Face hub "
             f"({type(error).__name__}: {reason})")


# ---- sources ---------------------------------------------------------------------------------------

def pydocs():
    """The documentation inside this Python, a document a topic or module, in a fixed shuffled order."""
    import ast
    import warnings
    from pydoc_data.topics import topics
    warnings.simplefilter("ignore", SyntaxWarning)  # old escapes in old modules
    documents = [text for _, text in sorted(topics.items())]
    library = Path(os.__file__).parent
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(parts):
            continue
        try:  # parsed, never imported: importing antigravity opens a browser
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue  # lib2to3 keeps some broken files to test itself
        texts = [ast.get_docstring(tree) or ""]
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                text = ast.get_docstring(node)
                if text:
                    texts.append(f"{node.name}\n{text}")
        if len("".join(texts)) > 200:
            documents.append("\n\n".join([path.stem, *filter(None, texts)]))
    random.Random(1337).shuffle(documents)
    return [document.encode("utf-8", "replace").decode("utf-8") for document in documents]


def open_source(source, source_config, split, text_key, revision):
    """The source as a stream of rows that knows its place (state_dict), and the text column's name."""
    import datasets
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what fails is said once, by us
    if source == "pydocs":
        return datasets.Dataset.from_dict({"text": pydocs()}).to_iterable_dataset()
    files = local_files(source)
    if not files:
        return datasets.load_dataset(source, name=source_config or None, split=split, streaming=True,
                                     **({"revision": revision} if revision else {}))
    kind = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text"}
    kind = kind[Path(files[0].removesuffix(".gz")).suffix]
    more = {"text": {"sample_by": "document"}, "parquet": {"batch_size": 1000}}.get(kind, {})
    return datasets.load_dataset(kind, data_files=files, split="train", streaming=True, **more)


def local_files(source):
    return sorted(glob.glob(source)) or [source] * os.path.isfile(source)


def read_groups(stream, text_key, state):
    """Yield (state before, texts) in order; a read that fails is tried again from the last state."""
    tries = 0
    while True:
        try:
            stream.load_state_dict(state)
            group, size = [], 0
            for row in stream:
                group.append(row[text_key] or "")
                size += len(group[-1])
                if size >= GROUP or len(group) >= 4096:
                    after, tries = stream.state_dict(), 0
                    yield state, group
                    state, group, size = after, [], 0
            if group:
                yield state, group
            return
        except Exception as error:
            tries += 1
            if isinstance(error, (ValueError, TypeError, KeyError)) or tries > 5:
                fail(f"{error!r}")
            print(f"{type(error).__name__}; trying again in {2 ** tries} s", file=sys.stderr)
            time.sleep(2 ** tries)


# ---- main ------------------------------------------------------------------------------------------

def tokenize(encoding, texts):
    """The texts' tokens as uint16, <|endoftext|> before each."""
    eot, parts = np.array([encoding.eot_token], np.uint32), []
    for text in texts:
        try:
            ids = encoding.encode_to_numpy(text, disallowed_special=())  # without Python ints, or the GIL
        except UnicodeEncodeError:
            ids = np.array(encoding.encode_ordinary(text), np.uint32)  # repairs lone surrogates
        parts += [eot, ids]
    ids = np.concatenate(parts)
    if ids.max() > 65535:
        raise ValueError(f"token id {ids.max()} is past uint16")
    return ids.astype(np.uint16)


def in_order(pool, encoding, groups, threads):
    """Yield (state before, tokens) of the groups, tokenized in parallel, with little in flight."""
    flight, size = deque(), 0
    for state, texts in groups:
        size += sum(map(len, texts))
        flight.append((state, sum(map(len, texts)), pool.submit(tokenize, encoding, texts)))
        while size > 4 * threads * GROUP:
            state, n, future = flight.popleft()
            size -= n
            yield state, future.result()
    for state, _, future in flight:
        yield state, future.result()


def main():
    configure(globals())
    folder = dataset_dir(dataset)
    lock(folder)
    name = os.path.basename(os.path.abspath(folder))
    if os.path.exists(os.path.join(folder, "meta.json")):
        print(f"{folder} is finished")
        return
    encoding = load_tokenizer(tokenizer)
    threads = num_proc or os.cpu_count()
    stream = open_source(source, source_config, split, text_key, None)
    started, shards, total = time.time(), [], 0
    buffer, filled = np.empty(max(shard_size, val_tokens) + HEADER // 2, "<u2"), 0
    capacity = val_tokens

    def write(tokens):
        kind = "train" if shards else "val"
        path = os.path.join(folder, f"{name}_{kind}_{len(shards):06}.bin")
        header = np.zeros(256, "<i4")
        header[:3] = MAGIC, 1, len(tokens)
        data = header.tobytes() + tokens.tobytes()
        write_file(path, data)
        shards.append({"file": os.path.basename(path), "tokens": len(tokens),
                       "sha256": hashlib.sha256(data).hexdigest()})

    with ThreadPoolExecutor(threads) as pool:
        groups = read_groups(stream, text_key, stream.state_dict())
        for _, tokens in in_order(pool, encoding, groups, threads):
            if max_tokens:
                tokens = tokens[:max_tokens - total]
            total += len(tokens)
            while len(tokens):
                if filled == capacity:
                    write(buffer[:filled])
                    filled, capacity = 0, shard_size
                take = min(len(tokens), capacity - filled)
                buffer[filled:filled + take] = tokens[:take]
                filled, tokens = filled + take, tokens[take:]
            if total == max_tokens > 0:
                break
    rest = buffer[:filled]
    if total < 2:
        fail(f"{source}: {total} tokens; val and train need 2 at least")
    if not shards:
        write(rest[:max(1, total // 10)])
        rest = rest[max(1, total // 10):]
    for start in range(0, len(rest), shard_size):
        write(rest[start:start + shard_size])
    save_tokenizer(encoding, folder)
    meta = {"source": source, "tokenizer": tokenizer, "vocab_size": encoding.max_token_value + 1,
            "eot": encoding.eot_token, "tokens": total, "shards": shards,
            "versions": {"python": platform.python_version()}}
    write_file(os.path.join(folder, "meta.json"), json.dumps(meta, indent=1).encode("utf-8"))
    print(f"{folder}: {total:,} tokens in {len(shards)} shards, {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
