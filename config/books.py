# A mid-size run on local text: 18M parameters, 25M tokens, a CPU overnight or a small GPU.
#
#   python prepare.py config/books.py --source='books/*.txt'
#   python train.py config/books.py
#   python sample.py config/books.py --start='It was'
#
# Hardware: two CPU cores, or any GPU. Measured: with --max_iters=2800 (5.7M tokens) 1 hour 40
# minutes on two cores of a Xeon without bfloat16 and a val loss of 4.948 nats per token, on 87 MB
# of old books and web pages. Time of the whole: some 7 hours there, by arithmetic. Outcome: your
# books decide.
dataset = "books"
out_dir = "out/books"
source = "books/*.txt"
val_tokens = 500_000
init_from = "auto"

n_layer = 6
n_head = 4
n_embd = 256
block_size = 256
batch_size = 8
total_batch_size = 8 * 256
max_iters = 12000
optimizer = "muon"
learning_rate = 2e-3
min_lr = 2e-4
warmup_iters = 100
eval_interval = 400
eval_tokens = 131_072
save_interval = 400
