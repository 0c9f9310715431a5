"""The flags of `meshspark train-drafter`, and everything about them that can be checked before a rank starts."""

import argparse
import hashlib
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..models.checkpoint.verify import read_config as read_target_config
from ..models.drafts.build import build_draft
from ..models.drafts.config import DraftConfig, read_config
from ..models.drafts.contract import resume_contract
from ..models.training.anchors import RULES
from ..models.training.config import ObjectiveConfig
from ..models.training.draft_files import check_draft_files
from ..models.training.feature_files import FeatureFiles
from ..models.training.feature_spec import FeatureSpec, draft_features
from ..models.training.order import DataOrder
from ..models.training.target_tables import find_tables
from ..models.training.token_files import TokenFiles
from ..parallel.topology import Topology
from .flags import FlagError, FlagParser, RunFlags, add_common, check_range, resolve_topology
from .generate import SAMPLE, require_checkpoint
from .worker import config_facts

PLACEMENTS = ("ddp", "sharded", "fsdp")
SCHEDULES = ("constant", "linear", "cosine")
BACKENDS = ("auto", "native", "eager", "sdpa", "flex", "flash")
NO_MEANING = ("architectures", "dtype", "initializer_range")
"""Keys of a draft's config that change nothing about a run that has started."""
MOST = {"steps": 1 << 40, "batch": 1 << 20, "accumulate": 1 << 20, "anchors": 1 << 20, "save_every": 1 << 40}
MOST |= {"log_every": 1 << 40, "keep": 1 << 20, "depth": 1 << 10}


@dataclass(frozen=True)
class Settings:
    """How a run trains; with its topology all that it has to agree on with the run that it resumes.

    steps: of the whole run, which the schedule of the learning rate follows.
    """

    steps: int
    batch: int
    accumulate: int
    learning_rate: float
    warmup: float
    schedule: str
    weight_decay: float
    clip: float
    placement: str
    numerics: str
    seed: int

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        warm = math.ceil(self.warmup * self.steps)
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        left = 1 - (step - warm) / max(1, self.steps - warm)
        shape = {"constant": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}
        return self.learning_rate * shape[self.schedule]


@dataclass(frozen=True)
class Task:
    """A run, checked. Of data and features exactly one is there; target_ranks: 0 where every rank does all."""

    config: DraftConfig
    checkpoint: Path
    data: TokenFiles | None
    features: FeatureFiles | None
    spec: FeatureSpec
    out: Path
    settings: Settings
    objective: ObjectiveConfig
    target: Topology
    drafters: Topology
    target_ranks: int
    depth: int
    attention: str
    recompute: bool
    start: Path | None
    resume: bool
    save_every: int
    log_every: int
    keep: int

    @property
    def samples(self) -> int:
        return len(self.data) if self.data is not None else len(self.features or ())

    def order(self) -> DataOrder:
        """Who takes which sample when."""
        s = self.settings
        return DataOrder(self.samples, self.drafters.world, s.batch, s.accumulate, s.seed)

    def contract(self) -> dict[str, Any]:
        """What a resumed run must have as this one, as plain data."""
        learned = asdict(self.objective)
        # It changes memory, and nothing else.
        del learned["chunk_blocks"]
        draft = resume_contract(self.config, self.attention, learned)
        whole = {key: value for key, value in self.config.to_dict().items() if key not in NO_MEANING}
        return {
            **draft,
            "config": whole,
            "objective": learned,
            "run": asdict(self.settings),
            "data": self._data(),
            **config_facts(self.checkpoint),
        }

    def _data(self) -> dict[str, Any]:
        digest = self.data.digest if self.data is not None else self.features.data if self.features is not None else ""
        kind = "on line" if self.data is not None else "files"
        return {"samples": self.samples, "digest": digest, "features": kind}

    def facts(self) -> dict[str, str | int | float]:
        """What must be equal on all ranks."""
        places = (self.target, self.drafters, self.target_ranks, self.depth)
        kept = (self.recompute, self.resume, self.save_every, self.start is not None, self.attention)
        return {
            **config_facts(self.checkpoint),
            "draft": hashlib.sha256(repr(self.config).encode()).hexdigest()[:16],
            "data": repr(self._data()),
            "settings": repr(self.settings),
            "objective": repr(self.objective),
            "places": repr(places),
            "run": repr(kept),
        }


