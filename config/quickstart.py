# A small GPT-2 that learns to write like Python's documentation, from the copy inside your Python.
#
#   python prepare.py config/quickstart.py && python train.py config/quickstart.py
#   python sample.py config/quickstart.py
#
# Hardware: two CPU cores. Time: 7 s for prepare.py, 2.5 minutes for train.py (two cores of an AMD
# EPYC with bfloat16, torch 2.13.0, 2026-11-30). Outcome, measured: val loss 1.500 nats per byte
# (in float32 on a Xeon 3.6 minutes and 1.502) with Python 3.11.7, whose documentation is the
# corpus; text like docstrings, some of its words invented.
dataset = "quickstart"
out_dir = "out/quickstart"
source = "pydocs"
tokenizer = "bytes"
init_from = "auto"  # typed a second time, a finished run is finished

n_layer = 4
n_head = 6
n_embd = 192
block_size = 128  # a short one sees each position more often: in minutes that counts
total_batch_size = 16 * 128  # few tokens a step, so that there are many steps
max_iters = 600
optimizer = "muon"
learning_rate = 4e-3
min_lr = 1e-4
warmup_iters = 30
compile = False  # takes longer than it saves here
eval_interval = 100
eval_tokens = 65536
save_interval = 200
log_interval = 20
num_samples = 1
start = "Return "
temperature = 0.7
