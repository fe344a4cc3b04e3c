"""
HellaSwag: how often a checkpoint finds the right one of four endings the likeliest.

    python hellaswag.py --checkpoint=gpt2                       acc 0.2859, acc_norm 0.2955
    python hellaswag.py --checkpoint=gpt2 --protocol=lm_eval    acc 0.2892, acc_norm 0.3114

Chance is 0.25. acc takes the ending of least loss, acc_norm that of least loss for its length.
Numbers compare within a protocol only (those above are build-nanogpt's and the harness's own):

    nanogpt  ctx as it is, " " + ending tokenized apart, length in tokens: build-nanogpt, llm.c
    lm_eval  "activity_label: ctx_a Ctx_b" without WikiHow's brackets, context and ending tokenized
             together, length in characters: EleutherAI's lm-evaluation-harness, leaderboards

Results go to stdout, settings and progress to stderr. The set: https://arxiv.org/abs/1905.07830
"""
import json
import math
import os
import re
import sys
from collections import namedtuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from config import configure, fail
from prepare import brief, find_checkpoint, run, tokenizer_of, write_file

# model
out_dir = "out/fineweb_small"  # train.py's output
checkpoint = "latest"  # latest or best of out_dir, or a model directory or Hugging Face id
# examples
hellaswag_data = "Rowan/hellaswag"  # Hugging Face id or a .jsonl path
protocol = "nanogpt"  # nanogpt or lm_eval, see above
limit = 0  # examples to score, the first ones; 0: all
out = ""  # also write the losses here, a JSON line an example
# system
batch_tokens = 2048  # tokens a forward pass, padding included; more may help a large GPU
device = "auto"  # auto, cpu, cuda, cuda:1, mps
dtype = "auto"  # of the matrix products: auto, bfloat16, float16, float32
compile = False  # torch.compile the softmax: ten seconds to start, worth it with fast matrix units

EXPECTED = 10042  # rows of the validation split
# ind and label as in the set; context: token ids; endings: four lists of token ids; lengths: four
# numbers that acc_norm divides by; cropped: whether the context lost its beginning
Example = namedtuple("Example", "ind label context endings lengths cropped")

# --- Examples: from text to tokens ---------------------------------------------------------------

def clean(text):
    """
    WikiHow's brackets out of a text, in the harness's order: what they leave isn't stripped again.

    >>> clean(" Boil an egg [title] Fill a pot. [step] Use cold  water. ")
    'Boil an egg. Fill a pot. Use cold water.'
    """
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")

def tokens_of(row, encoding, protocol):
    """A row of the set -> its context's token ids, its endings' token ids, their lengths."""
    encode = encoding.encode_ordinary
    if protocol == "nanogpt":
        # an ending's first token needs something to be predicted from
        context = encode(row["ctx"]) or [encoding.eot_token]
        endings = [encode(" " + ending) for ending in row["endings"]]
        return context, endings, [len(ending) for ending in endings]
    query = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    choices = [clean(ending) for ending in row["endings"]]
    # spaces at the query's end go to the endings, as GPT-2's words begin with theirs
    context = encode(query.rstrip())
    endings = [encode(f"{query} {choice}")[len(context):] for choice in choices]
    return context, endings, [max(len(choice), 1) for choice in choices]

