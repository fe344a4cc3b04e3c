"""
HellaSwag: how often a checkpoint finds the right one of four endings the likeliest.

    python hellaswag.py --checkpoint=gpt2                        acc 0.2859, acc_norm 0.2955 (nanoGPT's)
    python hellaswag.py --checkpoint=gpt2 --protocol=lm_eval     acc 0.2892, acc_norm 0.3114 (EleutherAI's)

Chance is 0.25. acc takes the ending of least loss, acc_norm that of least loss for its length. The
protocols differ in the text they show and in that length, so compare numbers of one protocol only:

    nanogpt  ctx as it is, " " + ending tokenized apart, length in tokens: build-nanogpt, llm.c
    lm_eval  "activity_label: ctx_a Ctx_b" without WikiHow's brackets, context and ending tokenized
             together, length in characters: EleutherAI's lm-evaluation-harness, leaderboards

Results go to stdout, settings and progress to stderr. Zellers et al., https://arxiv.org/abs/1905.07830
"""
import json
import math
import os
import re
import sys
from collections import namedtuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from config import configure, fail
from prepare import load_tokenizer, write_file

# model
out_dir = "out/fineweb_small"  # train.py's output
checkpoint = "latest"  # latest or best of out_dir, or a model directory or Hugging Face id, e.g. gpt2
# examples
hellaswag_data = "Rowan/hellaswag"  # Hugging Face id or a .jsonl path
protocol = "nanogpt"  # nanogpt or lm_eval
limit = 0  # examples to score, the first ones; 0: all
out = ""  # also write the losses here, a JSON line an example
# system
batch_tokens = 8192  # tokens a forward pass, padding included: lower it if memory is short
device = "auto"  # auto, cpu, cuda, cuda:1, mps
dtype = "auto"  # of the matrix products: auto, bfloat16, float16, float32
compile = True  # torch.compile the softmax: some ten seconds to start, then faster

EXPECTED = 10042  # examples in the validation split


# --- Examples: text to tokens -----------------------------------------------------------------------

# ind and label as in the set; context: token ids; endings: four lists of token ids; lengths: four
# numbers that acc_norm divides by; cropped: whether the context lost its beginning
Example = namedtuple("Example", "ind label context endings lengths cropped")


def clean(text):
    """
    WikiHow's markup out of a text, as the harness has it: only the ends are stripped first.

    >>> clean(" How to boil an egg [title] Fill a pot. [step] Use cold  water. ")
    'How to boil an egg.  Fill a pot. Use cold water.'
    """
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def tokens_of(row, encoding, protocol):
    """A row of the set -> context, its token ids; endings, four lists of them; lengths, four."""
    encode = encoding.encode_ordinary
    if protocol == "nanogpt":
        # with nothing before it an ending's first token could not be predicted
        context = encode(row["ctx"]) or [encoding.eot_token]
        endings = [encode(" " + ending) for ending in row["endings"]]
        return context, endings, [len(ending) for ending in endings]
    query = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    choices = [clean(ending) for ending in row["endings"]]
    # spaces at the end of the query belong to the ending, as GPT-2's tokens begin with theirs
    context = encode(query.rstrip())
    endings = [encode(f"{query} {choice}")[len(context):] for choice in choices]
    return context, endings, [max(len(choice), 1) for choice in choices]


def read_rows(hellaswag_data):
    """All rows of a .jsonl file or of a hub set's validation split: [(where it stands, row)]."""
    if hellaswag_data.endswith(".jsonl") or os.path.isfile(hellaswag_data):
        try:
            with open(hellaswag_data, "rb") as file:
                lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
        except OSError as error:
            fail(f"hellaswag_data={hellaswag_data}: {error.strerror}; --hellaswag_data=Rowan/hellaswag "
                 "takes the set from the Hugging Face hub")
        rows = []
        for number, line in lines:
            try:
                rows.append((f"{hellaswag_data} line {number}", json.loads(line)))
            except ValueError:
                fail(f"hellaswag_data={hellaswag_data}: line {number} is not JSON: is the file cut "
                     "short, or an error page? fetch hellaswag_val.jsonl anew")
        return rows
    try:
        from datasets import load_dataset
        rows = load_dataset(hellaswag_data, split="validation")
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        fail(f"hellaswag_data={hellaswag_data}: no such file, and not to be had from the Hugging Face "
             f"hub ({type(error).__name__}: {reason}); get hellaswag_val.jsonl where there is a network "
             "and set --hellaswag_data=PATH.jsonl")
    if len(rows) != EXPECTED:
        fail(f"hellaswag_data={hellaswag_data}: {len(rows):,} rows in its validation split, not "
             f"{EXPECTED:,}: not HellaSwag, or cut short; delete it from the cache and try again")
    return [(f"{hellaswag_data} row {number}", row) for number, row in enumerate(rows)]


