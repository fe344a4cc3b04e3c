"""
Text to uint16 token shards, the format of llm.c and modded-nanogpt, which train.py reads.

    python prepare.py config/quickstart.py                     Python's own documentation: seconds
    python prepare.py --dataset=notes --source='notes/*.txt'   your .txt .jsonl .json .parquet .gz
    python prepare.py config/fineweb_small.py                  10B tokens of FineWeb-Edu

The same command goes on where a killed one stopped. Start it on several nodes by torchrun or srun
(or with --rank and --world_size) and they share the source; put their shards into one folder.
"""
import atexit
import contextlib
import ctypes
import glob
import gzip
import hashlib
import itertools
import json
import math
import os
import random
import re
import shutil
import sys
import threading
import time
import traceback
from collections import deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import numpy as np

from config import configure, fail

# what to read
dataset = "fineweb_small"  # gets the shards: data/<dataset>, or a folder by its path
source = "HuggingFaceFW/fineweb-edu"  # Hugging Face dataset id; files by path or glob; or pydocs
source_config = "sample-10BT"  # configuration of a Hugging Face dataset; "" for its default
split = "train"  # split of a Hugging Face dataset
text_key = "text"  # the column that holds the text
max_tokens = 0  # tokens to stop after, an equal share on each node; 0 takes all
# what to write
tokenizer = "gpt2"  # gpt2, bytes, or a folder or Hugging Face id with a GPT-2-style byte-level BPE
shard_size = 100_000_000  # tokens in a train shard; one is held in memory
val_tokens = 100_000_000  # the first tokens are val; of a source with no more, the first tenth
# how
num_proc = 0  # threads that tokenize; 0 is one a core
rank = -1  # this node's number, from 0; -1 is torchrun's or SLURM's, else 0
world_size = 0  # nodes that share the source; 0 is torchrun's or SLURM's, else 1

TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer_config.json")
EOT = "<|endoftext|>"
GPT2 = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"  # tiktoken caches it
MAGIC = 20240520  # opens llm.c's header of 256 int32: magic, version, token count, zeros
HEADER = 1024  # its bytes
GROUP = 1 << 18  # characters a thread takes at a time: some 15 ms
FLIGHT = 1 << 24  # characters in flight per thread: a second's work, while a shard is written
LOCKS = []  # open files, locked until the process ends
OWN = threading.local()  # a thread's own Encoding
Shard = namedtuple("Shard", "path offset tokens")  # offset: bytes before the first token

# --- Shards and files, as train.py reads and writes them too --------------------------------------

def dataset_dir(dataset):
    """data/<dataset>, or the folder that dataset is the path of (a bare name: if it has shards)."""
    inside, bare = os.path.join("data", dataset), os.path.basename(dataset) == dataset
    is_path = glob.glob(glob.escape(dataset) + "/*.bin") if bare else os.path.isdir(dataset)
    return dataset if is_path and not os.path.isdir(inside) else inside

def find_shards(folder, split):
    """The folder's shards of split, "train" or "val", in order, each checked against its size."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    found = [m for m in (re.fullmatch(rf"(.+_)?{split}(_\d+)?\.bin", n) for n in names) if m]
    if not found:
        fail(f"{folder}: no {split} shards (*_{split}_*.bin or {split}.bin; .npy is not read); "
             f"make them by python prepare.py --dataset={folder} with a recipe or --source")
    if len({m[1] for m in found}) > 1:
        fail(f"{folder}: two datasets, {found[0][0]} and {found[-1][0]}; give each its own folder")
    return [check_shard(os.path.join(folder, m[0])) for m in found]

def check_shard(path):
    """path as a Shard: with llm.c's header, or as nanoGPT's bare tokens."""
    try:
        size, head = os.path.getsize(path), np.fromfile(path, np.uint8, HEADER).tobytes()
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    magic, form, count = np.frombuffer(head.ljust(HEADER, b"\0"), "<i4")[:3].tolist()
    if magic == MAGIC and form == 1 and count > 0 and size == HEADER + 2 * count:
        return Shard(path, HEADER, count)
    # bare tokens can be any bytes, but not a kilobyte of valid UTF-8 without a zero
    text = b"\0" not in head and "\ufffd" not in head.decode("utf-8", "replace")[:-1]
    if magic == MAGIC or size < 2 or size % 2 or text or head.startswith(b"\x93NUMPY"):
        what = f"a truncated shard of {count:,} tokens" if magic == MAGIC else "no uint16 tokens"
        fail(f"{path}: {size:,} bytes, {what}; delete its folder and run prepare.py again")
    return Shard(path, 0, size // 2)

def read_tokens(shard, start, count):
    """Tokens [start, start + count), read and not mapped: a map's pages count as our memory."""
    try:
        tokens = np.fromfile(shard.path, "<u2", count, offset=shard.offset + 2 * start)
    except OSError:
        tokens = ()
    if len(tokens) < count:
        fail(f"{shard.path}: gone or cut short since the start; put it back, then go on from the "
             "last checkpoint with --init_from=resume")
    return tokens

