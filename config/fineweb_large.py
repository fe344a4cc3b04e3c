# GPT-2 large, 774,030,080 parameters, on FineWeb-Edu.
#
#   python prepare.py config/fineweb_small.py
#   torchrun --standalone --nproc_per_node=8 train.py config/fineweb_large.py
#
# Hardware: GPUs of 80 GB; on less, gradient_checkpointing=True or a lower batch_size.
# Time and outcome: not measured by us.
out_dir = "out/fineweb_large"
n_layer = 36
n_head = 20
n_embd = 1280
batch_size = 8
learning_rate = 2.5e-4  # GPT-3's table 2.1 for this size
min_lr = 2.5e-5
