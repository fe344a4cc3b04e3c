"""
GPT-2: the model and its training loop.

    python train.py config/quickstart.py                                          two CPU cores
    torchrun --standalone --nproc_per_node=8 train.py config/fineweb_small.py     eight GPUs
"""
import atexit
import importlib.util
import json
import math
import os
import re
import shlex
import signal
import sys
import time
from dataclasses import make_dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint as recompute

import prepare  # also reads the shards, finds checkpoints and writes files all or nothing
from config import configure, fail

# data and output
dataset = "fineweb_small"  # folder of shards: data/<dataset>, or a path
out_dir = "out/fineweb_small"  # checkpoints and log.jsonl go here
init_from = "scratch"  # scratch, resume, auto (resume, if there is a run), a checkpoint or hub id
# model; of these only dropout and block_size (a crop) apply to weights that init_from gives
n_layer = 12  # blocks
n_head = 12  # attention heads
n_embd = 768  # width
block_size = 1024  # context, in tokens
dropout = 0.0  # probability; 0 is right for one pass over the data
# batch
total_batch_size = 524288  # tokens an optimizer step, over all processes (2**19)
batch_size = 16  # sequences a forward pass, a process; accumulation steps are derived
# optimizer
max_iters = 19073  # optimizer steps: 10B tokens at 2**19 each
learning_rate = 6e-4  # the peak, after warm-up
min_lr = 6e-5  # where the cosine ends, at max_iters; never above learning_rate
warmup_iters = 700  # steps of linear warm-up
optimizer = "adamw"  # adamw, or muon for the blocks' matrices and adamw for the rest
weight_decay = 0.1  # on tensors of two or more dimensions
beta1 = 0.9  # AdamW's decay of the gradient's mean
beta2 = 0.95  # and of its square's
grad_clip = 1.0  # largest gradient norm; 0 does not clip
# watching; 0 switches an interval off
eval_interval = 250  # steps between evaluations on val
eval_tokens = 10485760  # tokens of val, always the same ones
hellaswag_interval = 0  # steps between HellaSwag evaluations
hellaswag_data = "Rowan/hellaswag"  # Hugging Face id or a .jsonl path
log_interval = 10  # steps between rows of log.jsonl
save_interval = 1000  # steps between checkpoints; a new best val loss is saved as well
keep_checkpoints = 2  # the newest ones kept, beside the best
patience = 0  # evaluations without a better val loss before stopping; 0 never stops
tracker = ""  # wandb or trackio; "" for neither
# system
seed = 1337  # initial weights, data order and dropout follow from it
device = "auto"  # auto, cpu, cuda, cuda:1, mps
dtype = "auto"  # auto, bfloat16, float16, float32
compile = True  # torch.compile: slow to start, faster from then on
gradient_checkpointing = False  # recompute activations in backward: less memory, more time

# --- The model: B batch, T time, C width, H heads, D = C / H, S cache slots, V vocabulary ---------

GPTConfig = make_dataclass("GPTConfig", ["block_size", "vocab_size", "n_layer", "n_head", "n_embd",
                                         "dropout", "gradient_checkpointing"])

class Block(nn.Module):
    """Attention, then an MLP: each reads the residual stream through a LayerNorm and adds to it."""
    def __init__(self, config):
        super().__init__()
        self.config, C = config, config.n_embd
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.attn = nn.ModuleDict(dict(c_attn=nn.Linear(C, 3 * C), c_proj=nn.Linear(C, C)))
        self.mlp = nn.ModuleDict(dict(c_fc=nn.Linear(C, 4 * C), c_proj=nn.Linear(4 * C, C)))

    def forward(self, x, mask, cache):
        B, T, C = x.shape
        dropout = self.config.dropout if self.training else 0.0
        qkv = self.attn.c_attn(self.ln_1(x)).view(B, T, 3, self.config.n_head, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        if cache is not None:
            keys, values, slots = cache  # (B, H, S, D) twice; the slots of these T tokens
            k = keys.index_copy_(2, slots, k.type_as(keys))[:, :, :mask.size(-1)]
            v = values.index_copy_(2, slots, v)[:, :, :mask.size(-1)]
        # is_causal masks from the top left, wrong for one new token: a cache comes with its mask
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None)
        x = x + F.dropout(self.attn.c_proj(y.transpose(1, 2).reshape(B, T, C)), dropout)
        y = F.gelu(self.mlp.c_fc(self.ln_2(x)), approximate="tanh")  # (B, T, 4C)
        return x + F.dropout(self.mlp.c_proj(y), dropout)

