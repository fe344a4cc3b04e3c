# GPT-2 medium, 354,823,168 parameters, on FineWeb-Edu.
#
#   python prepare.py config/fineweb_small.py
#   torchrun --standalone --nproc_per_node=8 train.py config/fineweb_medium.py
#
# Hardware: GPUs of 40 GB or more; on less, batch_size=4 or gradient_checkpointing=True.
# Time and outcome: not measured by us.
out_dir = "out/fineweb_medium"
n_layer = 24
n_head = 16
n_embd = 1024
batch_size = 8
learning_rate = 3e-4  # GPT-3's table 2.1 for this size
min_lr = 3e-5
