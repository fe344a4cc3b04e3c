# GPT-2 small, 124M, with Muon for the blocks' matrices: meant to reach a loss in fewer tokens.
#
#   python prepare.py config/fineweb_small.py        the same shards serve
#   torchrun --standalone --nproc_per_node=8 train.py config/fineweb_small_muon.py
#
# Hardware and time: as fineweb_small.py.
# Outcome: not measured at this size. What we measured at a smaller one stands in the README.
out_dir = "out/fineweb_small_muon"
optimizer = "muon"
learning_rate = 2e-3  # Muon is scaled to AdamW's step size and bears a higher peak
min_lr = 2e-4
