# GPT-2 small on a single 24 GB GPU (L4, RTX 3090 or 4090) and 100M tokens of FineWeb.
#
#   python prepare.py config/fineweb_l4.py
#   python train.py config/fineweb_l4.py
#
# Hardware: one GPU of 24 GB. Time: not measured by us.
# Outcome: not measured by us. A run of 1,600 steps of 256 x 1024 tokens on an L4 is reported at a
# val loss of 4.2818; so many steps see the 95M train tokens 4.4 times.
dataset = "fineweb_100M"
out_dir = "out/fineweb_l4"
source = "HuggingFaceFW/fineweb"
max_tokens = 100_000_000
val_tokens = 5_000_000

total_batch_size = 16 * 16 * 1024  # 16 micro-batches of 16 sequences
max_iters = 1600
warmup_iters = 100
eval_interval = 50
eval_tokens = 1_048_576
save_interval = 200
patience = 5  # the tokens are seen 4.4 times: stop when val no longer falls
