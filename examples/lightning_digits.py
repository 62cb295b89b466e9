"""Handwritten digits with Lightning: run it in two terminals, and both train one model.

python examples/lightning_digits.py                              # prints its address
python examples/lightning_digits.py --initial-peers HOST:PORT    # in the other terminal
"""

import argparse
import os
import signal
import sys

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from p2pavg.lightning import CollaborativeStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--initial-peers", nargs="*")
parser.add_argument("--epochs", type=int, default=300, help="optimizer steps of the swarm")
args = parser.parse_args()
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))  # Ctrl-C leaves the run

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)


class Digits(pl.LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # all peers start from the same weights ...
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        torch.manual_seed(int.from_bytes(os.urandom(4), "big"))  # ... and each draws its own samples

    def on_train_start(self) -> None:
        peer = self.trainer.strategy.optimizer.peer
        join = f"python {sys.argv[0]} --epochs {args.epochs} --initial-peers {peer.address}"
        print(f"join with: {join}", flush=True)
        if not args.initial_peers:
            print("training begins when somebody joins, or when you press Enter", flush=True)
            peer.wait_for_peers(1, enter=True)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        inner = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, args.epochs)
        return {"optimizer": inner, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


torch.set_num_threads(1)  # several peers may share this machine's cores
model = Digits()
strategy = CollaborativeStrategy(
    "lightning-digits",
    target_batch_size=512,  # samples per epoch, over all peers
    initial_peers=args.initial_peers,
    on_round=lambda report: print(f"epoch {report.epoch}, peers: {len(report.members)}", flush=True),
)
trainer = pl.Trainer(
    strategy=strategy,
    accelerator="cpu",
    devices=1,
    max_steps=args.epochs,
    gradient_clip_val=1.0,
    enable_progress_bar=False,
    enable_checkpointing=False,
    enable_model_summary=False,
    logger=False,
)
data = TensorDataset(images[:1500], labels[:1500])
trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True, drop_last=True))
right = (model.net(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
print(f"epoch {trainer.global_step}: {right:.1%} of the test digits are right")