def read_rows(source):
    """The rows of a .jsonl file or of a hub set's validation split: [(where it stands, row)]."""
    rows, number = [], 0
    try:
        if source.endswith(".jsonl") or os.path.isfile(source):
            with open(source, "rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        rows.append((f"{source} line {number}", json.loads(line)))
            return rows
        from datasets import load_dataset
        for number, row in enumerate(load_dataset(source, split="validation")):
            rows.append((f"{source} row {number}", row))
    except Exception as error:
        at = f" in its line {number}: cut short, or another file" if number else ""
        fail(f"hellaswag_data={source}: {brief(error)}{at}; it takes the "
             "path of hellaswag_val.jsonl, or a network for Rowan/hellaswag; to train without, "
             "hellaswag_interval=0")
    if len(rows) != EXPECTED:
        fail(f"hellaswag_data={source}: {len(rows):,} validation rows instead of {EXPECTED:,}: cut "
             "short, or another set; delete it from the cache and try again")
    return rows

def load(source, encoding, block_size, protocol="nanogpt", limit=0):
    """
    The set's Examples in its order, the first `limit` of them if that isn't 0.

    A context loses its beginning if it and the longest ending are more than block_size + 1 tokens.
    Exits with 2 and one line if the set isn't there, is cut short, has no labels, or doesn't fit.
    """
    examples = []
    for number, (where, row) in enumerate(read_rows(source)[:limit or None]):
        try:
            label = str(row.get("label"))
            context, endings, lengths = tokens_of(row, encoding, protocol)
            if len(endings) != 4 or label not in "0 1 2 3".split():
                raise ValueError(f"{len(endings)} endings, label {label}; no label: the test split")
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            fail(f"{where}: not a row of HellaSwag: {brief(error)}")
        room = block_size + 1 - max(map(len, endings))  # the very last token is only predicted
        if room < 1:
            fail(f"{where}: a context and an ending of {block_size + 1 - room} tokens don't fit "
                 f"into block_size={block_size}; HellaSwag takes a model of a larger one")
        examples.append(Example(row.get("ind", number), int(label), context[-room:], endings,
                                lengths, len(context) > room))
    if not examples:
        fail(f"hellaswag_data={source}: no rows in it")
    return examples

# --- Losses: B examples, T tokens a row, N tokens to predict, R places that predict, C width ------

def row_length(example):
    """Tokens in an example's row: an ending's last one is predicted, but predicts nothing."""
    return len(example.context) + sum(len(ids) - 1 for ids in example.endings)

def make_batches(examples, batch_tokens):
    """
    Lists of indices: like lengths together, so that there is little padding, the longest first, so
    that memory runs out at once or never. At most batch_tokens, padding included, or one example.
    """
    batches, longest = [], math.inf
    for i in sorted(range(len(examples)), key=lambda i: -row_length(examples[i])):
        if not batches or longest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
            longest = row_length(examples[i])
        batches[-1].append(i)
    return batches

def pack(examples):
    """
    One row an example: its context once, then its endings side by side.

    context a b c, endings d e f | g h | i | j k
    idx     a b c  d e  g  j        an ending's last token stays away
    pos     0 1 2  3 4  3  3        each ending goes on from the context
    part    0 0 0  1 1  2  4        a token sees part 0 and its own, as far as itself

    Returns idx and pos (B, T), mask (B, 1, T, T), and for the N tokens of all endings: source, the
    place in (B * T) that predicts it; target, its id; ending, which of the 4 * B it belongs to.
    """
    B, T = len(examples), max(map(row_length, examples))
    idx, pos, part = torch.zeros(B, T).long(), torch.zeros(B, T).long(), torch.full((B, T), -1)
    source, target, ending = [], [], []
    for b, example in enumerate(examples):
        c = len(example.context)
        ids, positions, parts = list(example.context), list(range(c)), [0] * c
        for e, tokens in enumerate(example.endings):
            n = len(tokens) - 1
            # every ending's first token is predicted by the context's last one
            source += [b * T + c - 1, *range(b * T + len(ids), b * T + len(ids) + n)]
            target += tokens
            ending += [4 * b + e] * (n + 1)
            ids += tokens[:n]
            positions += range(c, c + n)
            parts += [e + 1] * n
        for row, values in ((idx, ids), (pos, positions), (part, parts)):
            row[b, :len(values)] = torch.tensor(values)
    sees = (part[:, None] == 0) | (part[:, None] == part[:, :, None])  # (B, T, T)
    mask = (sees & torch.ones(T, T, dtype=torch.bool).tril())[:, None]
    return idx, pos, mask, torch.tensor(source), torch.tensor(target), torch.tensor(ending)

def logsumexp(x, weight):
    """x (R, C), weight (v, C) -> (R,): log of the sum of exp of v logits, summed in float32."""
    logits = F.linear(x, weight).float()
    top = logits.amax(-1, keepdim=True)
    return logits.sub_(top).exp_().sum(-1).log_() + top[:, 0]  # in place: half the memory to visit

@torch.no_grad()
def evaluate(model, examples, batch_tokens=batch_tokens, rank=0, world_size=1, progress=False,
             logsumexp=logsumexp):
    """
    (len(examples), 4) float64 on the CPU: each ending's loss in nats, summed over its tokens.

    model: a GPT, not a wrapper of it. The batches are the same for any number of ranks, which
    share them out and add up what they found, so that all get the same losses to the last bit.
    """
    from tqdm import tqdm
    weight, training = model.transformer.wte.weight, model.training
    # a slice of the vocabulary at a time, whose logits are summed while the cache holds them: on a
    # CPU faster than the matrix product alone if that has to write them all to memory
    slices = weight[:model.config.vocab_size].split(2048 if weight.is_cpu else 16384)
    losses = torch.zeros(len(examples), 4, dtype=torch.float64)
    batches = make_batches(examples, batch_tokens)[rank::world_size]
    model.eval()
    for batch in tqdm(batches, desc="HellaSwag", unit=" batches", disable=not progress):
        idx, pos, mask, source, target, ending = pack([examples[i] for i in batch])
        # logits only where something is predicted, and one row of them for four first tokens
        places, source = source.unique(return_inverse=True)  # (R,), and (N,) of 0..R-1
        idx, pos, mask, places, source, target = (
            t.to(weight.device) for t in (idx, pos, mask, places, source, target))
        x = model.hidden(idx, pos, mask).flatten(0, 1)[places]  # (R, C)
        narrow = x.to(weight.dtype)
        z = torch.stack([logsumexp(narrow, part) for part in slices]).logsumexp(0)  # (R,)
        logit = (x[source].float() * weight[target].float()).sum(-1)  # (N,)
        nats = (z[source] - logit).cpu().double()
        losses[batch] = torch.zeros(4 * len(batch)).double().index_add_(0, ending, nats).view(-1, 4)
    model.train(training)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(losses)
    return losses

def score(examples, losses):
    """acc and acc_norm of losses (n, 4), their standard errors as in the harness, and n."""
    lengths = torch.tensor([example.lengths for example in examples])
    labels = torch.tensor([example.label for example in examples])
    result = dict(n=len(examples))
    for name, loss in dict(acc=losses, acc_norm=losses / lengths).items():
        result[name] = p = (loss.argmin(-1) == labels).double().mean().item()
        result[name + "_stderr"] = math.sqrt(p * (1 - p) / max(len(examples) - 1, 1))
    return result

def main():
    from train import load_model, pick_device, pick_dtype  # here: train.py imports this file
    configure(globals(), echo=sys.stderr)
    if protocol not in ("nanogpt", "lm_eval") or limit < 0 or batch_tokens < 1:
        fail(f"protocol={protocol} limit={limit} batch_tokens={batch_tokens}: they are nanogpt or "
             "lm_eval, 0 or more, 1 or more")
    path = os.path.realpath(out)  # not a link or a device, which a new file would replace
    if out and (os.path.exists(path) and not os.path.isfile(path)
                or not os.access(os.path.dirname(path), os.W_OK)):
        fail(f"out={out}: no plain file, or in a folder that isn't there or can't be written to")
    place = pick_device(device)
    compute = pick_dtype(dtype, place)
    directory = find_checkpoint(out_dir, checkpoint)
    model = load_model(directory)
    c = model.config

    encoding = tokenizer_of(directory, c.vocab_size)
    examples = load(hellaswag_data, encoding, c.block_size, protocol, limit)
    # matrices rounded once for all batches; LayerNorms and the residual stream stay float32
    for module in (model.transformer.wte, *model.transformer.h.modules()):
        if isinstance(module, (torch.nn.Embedding, torch.nn.Linear)):
            module.to(getattr(torch, compute))
    model.to(place)
    print(f"{directory} on {place} in {compute}", file=sys.stderr)
    normalizer = torch.compile(logsumexp, dynamic=True) if compile else logsumexp
    with torch.autocast(place.partition(":")[0], getattr(torch, compute), compute != "float32"):
        try:  # with no C++ compiler or Triton it is the first call that fails
            normalizer(*model.transformer.wte.weight.detach()[:24].split(16))
        except Exception as error:
            print(f"can't compile, going on without: {brief(error)}", file=sys.stderr)
            normalizer = logsumexp
        losses = evaluate(model, examples, batch_tokens, progress=True, logsumexp=normalizer)
    if not losses.isfinite().all():
        fail(f"{directory}: losses that aren't finite: a broken checkpoint, or more than {compute} "
             "holds; try --dtype=float32")

    result = score(examples, losses)
    norms = (losses / torch.tensor([example.lengths for example in examples])).tolist()
    rows = [dict(ind=example.ind, label=example.label, loss_sum=nats, loss_norm=norm)
            for example, nats, norm in zip(examples, losses.tolist(), norms, strict=True)]
    try:
        if out:
            write_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    finally:  # a full disk doesn't take the result along
        for name in ("acc", "acc_norm"):
            print(f"{name:8} {result[name]:.4f} +- {result[name + '_stderr']:.4f}")
        cropped = sum(example.cropped for example in examples)
        print(f"HellaSwag by protocol {protocol}: {len(examples):,} of the {EXPECTED:,} examples, "
              f"{cropped:,} of them with a context cropped to fit block_size={c.block_size}",
              flush=True)

if __name__ == "__main__":
    run(main)