def mix(*keys):
    """63 bits that look random and follow from keys."""
    digest = hashlib.blake2b(repr(keys).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

def permute(i, n, key):
    """Where the permutation of range(n) that key picks puts i, without a table of n entries."""
    half = 1 << (n.bit_length() + 1) // 2
    while True:  # a Feistel network permutes range(half * half); walk on until inside n
        left, right = divmod(i, half)
        for turn in range(4):
            left, right = right, left ^ mix(key, turn, right) % half
        i = left * half + right
        if i < n:
            return i

class Windows:
    """A split as windows of block_size + 1 tokens; neighbours share one, each is a target once."""

    def __init__(self, folder, split, block_size, vocab_size):
        self.shards, self.vocab_size = find_shards(folder, split), vocab_size
        self.block_size = block_size
        self.sums = np.cumsum([0, *((shard.tokens - 1) // block_size for shard in self.shards)])
        if not len(self):
            fail(f"{folder}: its longest {split} shard has {max(s.tokens for s in self.shards)} "
                 f"tokens, block_size={block_size} needs {block_size + 1}: lower it or add text")
        short = [os.path.basename(s.path) for s in self.shards if s.tokens <= block_size]
        if short:
            print(f"shorter than a window and passed over: {' '.join(short)}")

    def __len__(self):
        return int(self.sums[-1])

    def read(self, indices, device="cpu"):
        """Windows by number -> inputs and targets, (B, block_size) int64 each, on the device."""
        import torch
        tokens = np.empty((len(indices), self.block_size + 1), np.int64)
        for row, i in zip(tokens, indices, strict=True):
            n = int(np.searchsorted(self.sums, i, side="right")) - 1
            row[:] = read_tokens(self.shards[n], int(i - self.sums[n]) * self.block_size, len(row))
            if row.max() >= self.vocab_size:  # inside a GPU it would be an assert without a name
                fail(f"{self.shards[n].path}: token id {row.max()}, and the vocabulary has "
                     f"{self.vocab_size}; prepare it anew with the model's tokenizer")
        tokens = torch.from_numpy(tokens)
        if "cuda" in device:  # pinned, it is copied without a wait
            tokens = tokens.pin_memory().to(device, non_blocking=True)
        tokens = tokens.to(device)
        return tokens[:, :-1], tokens[:, 1:]

    def sample(self, first, count, seed, device="cpu"):
        """read() windows first, first + 1 ... of an endless stream of epochs, each in new order."""
        n, stream = len(self), range(first, first + count)
        return self.read([permute(i % n, n, mix(seed, i // n)) for i in stream], device)

def open_log(path, step, resume):
    """The run's log, to append to, without the rows past the step, which will come again."""
    try:
        if os.path.isfile(path) and not resume:  # of a run that has no checkpoint here
            os.replace(path, path + ".old")
        elif os.path.isfile(path):
            text = Path(path).read_text("utf-8", "replace")
            rows = re.finditer(r'^{\s*"step"\s*:\s*(\d+).*}\n', text, re.M)  # not one cut short
            write_file(path, "".join(row[0] for row in rows if int(row[1]) <= step).encode())
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        fail(f"{path}: {error.strerror}; make room, then go on with --init_from=resume")

def show_row(step, row, max_iters, left, log_file, tracker=None):
    """A row to the log and the eye; a full disk ends the run, a closed pipe doesn't."""
    try:  # JSON has no infinity
        kept = {key: value if math.isfinite(value) else None for key, value in row.items()}
        log_file.write(json.dumps({"step": step} | kept) + "\n")
        log_file.flush()
    except OSError as error:
        fail(f"{log_file.name}: {error.strerror}; the checkpoints are whole: make room, then go on "
             "with --init_from=resume")
    shown = (f"{key} {x:<9,.0f}" if x >= 1000 else f"{key} {x:<9.4g}" for key, x in row.items())
    try:
        print(f"step {step:>{len(str(max_iters))}}/{max_iters} {left:>9} left ", *shown, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    if tracker:
        tracker.log(row, step=step)

def write_file(path, *parts):
    """Write aside, sync, rename: whenever the power goes, path has its old bytes or all the new."""
    aside = f"{path}.tmp"
    try:
        with open(aside, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        Path(aside).unlink(missing_ok=True)  # a full disk needs the room
        raise
    sync(os.path.dirname(path) or ".")

def sync(path):
    """Wait until a file or folder is on the disk."""
    if os.name == "posix":  # Windows can't open a folder, and needn't
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)

@contextlib.contextmanager
def write_folder(path):
    """A folder to fill, synced and renamed to path at the end; or it fails with path untouched."""
    parent, name = os.path.split(path)
    for left in glob.glob(glob.escape(parent) + "/tmp-checkpoint-*"):
        shutil.rmtree(left, ignore_errors=True)  # left by a kill
    aside = os.path.join(parent, f"tmp-{name}")
    try:
        os.makedirs(aside)
        yield aside
        for file in [*os.listdir(aside), ""]:
            sync(os.path.join(aside, file))
        if os.path.isdir(path):  # a stray folder: no checkpoint is written twice
            os.rename(path, path + "-old")
        os.rename(aside, path)
        sync(parent)
    except Exception as error:  # a full disk is an OSError, a RuntimeError or a SafetensorError
        free = shutil.disk_usage(parent).free
        shutil.rmtree(aside, ignore_errors=True)
        fail(f"{path} can't be written, with {free:,} bytes free: {error}; what was there is "
             "untouched: make room and go on with --init_from=resume")

def remove_folder(path):
    """Remove a folder, out of sight first: whoever finds path finds all of it."""
    aside = os.path.join(os.path.dirname(path), f"tmp-{os.path.basename(path)}")
    with contextlib.suppress(OSError):  # NFS and Windows keep what is still open
        os.rename(path, aside)
        shutil.rmtree(aside)

def lock(folder, name=".lock"):
    """Make the folder and hold it; the system lets go when the process ends, however it ends."""
    try:
        os.makedirs(folder, exist_ok=True)
        LOCKS.append(open(os.path.join(folder, name), "a", encoding="utf-8"))
        with contextlib.suppress(ImportError):  # Windows has no fcntl
            import fcntl
            fcntl.flock(LOCKS[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"{folder}: another process is writing here; wait for it, or end it")
    except OSError as error:
        fail(f"{folder}: {error.strerror}; choose a folder that can be written and locked")

def keep_freed_memory():
    """Have glibc keep what is freed: new pages for a step's gigabytes take a tenth of its time."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: large blocks from the heap as well
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: and never back to the system

def leave(code):
    """End the process; under torchrun at once, as gloo's threads can abort a slow exit."""
    if os.environ.get("WORLD_SIZE"):
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError):  # a closed pipe
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)

def run(main, then=""):
    """main(), and in one line what ends it from outside: Ctrl-C, a closed pipe, a full disk."""
    try:
        main()
    except KeyboardInterrupt:
        print(f"\nstopped{then}", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        with contextlib.suppress(OSError):  # stdout's last flush must not fail once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(1)  # as in prepare.py | head
        fail(f"can't write: {error}; mend that, then give the same command again")

def peak_memory(device):
    """What a GPU, else this process, has used at most, and what the GPU or the machine has."""
    import torch
    if device.startswith("cuda"):
        peak, there = torch.cuda.max_memory_reserved(device), torch.cuda.mem_get_info(device)[1]
    elif os.name == "nt":
        return "peak memory: see the task manager"
    else:
        import resource
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (sys.platform != "darwin") * 10
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"peak memory {peak / 2**30:.2f} of {there / 2**30:.1f} GiB"

# --- Tokenizers -----------------------------------------------------------------------------------

def byte_alphabet():
    """{character: byte}: how GPT-2's files spell tokens, all printable (a space is Ġ)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}

def load_tokenizer(name):
    """A tiktoken Encoding: gpt2, bytes, or the GPT-2-style BPE of a folder or Hugging Face id."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str
    byte_of = byte_alphabet()
    try:
        if name == "gpt2":
            return tiktoken.get_encoding("gpt2")
        vocab, merges = read_tokenizer(name)
        if EOT not in vocab or max(vocab.values()) > 65535:
            raise ValueError(f"it has no {EOT}, or ids past 65535 ({max(vocab.values())})")
        merged = [line.replace(" ", "") for line in merges]
        if merged != sorted(set(merged), key=vocab.get):  # tiktoken merges in the order of ids
            raise ValueError("its ids are not in the order of its merges")
        ranks = {bytes(byte_of[char] for char in token): vocab.pop(token)
                 for token in [*byte_of, *merged]}
        return tiktoken.Encoding(name, pat_str=r50k_pat_str, mergeable_ranks=ranks,
                                 special_tokens=vocab)  # what is left
    except Exception as error:
        cure = "a byte-level BPE of GPT-2's kind is wanted" if name != "gpt2" else (
            "without a network, set TIKTOKEN_CACHE_DIR to a folder that holds vocab.bpe and "
            "encoder.json under the names 6d1cbeee0f20b3d9449abfede4726ed8212e3aee and "
            "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")
        fail(f"tokenizer {name}: {brief(error)}; {cure}")

def read_tokenizer(name):
    """(vocab, merges) by tokenizer.json, which also tells how text is split, or by two files."""
    if name == "bytes":
        return byte_alphabet() | {EOT: 256}, []
    if name == "gpt2":
        from tiktoken.load import read_file_cached
        vocab, merges = (read_file_cached(GPT2 + file) for file in ("encoder.json", "vocab.bpe"))
    else:
        folder = Path(fetch(name, ["tokenizer.json", "vocab.json", "merges.txt"]))
        if (folder / "tokenizer.json").exists():
            whole = json.loads((folder / "tokenizer.json").read_bytes())
            plain = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True,
                         use_regex=True)
            if plain | (whole["pre_tokenizer"] or {"type": ""}) != plain or whole["normalizer"]:
                raise ValueError("tokenizer.json changes or splits text in another way")
            vocab, merges = whole["model"]["vocab"], whole["model"]["merges"]
            vocab = vocab | {token["content"]: token["id"] for token in whole["added_tokens"]}
            return vocab, [line if isinstance(line, str) else " ".join(line) for line in merges]
        merges, vocab = ((folder / file).read_bytes() for file in ("merges.txt", "vocab.json"))
    lines = merges.decode("utf-8-sig").splitlines()  # whatever a Windows editor made of them
    return json.loads(vocab), [line for line in lines if line and not line.startswith("#version")]

def fetch(name, patterns):
    """A folder as it is; else these files of a repository on the Hugging Face hub."""
    try:
        if os.path.isdir(name):
            return name
        from huggingface_hub import snapshot_download
        return snapshot_download(name, allow_patterns=patterns)
    except Exception as error:
        fail(f"{name}: no such folder, and the Hugging Face hub doesn't give it: {brief(error)}")

def save_tokenizer(encoding, folder=None):
    """GPT-2's own two files and one that transformers asks for, {name: bytes}; written if asked."""
    vocab, merges = read_tokenizer(encoding.name)
    vocab = sorted(vocab.items(), key=lambda item: item[1])
    merges = "\n".join(["#version: 0.2", *merges, ""])
    config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False,
              "bos_token": EOT, "eos_token": EOT, "unk_token": EOT}
    texts = (text.encode("utf-8") for text in (json.dumps(dict(vocab)), merges, json.dumps(config)))
    files = dict(zip(TOKENIZER_FILES, texts, strict=True))
    for name in files if folder else ():
        write_file(os.path.join(folder, name), files[name])
    return files

def digests(files):
    """The sha256 of each of files, {name: bytes}."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}

def tokenizer_of(folder, vocab_size=0):
    """The tokenizer of a dataset, or of a checkpoint of vocab_size ids; GPT-2's if it has none."""
    own = [name for name in ("vocab.json", "tokenizer.json") if os.path.exists(f"{folder}/{name}")]
    encoding = load_tokenizer(folder if own else "gpt2")
    spare = vocab_size - encoding.n_vocab
    # some round a vocabulary up to a multiple of 8 to 128; those ids are never chosen
    if vocab_size and spare and not (0 < spare < 128 and vocab_size % 8 == 0):
        fail(f"{folder}: the model has {vocab_size} ids, tokenizer {encoding.name} "
             f"{encoding.n_vocab}; put the files of the one it was trained with there")
    return encoding

def tokenizer_files(folder):
    """(vocab_size, eot, {name: bytes}) of a dataset's tokenizer, or of GPT-2's if it has none."""
    try:
        if any(Path(folder, name).exists() for name in ("meta.json", *TOKENIZER_FILES)):
            files = {name: Path(folder, name).read_bytes() for name in TOKENIZER_FILES}
            meta = Path(folder, "meta.json")
            if meta.exists() and digests(files) != json.loads(meta.read_bytes())["sha256"]:
                raise ValueError("not as meta.json has them")
            vocab = json.loads(files["vocab.json"])
            return max(vocab.values()) + 1, vocab[EOT], files
    except Exception as error:
        fail(f"{folder}: {', '.join(TOKENIZER_FILES)} aren't whole ({brief(error)}), so that "
             "checkpoints could not be sampled: prepare the folder anew")
    find_shards(folder, "train")  # a folder mistyped shows before the network is asked for GPT-2's
    try:
        import tiktoken
        return 50257, 50256, save_tokenizer(tiktoken.get_encoding("gpt2"))
    except Exception:
        return 50257, 50256, {}

def check_tokenizer(files, folder, checkpoint):
    """Fail if a checkpoint's vocabulary is not that of folder's tokenizer files."""
    own = Path(checkpoint, "vocab.json")
    if files and own.exists() and json.loads(files["vocab.json"]) != json.loads(own.read_bytes()):
        fail(f"{folder} and {checkpoint} have different tokenizers: prepare the data anew with "
             f"--tokenizer={checkpoint}")

def checkpoints_in(out_dir):
    """The steps of the checkpoints in out_dir, in order."""
    names = [path.parent.name for path in Path(out_dir).glob("checkpoint-*/config.json")]
    return sorted(int(n[11:]) for n in names if re.fullmatch(r"checkpoint-(0|[1-9][0-9]*)", n))

def load_state(directory):
    """A checkpoint's trainer_state.pt; its tensors stay on the disk until they are used."""
    import torch
    path = os.path.join(directory, "trainer_state.pt")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        fail(f"{path}: {brief(error)}; nothing to resume from, but --init_from={directory} with "
             "another --out_dir starts from its weights")

def check_same_run(saved, settings, shards):
    """Fail if a run that goes on from saved, a load_state, would not be the run that it was."""
    kept = "seed block_size total_batch_size n_layer n_head n_embd optimizer dataset".split()

    def identity(settings, shards):
        sizes = {f"shards: tokens of {name}": tokens for name, tokens in shards}
        return {key: settings[key] for key in kept} | sizes
    now, then = identity(settings, shards), identity(saved["settings"], saved["shards"])
    for key in then | now:
        if now.get(key) != then.get(key):
            fail(f"{key}={now.get(key)} was {then.get(key)}: put it back, or choose another "
                 "--out_dir")

def find_checkpoint(out_dir, checkpoint="latest"):
    """The directory of out_dir's "latest" or "best", or of a checkpoint by path or hub id."""
    if checkpoint not in ("latest", "best"):
        return fetch(checkpoint, ["*.json", "merges.txt", "model*.safetensors"])
    steps = checkpoints_in(out_dir)
    if not steps:
        fail(f"no checkpoint in {out_dir}; train first: python train.py --out_dir={out_dir}")
    newest = os.path.join(out_dir, f"checkpoint-{steps[-1]}")
    best = load_state(newest)["best"]["step"] if checkpoint == "best" else -1
    return os.path.join(out_dir, f"checkpoint-{best}") if best in steps else newest

# --- Sources --------------------------------------------------------------------------------------

def pydocs():
    """Python's own documentation, a document a topic or module, in a fixed shuffled order."""
    import ast
    import warnings
    from pydoc_data.topics import topics
    warnings.simplefilter("ignore")  # old escapes in old modules
    library, documents = Path(os.__file__).parent, list(topics.values())
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for path in sorted(library.rglob("*.py")):
        inside = set(path.relative_to(library).parts)
        if {"site-packages", "dist-packages", "test", "tests", "idle_test"} & inside:
            continue
        with contextlib.suppress(SyntaxError, ValueError):  # left over from another Python
            tree = ast.parse(path.read_bytes())  # read, not imported: that could do anything
            nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
            texts = [(getattr(node, "name", path.stem), ast.get_docstring(node)) for node in nodes]
            documents.append("\n\n\n".join(f"{name}\n\n{text}" for name, text in texts if text))
    random.Random(1337).shuffle(documents)
    return [text.encode("utf-8", "replace").decode() for text in documents if len(text) > 200]

def read_files(files, text_key, whole):
    """Rows of text files: a whole file is one, or else a line, an object of JSON."""
    for file in files:
        opened = gzip.open if file.endswith(".gz") else open
        with opened(file, "rt", encoding="utf-8-sig") as f:
            for row in [{text_key: f.read()}] if whole else map(json.loads, filter(str.strip, f)):
                if not isinstance(row, dict):
                    raise ValueError("a line that is no JSON object")
                yield row

def open_source(files, settings):
    """This node's part of the source, a stream of rows that can tell its place and return to it."""
    import logging
    os.environ["USE_TORCH"] = "0"  # else datasets imports torch, for a second and 200 MB
    import datasets
    from pyarrow.dataset import ParquetFragmentScanOptions
    del os.environ["USE_TORCH"]
    datasets.disable_progress_bars()
    logging.disable(logging.CRITICAL)  # what goes wrong is told by us, in one line
    source, text_key, nodes = settings["source"], settings["text_key"], settings["world_size"]
    in_pieces = ParquetFragmentScanOptions(use_buffered_stream=True, pre_buffer=False)
    parquet = {"batch_size": 1000, "fragment_scan_options": in_pieces}
    kinds = {".parquet": parquet, ".jsonl": {}, ".json": {}, ".txt": {}}
    try:
        if source == "pydocs":
            stream = datasets.Dataset.from_dict({text_key: pydocs()}).to_iterable_dataset(nodes)
        elif files:
            ending, *others = {Path(file.removesuffix(".gz")).suffix for file in files}
            if others or ending not in kinds:
                raise ValueError(f"files have to end in one of {', '.join(kinds)}, or it and .gz")
            if ending in (".txt", ".jsonl"):
                options = {"files": files, "text_key": text_key, "whole": ending == ".txt"}
                stream = datasets.IterableDataset.from_generator(read_files, gen_kwargs=options)
            else:
                files = [f"gzip://{Path(file).stem}::{file}" if file.endswith(".parquet.gz")
                         else glob.escape(file) for file in files]
                options = kinds[ending] | {"data_files": files, "split": "train", "streaming": True}
                stream = datasets.load_dataset(ending[1:], **options)
            if ending == ".parquet" and text_key in stream.column_names:  # the others may differ
                stream = datasets.load_dataset("parquet", **options, columns=[text_key])
        elif (os.path.isdir(source) or glob.has_magic(source)
              or Path(source.removesuffix(".gz")).suffix in kinds):
            raise FileNotFoundError(f"no such file; a folder's are --source='{source}/**/*.txt'")
        else:
            stream = datasets.load_dataset(
                source, name=settings["source_config"] or None, split=settings["split"],
                revision=settings["revision"], streaming=True)
        # Readers seek, and nodes share, by row groups. On the hub a row group costs three requests
        # and three times its bytes: files are read whole there, unless they are few for the nodes.
        if files or stream.num_shards < 8 * nodes:
            stream = stream.reshard()
        if text_key in (stream.column_names or ()):
            stream = stream.select_columns([text_key])
        node = settings["rank"]
        return stream.shard(nodes, node) if node < stream.num_shards else stream.take(0)
    except Exception as error:
        fail(f"source {source} can't be opened: {brief(error)}")

def brief(error):
    """An exception in one line, with the file that datasets was at, which only its frames know."""
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    files = [here["file"] for here in frames if isinstance(here.get("file"), str)]
    words = " ".join(str(error).split()[:30]) or "nothing in it"
    return f"{files[-1] if files else type(error).__name__}: {words}"

def read_groups(stream, text_key, place):
    """Yield (place, texts): some GROUP characters of text, and the stream's state before them."""
    failures = 0
    while True:
        texts, size = [], 0
        try:
            if place:
                stream.load_state_dict(place)
            for rows in stream.iter(8):  # faster than one by one
                column = rows.get(text_key, [0])
                if not all(isinstance(text, str | None) for text in column):
                    fail(f"no text in column {text_key!r}; pick --text_key from: {', '.join(rows)}")
                texts += [text or "" for text in column]  # a null is an empty document
                size += sum(len(text) + 1 for text in texts[-len(column):])
                if size >= GROUP:
                    after, failures = stream.state_dict(), 0
                    yield place, texts
                    place, texts, size = after, [], 0
            yield place, texts  # the rest; if none, in_order takes it for the end
            return
        except Exception as error:  # what a network does is worth another try, from the last place
            failures += 1
            broken = (ValueError, TypeError, LookupError, EOFError, RecursionError,
                      PermissionError, gzip.BadGzipFile, gzip.zlib.error)
            if failures > 5 or isinstance(error, broken):
                fail(f"{brief(error)}; finished shards are kept: mend it, then the same command "
                     "goes on from them")
            print(f"{brief(error)}; trying again in {2 ** failures} s", file=sys.stderr, flush=True)
            time.sleep(2 ** failures)

# --- The work -------------------------------------------------------------------------------------

def tokenize(texts):
    """The tokens of texts, <|endoftext|> before each."""
    text = OWN.mark + OWN.mark.join(texts)
    try:  # one call for all: it lets other threads run, and makes no Python ints
        tokens = OWN.encoding.encode_to_numpy(text, allowed_special="all")
    except UnicodeEncodeError:  # lone surrogates, mended as tiktoken does it
        return tokenize([t.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                         for t in texts])
    except BaseException as error:  # Rust's panics are no Exception
        fail(f"can't tokenize {len(texts)} documents from {texts[0][:40]!r} on: {error}")
    if tokens.max() > 65535:
        fail(f"token id {tokens.max()} is past a shard's 65535; choose another --tokenizer")
    return tokens.astype("<u2")

def in_order(groups, encoding, threads):
    """Yield (place, tokens) in order, with the threads at work some way ahead."""
    def own_encoding():
        """Threads that share an Encoding get half as much done. <|endoftext|> in text is text."""
        OWN.mark = f"<{os.urandom(16).hex()}>"
        OWN.encoding = type(encoding)(
            encoding.name, pat_str=encoding._pat_str, mergeable_ranks=encoding._mergeable_ranks,
            special_tokens={OWN.mark: encoding.eot_token})
    flight, ahead = deque(), 0
    pool = ThreadPoolExecutor(threads, initializer=own_encoding)
    try:
        for place, texts in itertools.chain(groups, [(None, None)]):
            if texts:
                flight.append((place, sum(map(len, texts)), pool.submit(tokenize, texts)))
                ahead += flight[-1][1]
            while flight and (ahead > FLIGHT * threads or not texts):
                place, size, future = flight.popleft()
                ahead -= size
                yield place, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        groups.close()  # a stream left open can abort the interpreter's exit

def read_meta(folder, settings):
    """What this node has done in the folder, or {}; fails where that was with other settings."""
    mine, notes = {}, sorted(glob.glob(glob.escape(folder) + "/meta*.json"))
    for path in notes:
        try:
            then = json.loads(Path(path).read_text(encoding="utf-8"))
            then = {key: then[key] for key in then.keys() | settings.keys() | {"shards", "resume"}}
        except (ValueError, KeyError, AttributeError) as error:
            fail(f"{path}: {brief(error)}; delete {folder} and run again")
        for key, now in settings.items():
            if key not in ("dataset", "num_proc", "rank") and now not in (None, then[key]):
                fail(f"{folder} was begun with {key}={then[key]!r}, and this is {now!r}; put it "
                     "back, delete the folder, or choose another --dataset")
        mine = then if then["rank"] == settings["rank"] else mine
    if not notes and glob.glob(glob.escape(folder) + "/*.bin"):
        fail(f"{folder} holds shards from elsewhere; choose another --dataset")
    for shard in mine.get("shards", ()):
        path, size = os.path.join(folder, shard["file"]), HEADER + 2 * shard["tokens"]
        if os.path.exists(path + ".new"):  # killed after noting it, before showing it
            os.replace(path + ".new", path)
        if not os.path.exists(path) or os.path.getsize(path) != size:
            fail(f"{path} is gone or cut short; delete {folder} and run again")
    return mine

def write_meta(folder, meta):
    """Note what this node has done, with totals."""
    for key in ("documents", "tokens", "bytes"):
        meta[key] = sum(shard[key] for shard in meta["shards"])
    name = "meta.json" if meta["world_size"] == 1 else f"meta_{meta['rank']}.json"
    write_file(os.path.join(folder, name), json.dumps(meta, indent=1).encode("utf-8"))

def write_shard(folder, meta, tokens, lengths):
    """The next shard: written aside, noted in meta, then shown: a kill between loses nothing."""
    n, node = len(meta["shards"]), meta["rank"]
    number = 1 + node + (n - (node == 0)) * meta["world_size"] if n or node else 0
    name = Path(meta["dataset"]).absolute().name  # as it began, even in a renamed folder
    name = f"{name}_{'train' if number else 'val'}_{number:06}.bin"
    header = np.array([MAGIC, 1, len(tokens)] + [0] * 253, "<i4")
    digest = hashlib.sha256(header)
    digest.update(tokens)
    parts = np.array_split(tokens, len(tokens) // 10**6 + 1)  # for small temporaries
    counts = sum(np.bincount(part, minlength=65536) for part in parts)  # of each id
    meta["shards"].append({
        "file": name, "tokens": len(tokens), "sha256": digest.hexdigest(),
        "documents": int(counts[meta["eot"]]), "bytes": int(counts @ lengths)})
    path = os.path.join(folder, name)
    write_file(path + ".new", header, tokens)
    write_meta(folder, meta)
    os.replace(path + ".new", path)

def main():
    settings, start, env = configure(globals()), time.time(), os.environ
    node = rank if rank >= 0 else int(env.get("RANK") or env.get("SLURM_PROCID") or 0)
    nodes = world_size or int(env.get("WORLD_SIZE") or env.get("SLURM_NTASKS") or 1)
    if not (0 <= node < nodes and 0 < min(shard_size, val_tokens) and max_tokens >= 0 <= num_proc
            and max(shard_size, val_tokens) < 2**31):  # a header counts in int32
        fail(f"out of range: rank={node} of world_size={nodes}, shard_size={shard_size}, "
             f"val_tokens={val_tokens}, max_tokens={max_tokens} or num_proc={num_proc}")
    folder = dataset_dir(dataset)
    lock(folder, f".lock_{node}")
    files = [source] if os.path.isfile(source) else sorted(glob.glob(source, recursive=True))
    # absolute, as datasets would glob the working directory's name as well
    files = [os.path.abspath(file) for file in files if os.path.isfile(file)]
    revision = f"{len(files)} files, {sum(map(os.path.getsize, files))} bytes" if files else None
    settings |= {"rank": node, "world_size": nodes, "revision": revision}
    if nodes > 1:  # not meant, perhaps: a batch job's variables outside of srun
        print(f"node {node} of {nodes}: takes its share of the source")
    meta = read_meta(folder, settings)
    if meta and meta["resume"] is None:
        print(f"{folder} is finished: {meta['tokens']:,} tokens in {len(meta['shards'])} shards")
        return

    encoding = load_tokenizer(tokenizer)
    lengths = np.zeros(65536, np.uint16)  # of each id, in bytes
    lengths[[*encoding._mergeable_ranks.values()]] = [*map(len, encoding._mergeable_ranks)]
    if not meta:
        if not files and source != "pydocs":
            with contextlib.suppress(Exception):  # opening it will say why
                from huggingface_hub import HfApi
                settings["revision"] = HfApi().dataset_info(source).sha
        versions = {name: metadata.version(name) for name in ("tiktoken", "datasets", "numpy")}
        meta = settings | {
            "settings": settings, "versions": versions | {"python": sys.version.split()[0]},
            "vocab_size": encoding.max_token_value + 1, "eot": encoding.eot_token,
            "sha256": digests(save_tokenizer(encoding, folder if node == 0 else None)),
            "shards": [], "tokens": 0, "bytes": 0, "resume": {"place": None, "seen": 0}}
    stream = open_source(files, meta)

    from tqdm import tqdm
    before, seen = meta["bytes"], meta["resume"]["seen"]  # seen: tokens before the group at hand
    limit = max_tokens // nodes + (node < max_tokens % nodes) if max_tokens else sys.maxsize
    capacity = shard_size if node or meta["shards"] else val_tokens
    buffer, filled = np.empty(max(capacity, shard_size), "<u2"), 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with tqdm(unit=" tokens", unit_scale=True, disable=None) as bar:  # none without a terminal
        groups = read_groups(stream, text_key, meta["resume"]["place"])
        for place, tokens in in_order(groups, encoding, num_proc or cores):
            tokens = tokens[:limit - seen]
            rest = tokens[max(0, meta["tokens"] - seen):]  # what is before them is in shards
            while len(rest):
                if filled == capacity:  # and there is more, so it isn't the last
                    meta["resume"] = {"place": place, "seen": seen}
                    write_shard(folder, meta, buffer[:filled], lengths)
                    bar.write(f"{meta['shards'][-1]['file']}: {meta['tokens']:,} tokens so far",
                              sys.stderr)  # where a pipe that is closed, | head, ends nothing
                    filled, capacity = 0, shard_size
                part, rest = rest[:capacity - filled], rest[capacity - filled:]
                buffer[filled:filled + len(part)] = part
                filled += len(part)
            seen += len(tokens)
            bar.update(len(tokens))
            if seen == limit:
                break
        rest = buffer[:filled]
        if node == 0 and not meta["shards"]:  # val would take it all: a tenth will do
            if filled < 2:
                fail(f"{source} has {filled} tokens; val and train need 2, and 20,000 to be of use")
            capacity = max(1, filled // 10)
        while len(rest):
            part, rest, capacity = rest[:capacity], rest[capacity:], shard_size
            write_shard(folder, meta, part, lengths)
        meta["resume"] = None
        write_meta(folder, meta)
    seconds, new = time.time() - start, meta["bytes"] - before
    print(f"{folder}: {meta['documents']:,} documents, {meta['tokens']:,} tokens in "
          f"{len(meta['shards'])} shards, {seconds:.1f} s, {new / 1e6 / seconds:.1f} MB/s; "
          "it is normal for the last shard to be short")

if __name__ == "__main__":
    run(main, "; the same command goes on from the last finished shard")
