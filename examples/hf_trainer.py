"""A small language model on the standard library's source, with transformers' Trainer, by all who join.

python examples/hf_trainer.py                              # prints its address
python examples/hf_trainer.py --initial-peers HOST:PORT    # in another terminal, or on another machine
"""

import argparse
import signal
import sys
import sysconfig
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, get_scheduler

from p2pavg import CollaborativeOptimizer
from p2pavg.hf import trainer_kwargs

parser = argparse.ArgumentParser()
parser.add_argument("--initial-peers", nargs="*")
parser.add_argument("--epochs", type=int, default=200, help="optimizer steps of the swarm")
parser.add_argument("--output", default="out/hf_trainer")
args = parser.parse_args()
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))  # Ctrl-C leaves the run

WINDOW = 64  # bytes
folder = Path(sysconfig.get_paths()["stdlib"])
text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[: 1 << 21]
windows = [list(text[at : at + WINDOW]) for at in range(0, len(text) - WINDOW, WINDOW)]
data = [{"input_ids": window, "labels": window} for window in windows]

torch.set_num_threads(1)  # several peers may share this machine's cores
torch.manual_seed(0)  # all peers start from the same weights
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=WINDOW, n_embd=64, n_layer=2, n_head=2))
inner = torch.optim.AdamW(model.parameters(), lr=2e-3)

with CollaborativeOptimizer(
    inner,
    run_id="hf-trainer",
    target_batch_size=64,  # samples per epoch, over all peers
    initial_peers=args.initial_peers,
    scheduler=get_scheduler("cosine", inner, num_warmup_steps=10, num_training_steps=args.epochs),
    max_grad_norm=1.0,  # as TrainingArguments(max_grad_norm=1.0), of the averaged gradient
) as opt:
    join = f"python {sys.argv[0]} --epochs {args.epochs} --initial-peers {opt.peer.address}"
    print(f"join with: {join}", flush=True)
    if not args.initial_peers:
        print("training begins when somebody joins, or when you press Enter", flush=True)
        opt.peer.wait_for_peers(1, enter=True)
    settings = TrainingArguments(
        args.output,
        max_steps=args.epochs,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        logging_steps=10,
        save_steps=100,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, train_dataset=data, **trainer_kwargs(opt, settings))
    trainer.train()
    print(f"epoch {opt.epoch}: loss {trainer.state.log_history[-2]['loss']:.2f}")
