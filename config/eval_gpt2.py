# The published GPT-2 124M, measured as our own runs are: val loss and HellaSwag.
#
#   python train.py config/eval_gpt2.py                            val loss
#   python hellaswag.py config/eval_gpt2.py --protocol=nanogpt     public: 0.2859 / 0.2955
#   python hellaswag.py config/eval_gpt2.py --protocol=lm_eval     public: 0.2892 / 0.3114
#
# Hardware: any; on a CPU add --eval_tokens=65536. Needs fineweb_small's shards (or --dataset), and
# the hub for the weights. Outcome: GPT-2's FineWeb-Edu val loss is publicly given as about 3.29;
# not rerun by us, we could not reach the hub. It measures once; to measure again, delete
# out/eval_gpt2 or give another --out_dir.
out_dir = "out/eval_gpt2"
init_from = "gpt2"
checkpoint = "gpt2"
max_iters = 0
compile = False
