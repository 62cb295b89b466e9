"""Train an image classifier together, each peer on its own tar shards (WebDataset), from a folder or by HTTP.

    pip install webdataset pillow
    python examples/images.py --shards 'shards/train-{000..099}.tar' --part 1/2
    python examples/images.py --shards 'http://10.0.0.9/train-{000..099}.tar' --part 2/2 \\
        --initial-peers HOST:PORT

A shard holds pairs such as 0001.jpg (or .png) and 0001.cls, the number of its class. Shards are streamed,
over and over, and never stored; over HTTP that takes the program `curl`. `--validation` names shards that
nobody trains on: the end tells how many of their images are classified right.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
from collections.abc import Iterator

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))  # Ctrl-C leaves the run, from here on

import torch
import torch.nn.functional as F
import webdataset as wds
from torch import Tensor, nn

from p2pavg import CollaborativeOptimizer, P2PAvgError

Batch = tuple[Tensor, Tensor]  # images float32[batch, 3, size, size] in 0..1, classes int64[batch]


def part_of(text: str) -> tuple[int, int]:
    part, _, whole = text.partition("/")
    if not (part.isdigit() and whole.isdigit() and 1 <= int(part) <= int(whole)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part such as 2/3")
    return int(part), int(whole)


def own_shards(patterns: list[str], part: tuple[int, int]) -> list[str]:
    """Every n-th of all shards, from this peer's own on."""
    shards = [shard for pattern in patterns for shard in wds.shardlists.expand_urls(pattern)]
    own = shards[part[0] - 1 :: part[1]]
    if not own:
        sys.exit(f"images: {len(shards)} shards are too few for part {part[0]} of {part[1]}")
    return own


def samples(shards: list[str], size: int, shuffle: bool) -> Iterator[tuple[Tensor, int]]:
    """Decoded images, resized, with their classes; once through all shards."""
    stream = wds.WebDataset(shards, shardshuffle=len(shards) if shuffle else False, empty_check=False)
    if shuffle:
        stream = stream.shuffle(1000)
    for image, label in stream.decode("torchrgb").to_tuple("jpg;jpeg;png", "cls"):
        yield F.interpolate(image[None], (size, size), mode="area")[0], int(label)


def batches(shards: list[str], size: int, count: int) -> Iterator[Batch]:
    """For ever, in another order each time."""
    images: list[Tensor] = []
    labels: list[int] = []
    while True:
        for image, label in samples(shards, size, shuffle=True):
            images.append(image)
            labels.append(label)
            if len(images) == count:
                yield torch.stack(images), torch.tensor(labels)
                images, labels = [], []


def build(classes: int) -> nn.Module:
    """A small convolutional network. BatchNorm statistics are averaged with the gradients."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


@torch.no_grad()
def accuracy(model: nn.Module, shards: list[str], size: int) -> float:
    model.eval()
    right = [
        int(model(image[None]).argmax() == label) for image, label in samples(shards, size, shuffle=False)
    ]
    return sum(right) / len(right)


def train(args: argparse.Namespace) -> None:
    own = own_shards(args.shards, args.part)
    torch.manual_seed(0)  # the same model everywhere ...
    model = build(args.classes)
    seed = int.from_bytes(os.urandom(4), "big")  # ... and an order of the samples of this peer's own
    torch.manual_seed(seed)
    random.seed(seed)
    with CollaborativeOptimizer(
        torch.optim.AdamW(model.parameters(), lr=args.lr),
        run_id=args.run_id,
        target_batch_size=args.target_batch_size,
        batch_size_per_step=args.batch_size,
        initial_peers=args.initial_peers,
        listen=args.listen,
        announce=args.announce,
    ) as opt:
        print(f"{len(own)} shards are mine; join with --initial-peers {opt.peer.address}", flush=True)
        epoch = opt.epoch
        for images, labels in batches(own, args.size, args.batch_size):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            opt.step()
            opt.zero_grad()
            if opt.epoch != epoch and opt.last_report is not None:
                peers = len(opt.last_report.members)
                words = f"{peers} peer{'' if peers == 1 else 's'}"
                print(f"epoch {opt.epoch}: loss {loss.item():.3f}, {words}", flush=True)
            epoch = opt.epoch
            if epoch >= args.epochs:
                break
    if args.validation:
        share = accuracy(model, own_shards(args.validation, (1, 1)), args.size)
        print(f"epoch {epoch}: {share:.1%} of the validation images are right", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shards", nargs="+", required=True, metavar="PATTERN", help="files or http URLs; {000..099} counts")
    add(
        "--part", type=part_of, default=(1, 1), metavar="I/N", help="train on every N-th shard, from the I-th"
    )
    add("--validation", nargs="+", default=[], metavar="PATTERN")
    add("--run-id", default="images")
    add("--initial-peers", nargs="*", metavar="HOST:PORT")
    add("--listen", default="0.0.0.0:31330", metavar="HOST:PORT")
    add("--announce", metavar="HOST:PORT")
    add("--classes", type=int, default=10)
    add("--size", type=int, default=32, help="images are resized to so many pixels, squared")
    add("--epochs", type=int, default=500)
    add("--target-batch-size", type=int, default=256, help="samples per epoch, over all peers")
    add("--batch-size", type=int, default=16)
    add("--lr", type=float, default=3e-3)
    add("--threads", type=int, default=1, help="of torch; more where this peer has the machine to itself")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    try:
        train(args)
    except P2PAvgError as error:
        sys.exit(f"images: {error}")


if __name__ == "__main__":
    main()
