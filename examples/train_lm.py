"""Train a small byte-level language model together with whoever joins.

    python examples/train_lm.py --run-id demo

prints the command to paste into a second terminal, on this machine or another one. Every machine has the
text: the source files of Python's standard library (or name a folder of your own with --text). `--alone`
trains the same model in one process with the same batches per epoch, without p2pavg.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import shlex
import signal
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))  # Ctrl-C leaves the run, from here on

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

CONTEXT = 64  # bytes that the model looks back


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Bytes int64[batch, length] -> logits float32[batch, length, 256]."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bytes(x) + self.places[: x.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def read_text(folder: Path | None, suffix: str) -> tuple[Tensor, Tensor]:
    """(training bytes, validation bytes), uint8: one file in twenty, chosen by its name, validates."""
    root = folder or Path(sysconfig.get_path("stdlib"))
    if not root.is_dir():
        sys.exit(f"train_lm: there is no folder {str(root)!r}; see --text")
    skip = set() if folder else {"site-packages", "test", "tests", "idlelib", "lib2to3"}
    names = [path.relative_to(root) for path in root.rglob(f"*{suffix}") if path.is_file()]
    drawn = sorted((zlib.crc32(str(name).encode()), name) for name in names if skip.isdisjoint(name.parts))
    chosen = [name for number, name in drawn if number % 20 == 0] or [name for _, name in drawn[:1]]
    texts = [bytearray(), bytearray()]
    for _, name in drawn:
        texts[name in chosen].extend((root / name).read_bytes())
    if min(map(len, texts)) <= 2 * CONTEXT:
        sys.exit(f"Not enough text in {root}/**/*{suffix}: two long files at least; see --text and --suffix.")
    training, validation = (torch.frombuffer(text, dtype=torch.uint8) for text in texts)
    return training, validation


def windows(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` random places of the text: int64[count, CONTEXT + 1]."""
    starts = torch.randint(0, len(text) - CONTEXT, (count, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT + 1)].long()


def batches(text: Tensor, batch_size: int, seed: int) -> Iterator[Tensor]:
    """For ever. Peers with different seeds (or shards of the text) do not repeat each other's samples."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield windows(text, batch_size, generator)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy per byte, in nats."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def validate(model: nn.Module, text: Tensor, count: int) -> float:
    """Loss over `count` windows of the validation files, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    model.eval()
    losses = [loss_of(model, windows(text, 64, generator)).item() for _ in range(math.ceil(count / 64))]
    model.train()
    return sum(losses) / len(losses)