class GPT(nn.Module):
    """GPT-2 in Hugging Face's parameter names; the output matrix is the token embedding."""
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(128 * math.ceil(config.vocab_size / 128), config.n_embd),  # padded
            wpe=nn.Embedding(config.block_size, config.n_embd),
            h=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            ln_f=nn.LayerNorm(config.n_embd)))
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif p.dim() == 2:  # the 2 n_layer c_proj add up in the residual stream
                nn.init.normal_(p, 0, 0.02 / (2 * config.n_layer if "c_proj" in name else 1) ** 0.5)
        self.transformer.wte.weight.data[config.vocab_size:] = 0  # no gradient, so it stays 0

    def run(self, part, *args):
        """part(*args); under gradient checkpointing computed anew in backward, not kept for it."""
        if self.config.gradient_checkpointing and self.training:
            return recompute(part, *args, use_reentrant=False)
        return part(*args)

    def hidden(self, idx, pos=None, mask=None, cache=None):
        """Token ids (B, T) -> (B, T, C), the last hidden states, after ln_f.

        pos: (T,) or (B, T), else 0..T-1. mask: bool (B, 1, T, S), True where a token may look, else
        causal. cache: (keys, values, slots), (n_layer, B, H, S, D) twice and (T,): this call's keys
        and values go to slots, and it looks at the first mask.size(-1) slots."""
        pos = torch.arange(idx.size(1), device=idx.device) if pos is None else pos
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)  # (B, T, C)
        x = F.dropout(x, self.config.dropout, self.training)
        for i, block in enumerate(self.transformer.h):
            x = self.run(block, x, mask, cache and (cache[0][i], cache[1][i], cache[2]))
        return self.transformer.ln_f(x)

    def logits(self, x):
        """(..., C) -> (..., V) over the true vocabulary: the padded rows are cut."""
        return F.linear(x, self.transformer.wte.weight)[..., :self.config.vocab_size]

    def forward(self, idx, targets):
        """idx and targets (B, T) -> mean cross-entropy, in nats a token."""
        def loss(x, y):
            logits = self.logits(x).float().flatten(0, 1)
            return F.cross_entropy(logits, y.flatten(), reduction="sum")
        B, T = idx.shape
        # logits are the largest tensor: 1,024 tokens at a time; smaller chunks only cost time
        b = max(1, 1024 // T) if self.config.gradient_checkpointing and self.training else B
        return sum(map(self.run, [loss] * B, self.hidden(idx).split(b), targets.split(b))) / (B * T)

# --- Checkpoints: Hugging Face model directories, plus trainer_state.pt for resuming -------------

TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # (in, out) in Hugging Face's files

def load_model(directory, block_size=0):
    """A GPT (float32, CPU, eval mode) from any GPT2LMHeadModel directory, cropped to block_size."""
    try:
        hf = json.loads(Path(directory, "config.json").read_text(encoding="utf-8"))
        plain = dict(model_type="gpt2", activation_function="gelu_new", layer_norm_epsilon=1e-5,
                     scale_attn_by_inverse_layer_idx=False, scale_attn_weights=True,
                     tie_word_embeddings=True)
        if plain != plain | {key: hf[key] for key in plain if key in hf}:
            raise ValueError(f"config.json is not a plain GPT-2's, which has {plain}")
        T = min(hf["n_positions"], block_size or hf["n_positions"])
        shape = hf["vocab_size"], hf["n_layer"], hf["n_head"], hf["n_embd"]
        with torch.device("meta"):
            model = GPT(GPTConfig(T, *shape, dropout=0.0, gradient_checkpointing=False))
        prefix = re.compile(r"^((_orig_mod|module|transformer)\.)*")  # wrappers add, the hub omits
        files = map(load_file, Path(directory).glob("model*.safetensors"))  # large ones in parts
        found = {prefix.sub("transformer.", k): t.float() for f in files for k, t in f.items()}
        for name, p in model.state_dict().items():
            t = found[name].t() if name.endswith(TRANSPOSED) else found[name][:len(p)]
            found[name] = F.pad(t, (0, 0, 0, -len(t) % 128)) if "wte" in name else t.contiguous()
        model.load_state_dict(found, strict=False, assign=True)  # old files hold masks
    except Exception as error:
        fail(f"{directory}: no GPT-2 by config.json, safetensors: {type(error).__name__} {error}")
    return model.requires_grad_().eval()

def save_checkpoint(directory, model, tokenizer, eot, **state):
    """Write model, tokenizer ({name: bytes}) and state; a kill leaves all of it or nothing."""
    c, tensors = model.config, {}
    for name, p in model.state_dict().items():
        p = p[:c.vocab_size] if "wte" in name else p.t() if name.endswith(TRANSPOSED) else p
        tensors[name] = p.float().cpu().contiguous()
    if not all(t.isfinite().all() for t in tensors.values()):
        fail(f"{directory}: a weight is not finite, so it isn't written; older ones are kept")
    ends = dict(bos_token_id=eot, eos_token_id=eot)
    hf = dict(model_type="gpt2", architectures=["GPT2LMHeadModel"], vocab_size=c.vocab_size,
              n_positions=c.block_size, n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd, **ends)
    files = tokenizer | {"config.json": json.dumps(hf, indent=2).encode(),
                         "generation_config.json": json.dumps(ends, indent=2).encode()}
    with prepare.write_folder(directory) as aside:
        save_file(tensors, f"{aside}/model.safetensors", metadata={"format": "pt"})
        torch.save(state, f"{aside}/trainer_state.pt")
        for name, data in files.items():
            prepare.write_file(f"{aside}/{name}", data)

# --- Optimization and hardware --------------------------------------------------------------------

def make_optimizers(model, name, weight_decay, betas):
    """[AdamW], decaying tensors of two or more dimensions; "muon" takes the blocks' matrices."""
    params = dict(model.named_parameters())
    muon = [n for n, p in params.items() if name == "muon" and ".h." in n and p.dim() > 1]
    decay = [p for n, p in params.items() if n not in muon and p.dim() > 1]
    groups = [dict(params=decay, weight_decay=weight_decay),
              dict(params=[p for p in params.values() if p.dim() < 2], weight_decay=0.0)]
    optimizers = [torch.optim.AdamW(groups, betas=betas, fused=True)]
    if muon:  # scaled to AdamW's step size, so that one learning rate serves both
        optimizers += [torch.optim.Muon([params[n] for n in muon], weight_decay=weight_decay,
                                        adjust_lr_fn="match_rms_adamw")]
    return optimizers

def get_lr(it, learning_rate, min_lr, warmup_iters, max_iters):
    """Learning rate of update it = 0, 1 ...: a linear warm-up from above 0, a cosine to min_lr."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    angle = math.pi * min(1.0, (it - warmup_iters) / max(1, max_iters - warmup_iters))
    return min(learning_rate, min_lr + 0.5 * (1 + math.cos(angle)) * (learning_rate - min_lr))

def pick_device(device):
    """A device that is there; "auto" takes cuda (torchrun's processes one each), mps or cpu."""
    if device in ("auto", "cuda") and torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK') or 0}"
    elif device == "auto":
        device = "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.Generator(torch.device(device).type)  # meta and the like have none
        return str(torch.zeros(1, device=device).device)
    except Exception as error:
        fail(f"device={device}, {torch.cuda.device_count()} GPUs: {str(error)[:70]}; try =auto")

def pick_dtype(dtype, device):
    """The compute dtype's name; "auto" takes bfloat16 where the hardware has it, not emulated."""
    cuda = device.startswith("cuda")
    bf16 = (torch.cuda.is_bf16_supported(including_emulation=False) if cuda
            else device == "cpu" and torch.cpu._is_avx512_bf16_supported())
    best = "bfloat16" if bf16 else "float16" if cuda else "float32"
    known = ("auto", "float32", "float16") + ("bfloat16",) * (bf16 or not cuda)
    if dtype not in known:
        fail(f"dtype={dtype}: {device} takes {', '.join(known)}")
    return best if dtype == "auto" else dtype

# FLOP/s, dense, 16 bits, by the makers' data sheets
PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12,
              "L40S": 362e12, "L4": 121e12, "A10": 125e12, "RTX 4090": 165e12, "T4": 65e12}

# --- The run --------------------------------------------------------------------------------------

def main():
    settings = configure(globals())
    for key, value in settings.items():
        least = int(key.startswith("n_") or key.endswith("_size"))
        if not isinstance(value, str) and value < least:
            fail(f"{key}={value}: has to be {least} or more")
    if n_embd % n_head or max(dropout, beta1, beta2) >= 1 or optimizer not in ("adamw", "muon"):
        fail(f"{n_embd=} over {n_head=}, {dropout=}, {beta1=}, {beta2=} or {optimizer=} can't be")
    if tracker and (tracker not in ("wandb", "trackio") or not importlib.util.find_spec(tracker)):
        fail(f"tracker={tracker}: has to be wandb or trackio, installed by pip, or '' for none")
    rank, world_size = int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
    place = pick_device(device)
    if "cuda" in place:
        torch.cuda.set_device(place)
    compute, kind = pick_dtype(dtype, place), place.partition(":")[0]
    context = torch.autocast(kind, getattr(torch, compute), enabled=compute != "float32")
    torch.set_float32_matmul_precision("high")  # TF32; "medium" would mean bf16 on a CPU
    if rank == 0:
        prepare.lock(out_dir)  # makes it, and keeps a second run out
    if world_size > 1:  # gloo beside nccl: ranks agree on flags without waiting for the device
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)
    asked = []  # the signals that asked to stop; one that comes earlier ends the wait for ranks
    def ask(signum, frame):  # a second one ends at once; under torchrun it may be the first again
        asked.append(signum)
        signal.signal(signum, ask if os.environ.get("WORLD_SIZE") else signal.SIG_DFL)
    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)
    prepare.keep_freed_memory()
    reduce = dist.all_reduce if world_size > 1 else lambda *_, **__: None
    sys.stdout = sys.stdout if rank == 0 else open(os.devnull, "w", encoding="utf-8")
    if not os.path.isdir(out_dir):
        fail(f"out_dir={out_dir}: not seen by rank {rank}; all machines have to share its disk")

    # start from new weights, from somebody's, or from this run's newest checkpoint
    steps = prepare.checkpoints_in(out_dir)
    resume = init_from == "resume" or init_from == "auto" and bool(steps)
    if steps and not resume:
        fail(f"{out_dir} holds a run: go on by --init_from=resume, or choose another --out_dir")
    folder = prepare.dataset_dir(dataset)
    vocab_size, eot, tokenizer = prepare.tokenizer_files(folder)
    torch.manual_seed(seed % 2**63)
    settings["dataset"] = os.path.basename(os.path.abspath(folder))  # however the path is spelt
    if resume or init_from not in ("scratch", "auto"):
        source = prepare.find_checkpoint(out_dir, "latest" if resume else init_from)
        model = load_model(source, block_size)
        prepare.check_tokenizer(tokenizer, folder, source)
        print(f"from {source}: {model.config}")
    else:
        model = GPT(GPTConfig(block_size, vocab_size, n_layer, n_head, n_embd, dropout, False))
    c = model.config
    c.dropout, c.gradient_checkpointing = dropout, gradient_checkpointing
    if c.vocab_size != vocab_size:
        fail(f"{folder} has {vocab_size} token ids, the model {c.vocab_size}: another tokenizer")
    train_data = prepare.Windows(folder, "train", c.block_size, vocab_size)
    val_data = prepare.Windows(folder, "val", c.block_size, vocab_size)
    shards = [[os.path.basename(s.path), s.tokens] for s in train_data.shards + val_data.shards]
    optimizers = make_optimizers(model.to(place), optimizer, weight_decay, (beta1, beta2))
    scaler = torch.amp.GradScaler(kind, enabled=compute == "float16")
    step, best = 0, dict(val_loss=math.inf, step=-1, stale=0)  # stale: evaluations since the best
    if resume:
        saved = prepare.load_state(source)
        prepare.check_same_run(saved, settings, shards)
        step, best = saved["step"], saved["best"]
        scaler.load_state_dict(saved["scaler"] or scaler.state_dict())  # {} unless it was float16
        for one, state in zip(optimizers, saved["optimizers"], strict=True):
            one.load_state_dict(one.state_dict() | {"state": state})  # hyperparameters are today's

    B, sequences = batch_size, total_batch_size // c.block_size  # B is halved when memory runs out
    unit = B * world_size * c.block_size
    if total_batch_size % unit:
        fail(f"total_batch_size={total_batch_size} isn't a multiple of {unit} = batch_size {B} x "
             f"block_size {c.block_size} x {world_size} processes: lower --batch_size, or take "
             f"--total_batch_size={max(1, round(total_batch_size / unit)) * unit}, the nearest")
    n_params = sum(map(torch.numel, model.parameters())) - (-vocab_size % 128) * c.n_embd  # no pad
    print(f"{n_params:,} parameters on {place} in {compute}\n{total_batch_size:,} tokens a step = "
          f"{total_batch_size // unit} micro-batches x {world_size} processes x {B} sequences x "
          f"{c.block_size} tokens; an epoch is {len(train_data) / sequences:,.1f} steps")
    gpu = torch.cuda.get_device_name(place) if kind == "cuda" else ""
    peak = next((x for name, x in PEAK_FLOPS.items() if re.search(rf"\b{name}\b", gpu)), 0)
    # a token costs 6 FLOPs a weight it meets, and attention's two T x T products
    flops = 6 * (n_params - c.block_size * c.n_embd) + 12 * c.n_layer * c.n_embd * c.block_size
    engine = torch.compile(model, dynamic=False) if compile else model
    if world_size > 1:  # without find_unused, DDP regroups its sums after the first step
        engine = DDP(engine, gradient_as_bucket_view=True, find_unused_parameters=kind == "cpu")
    if hellaswag_interval:
        import hellaswag
        examples = hellaswag.load(hellaswag_data, prepare.tokenizer_of(folder), c.block_size)
    tracking = __import__(tracker) if tracker and rank == 0 else None
    if tracking:
        tracking.init(project="finegpt", name=Path(out_dir).name, config=settings,
                      resume="allow" if resume else "never")
    log_file = prepare.open_log(f"{out_dir}/log.jsonl" if rank == 0 else os.devnull, step, resume)

    mean = lr = norm = None  # of this process's newest step
    works, left, fp16, clock = not compile, "?", compute == "float16", (time.perf_counter(), step)
    bad = torch.zeros((), dtype=torch.int64, device=place)  # the first step not finite; 0: none

    def report(**row):
        prepare.show_row(step, row, max_iters, left, log_file, tracking)

    while True:
        # look: report, evaluate and save what is due at this step
        stop = torch.tensor(max(asked, default=0))
        reduce(stop, op=dist.ReduceOp.MAX)  # all leave at the same step
        last = step >= max_iters or patience and best["stale"] >= patience
        fresh = mean is not None or not resume  # a resumed step was looked at before it was saved
        due = {key for key in ("log", "eval", "hellaswag", "save")
               if fresh and (n := settings[f"{key}_interval"])
               and (step % n == 0 or last or (key, step) == ("log", 1))}
        if (due or stop or last) and bad.item():  # not at each step: that would stall the GPU
            fail(f"step {bad.item()}: the loss or the gradient norm is not finite; the checkpoints "
                 "are from before: go on with --init_from=resume and a lower --learning_rate")
        if "log" in due and mean is not None:
            row = dict(loss=mean.item(), lr=lr, grad_norm=norm.item())  # waits for the device
            seconds = (time.perf_counter() - clock[0]) / (step - clock[1])
            if left == "?":  # the first of this process
                print(prepare.peak_memory(place))
            speed, left = total_batch_size / seconds, f"{(max_iters - step) * seconds / 60:.1f} min"
            row |= dict(tokens=step * total_batch_size, ms=1000 * seconds, tok_per_sec=speed)
            row |= {"mfu": flops * speed / peak / world_size} if peak else {}
            report(**row)
        model.eval()
        if "eval" in due:
            count, nats = min(len(val_data), max(1, eval_tokens // c.block_size)), torch.zeros(1)
            b = max(1, min(B, 4096 // c.block_size))  # uncompiled logits of more would fill a GPU
            for first in range(rank * b, count, b * world_size):  # windows, the first ones of val
                x, y = val_data.read(range(first, min(first + b, count)), place)
                with context, torch.no_grad():
                    nats += len(x) * model(x, y).item()
            reduce(nats)
            best["stale"] += 1
            if nats.item() / count < best["val_loss"]:
                best = dict(val_loss=nats.item() / count, step=step, stale=0)
            report(val_loss=nats.item() / count)
            last = last or patience and best["stale"] >= patience
        if "hellaswag" in due or last and fresh and hellaswag_interval:
            with context:
                losses = hellaswag.evaluate(model, examples, B * c.block_size, rank, world_size)
            found = hellaswag.score(examples, losses)
            report(hellaswag_acc=found["acc"], hellaswag_acc_norm=found["acc_norm"])
        model.train()
        if rank == 0 and fresh and (last or stop or "save" in due or best["step"] == step):
            save_checkpoint(f"{out_dir}/checkpoint-{step}", model, tokenizer, eot,
                            step=step, best=best, settings=settings, shards=shards,
                            scaler=scaler.state_dict(),
                            optimizers=[one.state_dict()["state"] for one in optimizers])
            older = prepare.checkpoints_in(out_dir)[:-max(1, keep_checkpoints)]
            for old in set(older) - {best["step"]}:
                prepare.remove_folder(f"{out_dir}/checkpoint-{old}")
        if last or stop:
            break
        if due:
            clock = time.perf_counter(), step

        # learn: one optimizer step from the mean of its micro-batches
        mean, lr = None, get_lr(step, learning_rate, min_lr, warmup_iters, max_iters)
        while mean is None:  # once; again, whole, if memory runs out or the compiler fails
            model.zero_grad()
            torch.manual_seed(prepare.mix(seed, step, rank))  # dropout follows from the step too
            micro_steps, total = sequences // (B * world_size), 0.0
            try:
                for micro in range(micro_steps):
                    first = step * sequences + (micro * world_size + rank) * B
                    x, y = train_data.sample(first, B, seed, place)
                    engine.require_backward_grad_sync = micro == micro_steps - 1  # for DDP
                    with context:
                        loss = engine(x, y) / micro_steps
                    total += loss.detach()
                    scaler.scale(loss).backward()
                mean, works = total, True
            except Exception as error:
                said = str(error).partition("\n")[0]
                if not re.search("OutOfMemory|out of memory|allocate memory", repr(error)):
                    if works:
                        raise
                    print(f"torch.compile failed, going on without: {said}")
                    works = True
                    torch.compiler.set_stance("force_eager")
                    continue
                if B == 1 or world_size > 1:
                    fail("out of memory: lower --batch_size, or add --gradient_checkpointing=True")
                B, loss = next(b for b in range(B // 2, 0, -1) if sequences % b == 0), None
                print(f"out of memory: going on with batch_size={B}, as many tokens a step")
        reduce(mean)
        mean /= world_size
        for one in optimizers:
            scaler.unscale_(one)
            for group in one.param_groups:
                group["lr"] = lr
        norm = nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
        if not fp16 or norm.isfinite():  # an overflow skips the step, for all optimizers
            for one in optimizers:
                one.step()
        scaler.update()
        step += 1
        bad = torch.where((bad > 0) | (mean.isfinite() & (norm.isfinite() | fp16)), bad, step)
    command = f"{'torchrun ...' if world_size > 1 else 'python'} {shlex.join(sys.argv)}"
    print(f"{out_dir}: step {step}; to go on: {command} --init_from=resume" if stop else "finished")
    return 128 + int(stop) if stop else 0

if __name__ == "__main__":
    prepare.leave(main())
