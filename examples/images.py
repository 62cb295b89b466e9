"""Train an image classifier together on tar shards: the swarm shares them out, each image once in each pass.

    pip install pillow
    python examples/images.py --serve shards
    python examples/images.py --index http://HOST:8000/index.json --initial-peers HOST:PORT

The first peer serves the folder over HTTP, and trains on it. A shard holds pairs such as 0001.jpg (or .png)
and 0001.cls, the number of its class. The others fetch the shards that they train on, each once per machine,
into a cache of at most `--cache-gb`. Nobody trains on the last `--validation` shards: the end tells how many
of their images are classified right.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import http.server
import io
import json
import shlex
import signal
import sys
import tarfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))  # Ctrl-C leaves the run, from here on

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from p2pavg import CollaborativeOptimizer, P2PAvgError, SwarmShards
from p2pavg.data.cache import ShardCache

Batch = tuple[Tensor, Tensor]  # images float32[batch, 3, size, size] in 0..1, classes int64[batch]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Requests are not news."""


def serve(folder: Path, port: int) -> str:
    """Write the list of the shards into their folder, and serve both. Returns the address of the list."""
    if not folder.is_dir():
        sys.exit(f"images: there is no folder {str(folder)!r}")
    index = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as archive:
            images = sum(name.endswith(".cls") for name in archive.getnames())
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        index.append({"name": path.name, "images": images, "bytes": path.stat().st_size, "sha256": digest})
    if not index:
        sys.exit(f"images: {str(folder)!r} holds no .tar file")
    (folder / "index.json").write_text(json.dumps(index, indent=1) + "\n")
    handler = functools.partial(Quiet, directory=str(folder))
    try:
        server = http.server.ThreadingHTTPServer(("", port), handler)
    except OSError as error:
        sys.exit(f"images: cannot serve on port {port} ({error.strerror}); choose another with --http-port")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}/index.json"