def load(hellaswag_data, encoding, block_size, protocol="nanogpt", limit=0):
    """
    The set as a list of Examples, in its order; the first `limit` of them, if that isn't 0.

    A context is cut from the left so that it and the longest ending fit into block_size. Exits with 2
    and one line if the set can't be had, is cut short, has no labels, or an ending doesn't fit.
    """
    examples = []
    rows = read_rows(hellaswag_data)
    for number, (where, row) in enumerate(rows[:limit or None]):
        try:
            if row.get("label") in (None, "", -1, "-1"):
                fail(f"{where}: no label, as in the test split; the validation split has them")
            label, ind = int(row["label"]), int(row.get("ind", number))
            context, endings, lengths = tokens_of(row, encoding, protocol)
            if len(endings) != 4 or label not in range(4):
                raise ValueError(f"{len(endings)} endings and label {label}")
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            fail(f"{where}: not a row of HellaSwag: {type(error).__name__}: {error}")
        longest = max(map(len, endings))
        if longest >= block_size:
            fail(f"{where}: an ending of {longest} tokens and a token of context don't fit into "
                 f"block_size={block_size}; HellaSwag wants a model with a longer one")
        room = block_size - longest
        examples.append(Example(ind, label, context[-room:], endings, lengths, len(context) > room))
    if not examples:
        fail(f"hellaswag_data={hellaswag_data}: no rows in it")
    return examples


# --- Losses: B examples a batch, T tokens a row, C width, V vocabulary, N predictions, R rows of logits

def packed(example):
    """Tokens in an example's row. An ending's last token is predicted and predicts nothing."""
    return len(example.context) + sum(len(ending) - 1 for ending in example.endings)


def make_batches(examples, batch_tokens):
    """
    Indices of the examples in lists: like lengths together, so that there is little to pad.

    A batch holds at most batch_tokens, its padding included, but at least one example. The longest
    come first: if memory is short, that shows at once.
    """
    batches, longest = [], 0
    for i in sorted(range(len(examples)), key=lambda i: -packed(examples[i])):
        if not batches or longest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
            longest = packed(examples[i])
        batches[-1].append(i)
    return batches


def pack(batch):
    """
    A row an example: its context once, then its four endings side by side.

    context a b c, endings d e f | g h | i | j k   (endings 1 to 4)
    idx     a b c  d e  g  j        each token but an ending's last
    pos     0 1 2  3 4  3  3        an ending's positions go on from the context's
    part    0 0 0  1 1  2  4        a token sees those before it in part 0 and in its own

    Returns idx and pos (B, T), mask (B, 1, T, T); and of the N tokens to predict: source, the place of
    the predicting token in the flattened (B, T), target, its id, and ending, 4 b + its ending.
    """
    B, T = len(batch), max(map(packed, batch))
    idx, pos = torch.zeros(B, T, dtype=torch.long), torch.zeros(B, T, dtype=torch.long)
    part = torch.full((B, T), 5)  # 5: padding, which nothing sees
    source, target, ending = [], [], []
    for b, example in enumerate(batch):
        c = t = len(example.context)
        idx[b, :c], pos[b, :c], part[b, :c] = torch.tensor(example.context), torch.arange(c), 0
        for e, ids in enumerate(example.endings):
            n = len(ids) - 1
            idx[b, t:t + n], part[b, t:t + n] = torch.tensor(ids[:-1], dtype=torch.long), e + 1
            pos[b, t:t + n] = torch.arange(c, c + n)
            # the context's last token predicts the first one of every ending
            source += [b * T + c - 1, *range(b * T + t, b * T + t + n)]
            target += ids
            ending += [4 * b + e] * len(ids)
            t += n
    sees = (part[:, None] == 0) | (part[:, None] == part[:, :, None])  # (B, T, T)
    mask = (sees & torch.ones(T, T, dtype=torch.bool).tril())[:, None]
    return idx, pos, mask, torch.tensor(source), torch.tensor(target), torch.tensor(ending)


def log_normalizer(x, weight, vocab_size):
    """x (R, C), weight (padded V, C) -> (R,), log of the sum of exp of the logits, in float32."""
    return F.linear(x, weight)[:, :vocab_size].float().logsumexp(-1)


