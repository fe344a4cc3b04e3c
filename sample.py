"""
Text out of a checkpoint.

    python sample.py config/quickstart.py                                a sample of that run
    python sample.py --checkpoint=gpt2 --start="Once upon" --num_samples=1      GPT-2's own weights

Prints each prompt followed by its continuation. A single sample appears as it is produced; several
are made together, each with a line of dashes after it. Settings, notes and speed go to stderr.
"""
import codecs
import functools
import hashlib
import json
import math
import os
import sys
import time
from collections import Counter

import torch

from config import configure, fail
from prepare import find_checkpoint, run, tokenizer_of
from train import load_model, pick_device, pick_dtype

# model
out_dir = "out/fineweb_small"  # where train.py wrote
checkpoint = "latest"  # latest or best of out_dir, or a model directory or hub id, e.g. gpt2
# text
start = ""  # prompt, FILE:path for a file's text, LINES:path for one a line; "" is <|endoftext|>
num_samples = 10  # continuations of each prompt
max_new_tokens = 500  # tokens a sample, at most; <|endoftext|> ends it earlier
out = ""  # file for the samples as JSON lines: prompt, text (what comes after it), tokens (of text)
# choice
temperature = 0.8  # below 1 favours likely tokens; 0 always takes the likeliest
top_k = 200  # choose among the k likeliest tokens; 0 among all
top_p = 1.0  # choose among the likeliest that have this probability together; 1 among all
seed = 1337  # same prompt and seed, same samples in any batch (but for rounding, in 16 bits)
# system
device = "auto"  # auto, cpu, cuda, cuda:1, mps
dtype = "auto"  # of matrix products and cache: auto, bfloat16, float16, float32
compile = False  # torch.compile: ten seconds and more before the first token, then a little faster

EOT = "<|endoftext|>"
BATCH = 64  # samples made together, at most: bounds the memory of the cache

# --- Sampling: B rows, T tokens, S slots in the cache, V vocabulary -------------------------------

