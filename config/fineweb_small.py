# GPT-2 small, 124M, on 10B tokens of FineWeb-Edu.
#
#   python prepare.py config/fineweb_small.py
#   torchrun --standalone --nproc_per_node=8 train.py config/fineweb_small.py
#
# Hardware: one GPU of 24 GB or more; python instead of torchrun on one.
# Time: not measured by us; by arithmetic, at half of an H100's peak, 5 hours on one GPU.
# Outcome: not rerun by us. Public marks: GPT-2 124M itself is at a FineWeb-Edu val loss of about
# 3.29 and HellaSwag 0.2955 (build-nanogpt's protocol); a run of 5,000 steps on one GPU is reported
# at 3.3529 and 0.2773, for about 10 dollars.
# The scripts' defaults are this run; what follows spells it out.
dataset = "fineweb_small"
out_dir = "out/fineweb_small"
source = "HuggingFaceFW/fineweb-edu"
source_config = "sample-10BT"

total_batch_size = 2**19  # 0.5M tokens
max_iters = 19073  # x 2**19 = 10B tokens: one epoch
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 700