def parser() -> FlagParser:
    """The verb's flags."""
    flags = FlagParser(prog="meshspark train-drafter", description="Train a drafter.", allow_abbrev=False)
    flags.add_argument("--config", type=Path, required=True, metavar="FILE", help="the draft's config.json")
    flags.add_argument("--checkpoint", type=Path, default=SAMPLE, metavar="DIR", help="target (default: the sample)")
    flags.add_argument("--data", type=Path, metavar="DIR", help="folder of *.jsonl: the target runs with the trainer")
    flags.add_argument("--features", type=Path, metavar="DIR", help="folder that `meshspark features` wrote, instead")
    flags.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the run, seen by all ranks")
    flags.add_argument("--resume", action="store_true", help="go on from the latest state in --out, if there is one")
    flags.add_argument("--init", type=Path, metavar="DIR", help="start from the weights of this draft")
    _add_places(flags.add_argument_group("ranks"))
    _add_learning(flags.add_argument_group("learning"))
    kept = flags.add_argument_group("what is kept")
    kept.add_argument("--save-every", type=int, default=500, metavar="N", help="steps between states (500)")
    kept.add_argument("--keep", type=int, default=2, metavar="N", help="latest states that stay (2)")
    kept.add_argument("--log-every", type=int, default=10, metavar="N", help="steps between lines on the screen (10)")
    add_common(flags)
    return flags


def _add_places(ranks: Any) -> None:
    ranks.add_argument(
        "--target-ranks",
        type=int,
        default=0,
        metavar="N",
        help="the last N ranks run the target, on --tp and --ep of them, and ship its states to the others, which "
        "train (default: 0, every rank does both)",
    )
    ranks.add_argument("--depth", type=int, default=2, metavar="N", help="shipped samples under way to a rank (2)")
    ranks.add_argument("--placement", choices=PLACEMENTS, default="ddp", help="what each rank holds (default: ddp)")
    ranks.add_argument("--fsdp", dest="placement", action="store_const", const="fsdp", help="--placement fsdp")
    ranks.add_argument("--draft-ep", type=int, default=1, metavar="N", help="ranks that share the draft's experts (1)")
    ranks.add_argument("--attention", choices=BACKENDS, default="auto", help="backend of the draft (default: auto)")
    ranks.add_argument("--recompute", action="store_true", help="keep no activations of the draft's layers")


def _add_learning(learning: Any) -> None:
    many = learning.add_mutually_exclusive_group()
    many.add_argument("--steps", type=int, metavar="N", help="steps of the whole run")
    many.add_argument("--epochs", type=float, default=1.0, metavar="X", help="instead: passes over the data (1)")
    learning.add_argument("--batch", type=int, default=1, metavar="N", help="samples of a rank's micro-batch (1)")
    learning.add_argument("--accumulate", type=int, default=1, metavar="N", help="micro-batches of a rank's step (1)")
    learning.add_argument("--anchors", type=int, default=512, metavar="N", help="blocks of a sample, at most (512)")
    learning.add_argument("--anchor-rule", choices=RULES, default="both", help="what an anchor needs (default: both)")
    learning.add_argument("--decay-gamma", type=float, default=4.0, metavar="X", help="of offsets, 0: none (4)")
    learning.add_argument("--ce", type=float, default=0.1, metavar="X", help="share of the cross entropy (0.1)")
    learning.add_argument("--l1", type=float, default=0.9, metavar="X", help="share of the distance (0.9)")
    learning.add_argument(
        "--confidence", type=float, metavar="X", help="share of the confidence (1 where the draft has its head, else 0)"
    )
    learning.add_argument("--chunk-blocks", type=int, default=128, metavar="N", help="through the head at once (128)")
    learning.add_argument("--lr", type=float, default=6e-4, metavar="X", help="learning rate (6e-4)")
    learning.add_argument("--warmup", type=float, default=0.04, metavar="X", help="share of steps that it rises (0.04)")
    learning.add_argument("--schedule", choices=SCHEDULES, default="cosine", help="behind that (default: cosine)")
    learning.add_argument("--weight-decay", type=float, default=0.0, metavar="X", help="of AdamW (0)")
    learning.add_argument("--clip", type=float, default=1.0, metavar="X", help="norm of the gradient, at most (1)")


def base_arguments(args: argparse.Namespace) -> argparse.Namespace:
    """The flags for the ranks of the whole run: --tp and --ep are of the target, which may be on some of them only."""
    if args.target_ranks or args.features is not None:
        return argparse.Namespace(**{**vars(args), "tp": None, "ep": None})
    return args


def prepare(args: argparse.Namespace, flags: RunFlags) -> Task:
    """The run that the flags ask for. ValueError, FlagError and CheckpointError, each naming what is wrong."""
    _check_numbers(args)
    config = read_config(args.config)
    _check_config(args, config)
    objective = _objective(args, config)
    spec = draft_features(config, objective.needs_teacher)
    target, drafters = _topologies(args, flags, config)
    data, features = _data(args, config, spec, target)
    find_tables(args.checkpoint, config.vocab_size, config.hidden_size)
    if args.init is not None:
        check_draft_files(args.init, config)
    settings = Settings(
        1,
        args.batch,
        args.accumulate,
        args.lr,
        args.warmup,
        args.schedule,
        args.weight_decay,
        args.clip,
        args.placement,
        flags.numerics,
        flags.seed,
    )
    task = Task(
        config,
        args.checkpoint,
        data,
        features,
        spec,
        args.out,
        settings,
        objective,
        target,
        drafters,
        args.target_ranks,
        args.depth,
        args.attention,
        args.recompute,
        args.init,
        args.resume,
        args.save_every,
        args.log_every,
        args.keep,
    )
    steps = args.steps or math.ceil(args.epochs * task.samples / task.order().step_samples)
    return replace(task, settings=replace(settings, steps=steps))