def cast(model, device, dtype):
    """Move a float32 GPT to device, its matrices rounded once; LayerNorms and positions stay."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.to(dtype)
    model.transformer.wte.to(dtype)
    return model.to(device)

def choose(logits, draw, temperature=1.0, top_k=0, top_p=1.0):
    """
    A token a row: logits (B, V), draw (B,) in [0, 1) -> (B,) int64.

    >>> choose(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([0.5]), temperature=0.0)
    tensor([1])
    """
    if temperature < 1e-9:  # logits divided by less could overflow
        return logits.argmax(-1)
    ids = None
    if top_k or top_p < 1:
        logits, ids = logits.topk(min(top_k or logits.size(-1), logits.size(-1)))  # largest first
    logits = logits.float() / temperature
    if top_p < 1:
        probs = logits.softmax(-1)
        beyond = probs.cumsum(-1) - probs >= max(top_p, 1e-9)  # those before are enough
        logits = logits.masked_fill(beyond, -math.inf)
    if ids is not None:
        ids, order = ids.sort(-1)
        logits = logits.gather(-1, order)
    # Up the cumulative probability until it passes draw: one number a row. In the order of ids,
    # because there, unlike by size, rounding hardly moves the borders between tokens.
    probs = logits.softmax(-1)
    total = probs.cumsum(-1)
    passed = (total > draw[:, None] * total[:, -1:]) & (probs > 0)
    first = passed.int().argmax(-1, keepdim=True)
    return (first if ids is None else ids.gather(-1, first))[:, 0]

@torch.no_grad()
def generate(model, prompts, seeds, max_new_tokens, vocab_size=None, compile=False, **choice):
    """
    Continue prompts, B lists of 1 to block_size ids: yields (B,) int64 on the device a token.

    A row depends on its prompt and seed alone, save for rounding (in 16 bits it may tip a choice),
    and goes on to the end; the caller cuts it at <|endoftext|>. One that has filled its window of
    block_size tokens goes on from the newer half of them. Ids from vocab_size on are never chosen.
    choice: temperature, top_k, top_p.

    Only the first logits wait for the device. The rows are aligned at their ends, and "time" counts
    their columns. The cache is a ring: the key and the value of time t lie in slot t % slots.
    """
    config, weight = model.config, model.transformer.h[0].attn.c_attn.weight
    device, dtype, B = weight.device, weight.dtype, len(prompts)
    longest = max(map(len, prompts))
    slots = 64 * math.ceil(min(config.block_size, longest + max_new_tokens) / 64)

    def empty(B):
        shape = B, config.n_head, slots, config.n_embd // config.n_head
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * config.n_layer)]

    def read(hidden, idx, starts, now, cache):
        """idx (B, T), the tokens before time now -> logits (B, V) after the last; adds to cache."""
        time = torch.arange(now - idx.size(1), now, device=device)
        # look at the filled part of the ring only; but compiled code wants shapes that don't change
        S = slots if compile else min(slots, 64 * math.ceil(now / 64))
        held = now - 1 - (now - 1 - torch.arange(S, device=device)) % slots  # the time in each slot
        age = time[:, None] - held  # (T, S)
        pos = (time - starts[:, None]).clamp(min=0)  # (B, T); padding sees itself: no mask is empty
        mask = (age >= 0) & (age <= pos[..., None])  # (B, T, S)
        keys, values = cache[:config.n_layer], cache[config.n_layer:]
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            x = hidden(idx, pos, mask[:, None], (keys, values, time % slots))
            return model.logits(x[:, -1])[:, :vocab_size]

    tokens = torch.zeros(B, longest + max_new_tokens, dtype=torch.long)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[longest - len(prompt):longest] = torch.tensor(prompt)
    tokens = tokens.to(device)
    # all random numbers beforehand and on the CPU: the same on every device, and no waiting
    draws = [torch.rand(max_new_tokens, generator=torch.Generator().manual_seed(s)) for s in seeds]
    draws = torch.stack(draws).to(device)
    begin = [longest - len(prompt) for prompt in prompts]  # the time at which each window begins
    starts = torch.tensor(begin, device=device)
    step = torch.compile(model.hidden, dynamic=False) if compile else model.hidden
    try:  # where there is no C++ compiler or no Triton, it's the first call that fails
        if compile:
            read(step, tokens[:, :1], starts, 1, empty(B))
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        print(f"can't compile, going on as with --compile=False: {reason}", file=sys.stderr)
        step = model.hidden

    for now in range(longest, longest + max_new_tokens):
        if now == longest:  # the prompts; equal ones are read once
            same = [prompts.index(prompt) for prompt in prompts]
            once = sorted(set(same))
            cache = empty(len(once))
            logits = read(model.hidden, tokens[once, :now], starts[once], now, cache)
            to = [once.index(row) for row in same]
            logits, cache = logits[to], [part[to] for part in cache]
            if not logits.isfinite().all():
                fail(f"logits that aren't finite: a broken checkpoint, or more than {dtype} holds; "
                     "try --dtype=float32")
        else:
            full = [row for row in range(B) if now - begin[row] > config.block_size]
            for row in full:
                begin[row] = now - max(1, config.block_size // 2)
            starts = torch.tensor(begin, device=device) if full else starts
            logits = read(step, tokens[:, now - 1:now], starts, now, cache)
            if full:  # other positions, so other keys and values
                fresh, window = empty(len(full)), tokens[full, begin[full[0]]:now]
                logits[full] = read(model.hidden, window, starts[full], now, fresh)
                for part, new in zip(cache, fresh, strict=True):
                    part[full] = new
        tokens[:, now] = choose(logits, draws[:, now - longest], **choice)
        yield tokens[:, now]

# --- Prompts and text -----------------------------------------------------------------------------

def read_prompts(start):
    """The prompts: start itself, or what is in the file that FILE: or LINES: names."""
    kind, _, path = start.partition(":")
    if kind not in ("FILE", "LINES"):
        return [start]
    try:
        with open(path, encoding="utf-8-sig") as f:
            text = f.read()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--start={start}: can't read {path}: {error}")
    lines = [line for line in text.split("\n") if line.strip()]
    if kind == "LINES" and not lines:
        fail(f"--start={start}: {path} has no prompt; blank lines are passed over")
    return lines if kind == "LINES" else [text]

def encode(encoding, prompt, block_size):
    """Token ids of a prompt, the last block_size of them; <|endoftext|> in it is the token."""
    try:
        ids = encoding.encode(prompt or EOT, allowed_special={EOT}, disallowed_special=())
    except ValueError as error:  # a million spaces in a row
        fail(f"can't tokenize the prompt {prompt[:20]!r}...: {error}")
    if len(ids) > block_size:
        print(f"prompt of {len(ids)} tokens: the model sees the last {block_size}", file=sys.stderr)
    return ids[-block_size:]

def collect(steps, rows, encoding, show=None):
    """
    Run generate's steps until all rows have come to <|endoftext|> -> their ids, cut there.

    show is called with the text of the only row as it grows, in whole characters.
    """
    eot, made, ended = encoding.eot_token, [], False
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may span tokens
    for n, column in enumerate(steps, 1):
        made.append(column)
        ended = ended | (column == eot)
        if (show or n % 16 == 0) and ended.all():  # asking waits for the device
            break
        if show:
            show(decoder.decode(encoding.decode_single_token_bytes(column.item())))
    if show:
        show(decoder.decode(b"", final=True))
    samples = torch.stack(made, 1).tolist() if made else [[]] * rows
    return [ids[:ids.index(eot)] if eot in ids else ids for ids in samples]

def main():
    configure(globals(), echo=sys.stderr)
    for key, least in dict(num_samples=1, max_new_tokens=0, temperature=0, top_k=0).items():
        if globals()[key] < least:
            fail(f"--{key}={globals()[key]}: has to be {least} or more")
    if not 0 < top_p <= 1 or max_new_tokens > 10**7:
        fail(f"{top_p=} has to be above 0 and at most 1, {max_new_tokens=} at most 10 million")
    place = pick_device(device)
    precision = pick_dtype(dtype, place)
    prompts = read_prompts(start)
    directory = find_checkpoint(out_dir, checkpoint)
    model = load_model(directory)
    encoding = tokenizer_of(directory, model.config.vocab_size)
    cast(model, place, getattr(torch, precision))
    print(f"{directory} on {place} in {precision}", file=sys.stderr)

    jobs, made = [], Counter()
    for prompt in prompts:
        ids = encode(encoding, prompt, model.config.block_size)
        for _ in range(num_samples):
            made[tuple(ids)] += 1  # a prompt that comes twice goes on in two ways
            digest = hashlib.sha256(repr((seed, ids, made[tuple(ids)])).encode()).digest()
            jobs.append((prompt, ids, int.from_bytes(digest[:8], "little")))

    show = functools.partial(print, end="", flush=True) if len(jobs) == 1 else None
    began, count = time.perf_counter(), 0
    with open(out or os.devnull, "w", encoding="utf-8") as file:
        for i in range(0, len(jobs), BATCH):
            texts, ids, seeds = zip(*jobs[i:i + BATCH], strict=True)
            if show:
                show(prompts[0])
            steps = generate(model, ids, seeds, max_new_tokens, encoding.n_vocab, compile,
                             temperature=temperature, top_k=top_k, top_p=top_p)
            samples = collect(steps, len(ids), encoding, show)
            for prompt, tokens in zip(texts, samples, strict=True):
                text = encoding.decode_bytes(tokens).decode("utf-8", "replace")
                print(json.dumps(dict(prompt=prompt, text=text, tokens=tokens)), file=file)
                print("" if show else prompt + text + "\n" + "-" * 15, flush=True)
                count += len(tokens)
    seconds = time.perf_counter() - began
    print(f"{count} tokens in {seconds:.1f} s, {count / seconds:.0f} tokens/s", file=sys.stderr)

if __name__ == "__main__":
    run(main)
