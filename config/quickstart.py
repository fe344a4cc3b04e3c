# A small GPT-2 that learns to write like Python's documentation, from the copy inside your Python.
#
#   python prepare.py config/quickstart.py && python train.py config/quickstart.py
#   python sample.py config/quickstart.py
#
# Hardware: two CPU cores. Time: TODO. Outcome: TODO.
dataset = "quickstart"
source = "pydocs"
tokenizer = "bytes"
out_dir = "out/quickstart"
init_from = "auto"
n_layer = 4
n_head = 4
n_embd = 256
block_size = 256
batch_size = 16
total_batch_size = 16 * 256
max_iters = 600
learning_rate = 2e-3
min_lr = 2e-4
warmup_iters = 30
optimizer = "muon"
eval_interval = 100
eval_tokens = 65536
save_interval = 200