class Images:
    """The images of all shards, wherever they are."""

    def __init__(self, index: str, cache: ShardCache, size: int) -> None:
        try:
            with urllib.request.urlopen(index, timeout=30) as answer:
                self.shards = {shard["name"]: shard for shard in json.load(answer)}
        except (OSError, ValueError, KeyError) as error:
            sys.exit(f"images: the list of shards {index} cannot be read ({error}); does its peer run?")
        self._base, self._cache, self._size = index.rpartition("/")[0], cache, size

    def of(self, name: str, first: int = 0, end: int | None = None) -> Iterator[tuple[Tensor, int]]:
        """The images first .. end - 1 of a shard, in 0..1 and resized, with their classes."""
        shard = self.shards[name]
        with (
            self._cache.open(f"{self._base}/{name}", shard["bytes"], shard["sha256"]) as file,
            tarfile.open(fileobj=file) as archive,
        ):
            pairs: dict[str, dict[str, tarfile.TarInfo]] = {}
            for member in archive:
                stem, _, kind = member.name.rpartition(".")
                pairs.setdefault(stem, {})["class" if kind == "cls" else "image"] = member
                if end is not None and len(pairs) > end:
                    break  # the two of a pair follow each other
            for pair in list(pairs.values())[first:end]:
                yield self._decoded(archive, pair["image"]), int(_bytes(archive, pair["class"]))

    def _decoded(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> Tensor:
        image = Image.open(io.BytesIO(_bytes(archive, member))).convert("RGB")
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        return F.interpolate(pixels[None], (self._size, self._size), mode="area")[0]


def _bytes(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None, f"{member.name} is no file"
    return file.read()


def batches(images: Images, sampler: SwarmShards, count: int) -> Iterator[Batch]:
    """For ever: what the swarm leaves to this peer, in the order in which it does."""
    some: list[tuple[Tensor, int]] = []
    while True:
        for name, first, end in sampler:  # ends with the pass
            for each in images.of(name, first, end):
                some.append(each)
                if len(some) == count:
                    yield (
                        torch.stack([image for image, _ in some]),
                        torch.tensor([label for _, label in some]),
                    )
                    some = []
        if some:  # iterating anew gives out again what is not counted
            yield torch.stack([image for image, _ in some]), torch.tensor([label for _, label in some])
            some = []


def build(classes: int) -> nn.Module:
    """A small convolutional network. BatchNorm statistics are averaged with the gradients."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


@torch.no_grad()
def accuracy(model: nn.Module, images: Images, names: list[str]) -> float:
    model.eval()
    right = [int(model(image[None]).argmax() == label) for name in names for image, label in images.of(name)]
    return sum(right) / len(right)


def train(args: argparse.Namespace) -> None:
    index = args.index or serve(args.serve, args.http_port)
    images = Images(index, ShardCache(args.cache, int(args.cache_gb * 1e9)), args.size)
    names = sorted(images.shards)
    names, validation = names[: len(names) - args.validation], names[len(names) - args.validation :]
    sampler = SwarmShards(names, [images.shards[name]["images"] for name in names], piece=args.batch_size)
    torch.manual_seed(0)  # the same model everywhere
    model = build(args.classes)
    with CollaborativeOptimizer(
        torch.optim.AdamW(model.parameters(), lr=args.lr),
        run_id=args.run_id,
        target_batch_size=args.target_batch_size,
        batch_size_per_step=args.batch_size,
        initial_peers=args.initial_peers,
        listen=args.listen,
        announce=args.announce,
        sampler=sampler,
    ) as opt:
        where = opt.peer.address
        if args.serve:  # others reach the list where they reach this peer
            index = index.replace("127.0.0.1", where.rpartition(":")[0])
        print(f"{len(names)} shards; join with {join_command(args, index, where)}", flush=True)
        epoch = opt.epoch
        for some, labels in batches(images, sampler, args.batch_size):
            loss = F.cross_entropy(model(some), labels)
            opt.scale_loss(loss, len(labels)).backward()  # the last batch of a pass may be smaller
            opt.step(batch_size=len(labels))
            opt.zero_grad()
            if opt.epoch != epoch and (report := opt.last_report) is not None:
                peers = len(report.members)
                words = f"{peers} peer{'' if peers == 1 else 's'}, pass {report.passes:.2f}"
                print(f"epoch {opt.epoch}: loss {loss.item():.3f}, {words}", flush=True)
            epoch = opt.epoch
            if epoch >= args.epochs:
                break
    if validation:
        share = accuracy(model, images, validation)
        print(f"epoch {epoch}: {share:.1%} of the validation images are right", flush=True)


def join_command(args: argparse.Namespace, index: str, address: str) -> str:
    words = ["python", sys.argv[0]]
    for name in ("run_id", "classes", "size", "epochs", "target_batch_size", "lr", "validation"):
        if getattr(args, name) != parser().get_default(name):
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    return shlex.join([*words, "--index", index, "--initial-peers", address])


def at_least_one(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    shards = parser.add_mutually_exclusive_group(required=True)
    shards.add_argument("--serve", type=Path, metavar="FOLDER", help="of shards, for everybody, over HTTP")
    shards.add_argument("--index", metavar="URL", help="the list of the shards that another peer serves")
    add("--http-port", type=int, default=8000, help="with --serve; 0: any")
    add("--cache", default="~/.cache/p2pavg-shards", type=lambda text: Path(text).expanduser())
    add("--cache-gb", type=float, default=10.0, help="the shards that were used longest ago make room")
    add("--validation", type=int, default=0, metavar="N", help="nobody trains on the last N shards")
    add("--run-id", default="images")
    add("--initial-peers", nargs="*", metavar="HOST:PORT")
    add("--listen", default="0.0.0.0:31330", metavar="HOST:PORT")
    add("--announce", metavar="HOST:PORT")
    add("--classes", type=at_least_one, default=10)
    add("--size", type=at_least_one, default=32, help="images are resized to so many pixels, squared")
    add("--epochs", type=at_least_one, default=500)
    add("--target-batch-size", type=at_least_one, default=256, help="samples per epoch, over all peers")
    add("--batch-size", type=at_least_one, default=16)
    add("--lr", type=float, default=3e-3)
    add(
        "--threads",
        type=at_least_one,
        default=1,
        help="of torch; more where this peer has the machine to itself",
    )
    return parser


def main() -> None:
    args = parser().parse_args()
    torch.set_num_threads(args.threads)
    try:
        train(args)
    except P2PAvgError as error:
        sys.exit(f"images: {error}")


if __name__ == "__main__":
    main()
