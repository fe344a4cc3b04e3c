# The published GPT-2 weights, trained on with your own text.
#
#   python prepare.py config/finetune_gpt2.py --source='my/texts/*.txt'
#   python train.py config/finetune_gpt2.py
#   python sample.py config/finetune_gpt2.py --checkpoint=best
#
# Hardware: one GPU (its memory not measured by us), or patience. Time and outcome: your text
# decides.
dataset = "finetune"
out_dir = "out/finetune_gpt2"
source = "my/texts/*.txt"
init_from = "gpt2"  # also gpt2-medium, gpt2-large, gpt2-xl, or a checkpoint directory

batch_size = 4
total_batch_size = 8 * 4 * 1024
max_iters = 300
learning_rate = 3e-5
min_lr = 3e-6
warmup_iters = 20
dropout = 0.1  # little text is seen more than once
eval_interval = 20
eval_tokens = 131_072
save_interval = 100
patience = 3
