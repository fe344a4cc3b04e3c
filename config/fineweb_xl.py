# GPT-2 XL, 1,557,611,200 parameters, on FineWeb-Edu.
#
#   python prepare.py config/fineweb_small.py
#   torchrun --standalone --nproc_per_node=8 train.py config/fineweb_xl.py
#
# Hardware: GPUs of 80 GB: weights, gradients and AdamW's two moments alone take 25 GB on each.
# Time and outcome: not measured by us.
out_dir = "out/fineweb_xl"
n_layer = 48
n_head = 25
n_embd = 1600
batch_size = 4
learning_rate = 2e-4  # GPT-3's table 2.1 for this size
min_lr = 2e-5