@torch.no_grad()
def evaluate(model, examples, batch_tokens, rank=0, world_size=1, progress=False,
             log_normalizer=log_normalizer):
    """
    The loss of each ending, summed over its tokens, in nats: (len(examples), 4) float32, on the CPU.

    model is a GPT, not a wrapper of it. The same batches are made for any world_size and dealt out to
    the ranks, which then add up what they have: every rank gets the same losses to the last bit.
    """
    weight, training = model.transformer.wte.weight, model.training
    losses = torch.zeros(len(examples), 4, device=weight.device)
    bar = None
    if progress:
        from tqdm import tqdm
        bar = tqdm(total=len(examples), desc="HellaSwag", unit=" examples")
    model.eval()
    for indices in make_batches(examples, batch_tokens)[rank::world_size]:
        idx, pos, mask, source, target, ending = pack([examples[i] for i in indices])
        # a row of logits a predicting token, not a token: half the cost, and it serves four endings
        predicting, source = source.unique(return_inverse=True)  # (R,), and (N,) into it
        idx, pos, mask, source, target, ending, predicting = (
            t.to(weight.device) for t in (idx, pos, mask, source, target, ending, predicting))
        x = model.hidden(idx, pos, mask).flatten(0, 1)[predicting]  # (R, C)
        # some logits at a time, so that they are still in the cache when they are summed
        rows = 128 if weight.device.type == "cpu" else 4096
        z = torch.cat([log_normalizer(part, weight, model.config.vocab_size)
                       for part in x.tensor_split(math.ceil(len(x) / rows))])  # (R,)
        logit = (x[source].float() * weight[target].float()).sum(-1)  # (N,), unrounded
        nll = torch.zeros(4 * len(indices), device=weight.device).index_add_(0, ending, z[source] - logit)
        losses[indices] = nll.view(-1, 4)
        if bar:
            bar.update(len(indices))
    if bar:
        bar.close()
    model.train(training)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(losses)
    return losses.cpu()


def score(examples, losses):
    """Accuracies of the losses (n, 4), and their standard errors as the harness reckons them."""
    lengths = torch.tensor([example.lengths for example in examples])
    labels = torch.tensor([example.label for example in examples])
    result = dict(n=len(examples))
    for name, loss in dict(acc=losses, acc_norm=losses / lengths).items():
        acc = (loss.argmin(-1) == labels).double().mean().item()
        result[name] = acc
        result[name + "_stderr"] = math.sqrt(acc * (1 - acc) / max(len(examples) - 1, 1))
    return result


def main():
    from train import autocast, find_checkpoint, load_model, pick_device, pick_dtype
    configure(globals(), echo=sys.stderr)
    if protocol not in ("nanogpt", "lm_eval"):
        fail(f"protocol={protocol}: there are nanogpt and lm_eval")
    for key, least in dict(limit=0, batch_tokens=1).items():
        if globals()[key] < least:
            fail(f"{key}={globals()[key]}: has to be {least} or more")
    if out and (os.path.isdir(out) or not os.access(os.path.dirname(out) or ".", os.W_OK)):
        fail(f"out={out}: can't be written: it is a folder, or in none that may be written to")
    place = pick_device(device)
    compute = pick_dtype(dtype, place)
    directory = find_checkpoint(out_dir, checkpoint)
    model = load_model(directory)
    c = model.config

    # the checkpoint's tokenizer, or gpt2 where it has none; a model may have spare ids, not fewer
    files = [os.path.join(directory, name) for name in ("vocab.json", "tokenizer.json")]
    encoding = load_tokenizer(directory if any(map(os.path.exists, files)) else "gpt2")
    if not 0 <= c.vocab_size - encoding.n_vocab < 128:
        fail(f"{directory}: the model has {c.vocab_size} ids and the tokenizer {encoding.n_vocab}: put "
             "the tokenizer it was trained with there (vocab.json, merges.txt)")
    examples = load(hellaswag_data, encoding, c.block_size, protocol, limit)

    # matrices rounded once for all batches; LayerNorms and the residual stream stay float32
    for module in (model.transformer.wte, *model.modules()):
        if isinstance(module, nn.Linear) or module is model.transformer.wte:
            module.to(getattr(torch, compute))
    model.to(place)
    print(f"{directory} on {place} in {compute}, {len(examples):,} examples", file=sys.stderr)
    with autocast(place, compute):
        normalizer = log_normalizer
        if compile:
            normalizer = torch.compile(log_normalizer, dynamic=True)
            try:  # with no C++ compiler or Triton it is the first call that fails
                with torch.no_grad():
                    normalizer(torch.zeros(8, c.n_embd, device=place), model.transformer.wte.weight,
                               c.vocab_size)
            except Exception as error:
                reason = str(error).strip().split("\n")[0]
                print(f"can't compile, going on without (--compile=False): {reason}", file=sys.stderr)
                normalizer = log_normalizer
        losses = evaluate(model, examples, batch_tokens, progress=True, log_normalizer=normalizer)
    if not losses.isfinite().all():
        fail(f"{directory}: some losses are not finite: a broken checkpoint, or too much for "
             f"{compute}; try --dtype=float32")

    result = score(examples, losses)
    print(f"HellaSwag, protocol {protocol}")
    for name in ("acc", "acc_norm"):
        print(f"{name:8} {result[name]:.4f} +- {result[name + '_stderr']:.4f}")
    cropped = sum(example.cropped for example in examples)
    print(f"{result['n']:,} examples of the validation split's {EXPECTED:,}, {cropped} of them with "
          f"their context cropped to block_size={c.block_size}")
    if out:
        lines = []
        for example, loss in zip(examples, losses.tolist()):
            norm = [value / length for value, length in zip(loss, example.lengths)]
            lines.append(json.dumps(dict(ind=example.ind, label=example.label, loss_sum=loss,
                                         loss_norm=norm)) + "\n")
        write_file(out, "".join(lines).encode())


if __name__ == "__main__":
    main()