def _check_numbers(args: argparse.Namespace) -> None:
    for name, most in MOST.items():
        value = getattr(args, name)
        if value is not None:
            check_range(f"--{name.replace('_', '-')}", value, 1, most)
    check_range("--epochs", args.epochs, 1e-9, 1e9)
    check_range("--lr", args.lr, 0, 1e9)
    check_range("--warmup", args.warmup, 0, 1)
    check_range("--weight-decay", args.weight_decay, 0, 1e9)
    check_range("--clip", args.clip, 1e-30, 1e30)
    check_range("--decay-gamma", args.decay_gamma, 0, 1e9)
    check_range("--chunk-blocks", args.chunk_blocks, 0, 1 << 30)


def _check_config(args: argparse.Namespace, config: DraftConfig) -> None:
    if args.numerics == "w8a8":
        raise FlagError("--numerics is w8a8, whose products in INT8 do not train; allowed: float64, float32, bfloat16")
    if args.recompute and config.has_moe:
        raise FlagError("--recompute: gradient checkpointing is not supported with MoE drafts: counts would double")
    if args.draft_ep > 1 and not config.has_moe:
        raise FlagError(f"--draft-ep is {args.draft_ep}, but the draft has no experts; allowed: 1")
    # What an attention backend cannot serve is said when modules are made, on no memory here.
    with torch.device("meta"):
        build_draft(config, args.attention)


def _objective(args: argparse.Namespace, config: DraftConfig) -> ObjectiveConfig:
    confidence = args.confidence
    if confidence is None:
        confidence = 1.0 if config.dflash.enable_confidence_head else 0.0
    if confidence > 0 and not config.dflash.enable_confidence_head:
        raise FlagError(f"--confidence is {confidence}, but the draft has no confidence head; allowed: 0")
    return ObjectiveConfig(
        block_size=config.block_size,
        # An MTP layer has none, and blocks of one row, where none stands.
        mask_token_id=config.dflash.mask_token_id or 0,
        num_anchors=args.anchors,
        anchor_rule=args.anchor_rule,
        loss_decay_gamma=args.decay_gamma or None,
        ce_loss_alpha=args.ce,
        l1_loss_alpha=args.l1,
        confidence_head_alpha=confidence,
        chunk_blocks=args.chunk_blocks,
    )


def _topologies(args: argparse.Namespace, flags: RunFlags, config: DraftConfig) -> tuple[Topology, Topology]:
    """(the target's, the drafters'): of the same ranks, or of the last ones and the others."""
    world = flags.topology.world
    if args.features is not None and (args.tp is not None or args.ep is not None or args.target_ranks):
        raise FlagError("--tp, --ep and --target-ranks are the target's, which does not run with --features")
    if not 0 <= args.target_ranks < world:
        raise FlagError(f"--target-ranks is {args.target_ranks}, allowed: 0 to {world - 1} of {world} ranks")
    target = flags.topology
    if args.target_ranks:
        target = resolve_topology(None, args.tp, args.ep, args.target_ranks)
    drafters = Topology(world - args.target_ranks, 1, args.draft_ep)
    experts = config.n_routed_experts or config.num_experts
    if experts is not None and experts % args.draft_ep:
        raise FlagError(f"--draft-ep is {args.draft_ep}, allowed: a divisor of the draft's {experts} experts")
    return target, drafters


def _data(
    args: argparse.Namespace, config: DraftConfig, spec: FeatureSpec, target: Topology
) -> tuple[TokenFiles | None, FeatureFiles | None]:
    if (args.data is None) == (args.features is None):
        raise FlagError("give --data DIR for a target that runs with the trainer, or --features DIR for its files")
    require_checkpoint(args.checkpoint)
    if args.features is not None:
        files = FeatureFiles(args.features)
        files.spec.require(spec, str(args.features))
        own = config_facts(args.checkpoint)["config.json"]
        if files.target != own:
            raise ValueError(
                f"{args.features}: its target's config.json has digest {files.target}, that of --checkpoint has {own}"
            )
        return None, files
    shape = read_target_config(args.checkpoint)
    target.check_model(shape.o_groups, shape.vocab_size, shape.n_routed_experts)
    spec.check_target(shape.num_hidden_layers, shape.hidden_size, shape.vocab_size, shape.hc_mult)
    if config.num_target_layers != shape.num_hidden_layers:
        raise ValueError(
            f"{args.config}: num_target_layers is {config.num_target_layers}, the target has {shape.num_hidden_layers}"
        )
    return TokenFiles(args.data, config.vocab_size, shape.max_position_embeddings), None