def build(
    args: argparse.Namespace,
) -> tuple[nn.Module, torch.optim.Optimizer, LRScheduler]:
    """Model, optimizer and scheduler: all peers must build the same, from the same seed."""
    torch.manual_seed(args.init_seed)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    def factor(epoch: int) -> float:  # warm up over a tenth of the run, then half a cosine
        warmup = max(1, args.epochs // 10)
        return min(1.0, (epoch + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * min(1.0, epoch / args.epochs)))

    return model, optimizer, LambdaLR(optimizer, factor)


class Log:
    """One JSON object per line into --log, and a line for people on stdout."""

    def __init__(self, path: str | None) -> None:
        try:
            self.file = open(path, "w", buffering=1) if path else None  # noqa: SIM115
        except OSError as error:
            sys.exit(f"train_lm: cannot write {path!r} ({error.strerror}); choose another file with --log")

    def __call__(self, event: str, words: str, **values: object) -> None:
        print(words, flush=True)
        if self.file:
            print(json.dumps({"event": event, "time": time.time(), **values}), file=self.file)


def digest(model: nn.Module) -> str:
    """Equal on two peers only when all their parameters are equal to the bit."""
    content = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(content).hexdigest()[:16]


def train_together(args: argparse.Namespace, log: Log) -> None:
    """One peer's life: count samples until the swarm has its batch, average, step, again and again."""
    from p2pavg import CollaborativeOptimizer, Outer

    training, validation = read_text(args.text, args.suffix)
    model, optimizer, scheduler = build(args)
    part, parts = args.shard
    training = training[len(training) * (part - 1) // parts : len(training) * part // parts]
    if args.on_enter:
        input("Press Enter to join.\n")
    with CollaborativeOptimizer(
        optimizer,
        run_id=args.run_id,
        target_batch_size=args.target_batch_size,
        batch_size_per_step=args.batch_size,
        initial_peers=args.initial_peers,
        scheduler=scheduler,
        compression=args.compression,
        outer=Outer(schedule="outer") if args.outer else None,
        listen=args.listen,
        announce=args.announce,
    ) as opt:
        address = opt.peer.address
        join = f"To join from another terminal or machine:\n\n    {join_command(args, address)}\n"
        epoch = opt.epoch
        log("start", join, address=address, epoch=epoch, peer=opt.peer.peer_id.hex(), seed=args.seed)
        if not args.initial_peers:
            print("Training begins when somebody joins, or when you press Enter.", flush=True)
            opt.peer.wait_for_peers(1, enter=True)
        for batch in batches(training, args.batch_size, args.seed):
            loss = loss_of(model, batch)
            loss.backward()
            opt.step()
            opt.zero_grad()
            if opt.epoch == epoch:
                continue
            epoch = opt.epoch
            tell(log, epoch, loss.item(), opt)
            if args.validate_every and epoch % args.validate_every == 0:
                with opt.averaged():
                    value = validate(model, validation, args.validation_windows)
                log("validation", f"epoch {epoch}: validation loss {value:.4f}", epoch=epoch, loss=value)
            if epoch >= args.epochs:
                break
    finish(model, validation, args, log)


def finish(model: nn.Module, validation: Tensor, args: argparse.Namespace, log: Log) -> float:
    value = validate(model, validation, 8 * args.validation_windows)
    state = digest(model)
    words = f"done after {args.epochs} epochs: validation loss {value:.4f}, parameters {state}"
    log("end", words, epoch=args.epochs, loss=value, digest=state)
    return value


def join_command(args: argparse.Namespace, address: str) -> str:
    shared = ("target_batch_size", "epochs", "lr", "init_seed", "compression", "text", "suffix")
    changed = [name for name in shared if getattr(args, name) != DEFAULTS[name]]
    words = ["python", sys.argv[0], "--run-id", args.run_id, "--initial-peers", address]
    for name in changed:
        words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    return shlex.join([*words, "--outer"] if args.outer else words)


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def tell(log: Log, epoch: int, loss: float, opt: object) -> None:
    """Log one epoch from its RoundReport (none when this peer only downloaded the state)."""
    report = opt.last_report  # type: ignore[attr-defined]
    if report is None:
        log("joined", f"epoch {epoch}: downloaded the swarm's state", epoch=epoch)
        return
    members, spent = len(report.members), report.seconds_communication
    log(
        "epoch",
        f"epoch {epoch}: training loss {loss:.3f}, {counted(members, 'peer')}, {report.samples} samples "
        f"({report.local_samples} mine), {report.samples_per_second:.0f} samples/s, "
        f"{report.seconds_calculation:.2f} s calculating, {spent:.2f} s communicating",
        epoch=epoch,
        loss=loss,
        peers=members,
        samples=report.samples,
        local_samples=report.local_samples,
        samples_per_second=report.samples_per_second,
        seconds_calculation=report.seconds_calculation,
        seconds_communication=spent,
        seconds_total=report.seconds_total,
        attempts=report.attempts,
    )


def train_alone(args: argparse.Namespace, log: Log) -> float:
    """The reference: one process, the same target batch size and epochs. Returns the validation loss."""
    training, validation = read_text(args.text, args.suffix)
    model, optimizer, scheduler = build(args)
    plan = json.loads(args.plan.read_text()) if args.plan else []
    sources: dict[int, Iterator[Tensor]] = {}
    for epoch in range(1, args.epochs + 1):
        started = time.perf_counter()
        counts = (plan and plan[epoch - 1]) or [[args.seed, args.target_batch_size]]
        steps = [seed for seed, samples in counts for _ in range(math.ceil(samples / args.batch_size))]
        for seed in steps:
            source = sources.setdefault(seed, batches(training, args.batch_size, seed))
            loss = loss_of(model, next(source))
            (loss / len(steps)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rate = len(steps) * args.batch_size / (time.perf_counter() - started)
        words = f"epoch {epoch}: training loss {loss.item():.3f}, {rate:.0f} samples/s"
        log("epoch", words, epoch=epoch, loss=loss.item(), samples_per_second=rate)
        if args.validate_every and epoch % args.validate_every == 0:
            value = validate(model, validation, args.validation_windows)
            log("validation", f"epoch {epoch}: validation loss {value:.4f}", epoch=epoch, loss=value)
    return finish(model, validation, args, log)


def at_least_one(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def shard(text: str) -> tuple[int, int]:
    part, _, whole = text.partition("/")
    if not (part.isdigit() and whole.isdigit() and 1 <= int(part) <= int(whole)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shard such as 2/3")
    return int(part), int(whole)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--run-id", default="train-lm")
    add(
        "--initial-peers",
        nargs="*",
        default=os.environ.get("P2PAVG_INITIAL_PEERS", "").replace(",", " ").split(),
        metavar="HOST:PORT",
        help="any peer; none: start a new swarm",
    )
    add("--listen", default="0.0.0.0:31330", metavar="HOST:PORT", help="the next free port when taken")
    add("--announce", metavar="HOST:PORT", help="where others reach this peer, when not at --listen")
    add("--target-batch-size", type=at_least_one, default=256, help="samples per epoch, over all peers")
    add("--batch-size", type=at_least_one, default=16, help="samples per step of this peer")
    add("--epochs", type=at_least_one, default=120)
    add("--lr", type=float, default=1e-2)
    add("--compression", default="fp16")
    add("--outer", action="store_true", help="local steps between averages (docs/outer.md)")
    add("--seed", type=int, help="of this peer's samples; drawn at random by default")
    add("--shard", type=shard, default=(1, 1), metavar="I/N", help="use only the I-th of N parts of the text")
    add("--init-seed", type=int, default=0, help="of the model; the same on all peers")
    add("--validate-every", type=int, default=5, metavar="EPOCHS", help="0: only at the end")
    add("--validation-windows", type=at_least_one, default=128, help="at the end: eight times as many")
    add("--text", type=Path, metavar="FOLDER", help="your own text, instead of Python's standard library")
    add("--suffix", default=".py", help="of the files to read")
    add(
        "--threads",
        type=at_least_one,
        default=1,
        help="of torch; more where this peer has the machine to itself",
    )
    add("--alone", action="store_true", help="one process, without p2pavg: the reference")
    add("--plan", type=Path, metavar="PATH", help="with --alone: JSON, per epoch [[seed, samples], ...]")
    add("--on-enter", action="store_true", help="prepare everything, and join when Enter is pressed")
    add("--log", metavar="PATH", help="also write one JSON object per line")
    return parser


DEFAULTS = vars(parser().parse_args([]))


def main() -> None:
    args = parser().parse_args()
    args.seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    torch.set_num_threads(args.threads)
    if args.alone:
        train_alone(args, Log(args.log))
        return
    from p2pavg import P2PAvgError

    try:
        train_together(args, Log(args.log))
    except P2PAvgError as error:
        sys.exit(f"train_lm: {error}")


if __name__ == "__main__":
    main()
