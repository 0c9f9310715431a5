"""The finished sample: its checkpoint, its figures and their README, its loss curve."""

import platform
from collections import Counter
from dataclasses import asdict, dataclass, fields
from math import prod
from pathlib import Path

import torch
from tokenizers import Tokenizer

from ..models.checkpoint.loader import load_weights
from ..models.checkpoint.names import tensor_table
from ..models.checkpoint.writer import write_checkpoint
from ..models.numerics import FLOAT32
from ..models.v4.config import V4Config
from ..models.v4.model import Model
from ..parallel.topology import Topology
from .sample_data import is_held_out, source_files, token_stream
from .sample_judge import Continuation, definition_prompts, distinct_share, judge, write_continuations
from .sample_train import Trainer, Weights

CURVE_POINTS = 200
EXAMPLES = 3


@dataclass(frozen=True)
class ReportSettings:
    """windows x length held-out tokens are scored; that many continuations are written and judged."""

    windows: int = 64
    length: int = 1024
    continuations: int = 50
    new_tokens: int = 128


@dataclass(frozen=True)
class Figures:
    """What the README says of the run. Losses are held-out nats a token."""

    train_tokens: int
    held_out_tokens: int
    held_out_bytes: int
    loss_float: float
    loss_stored: float
    file_bytes: int
    parameters: int
    continuations: tuple[Continuation, ...]
    originals: Counter[str]

    def verdicts(self) -> Counter[str]:
        return Counter(c.verdict for c in self.continuations)

    def distinct(self) -> float:
        return distinct_share([c.ids for c in self.continuations])

    def distinct_each(self) -> float:
        """Mean over the continuations of each one's own share of distinct 4-grams."""
        return sum(distinct_share([c.ids]) for c in self.continuations) / len(self.continuations)


def write_sample(
    trainer: Trainer,
    work: Path,
    output: Path,
    *,
    docs: Path | None = None,
    settings: ReportSettings | None = None,
) -> Figures:
    """Write the checkpoint and README.md to `output` and the loss curve to `docs` (output if None).

    All figures of the stored model are taken from the files just written. work holds the run's tokenizer.json.
    """
    settings = ReportSettings() if settings is None else settings
    tokenizer_json = (work / "tokenizer.json").read_text(encoding="utf-8")
    write_checkpoint(output, trainer.config, trainer.weights, tokenizer_json=tokenizer_json)
    figures = measure(trainer, output, Tokenizer.from_str(tokenizer_json), settings)
    (output / "README.md").write_text(readme(trainer, figures, settings), encoding="utf-8")
    write_curve(trainer.curve, figures, output if docs is None else docs)
    return figures


@torch.no_grad()
def measure(trainer: Trainer, checkpoint: Path, tokenizer: Tokenizer, settings: ReportSettings) -> Figures:
    """Losses before and after storage, and the judged continuations of the stored model."""
    config, stored = load_weights(checkpoint, Topology(), 0, FLOAT32)
    files = list(source_files())
    texts = [text for name, text in files if is_held_out(name)]
    held_out = token_stream(tokenizer, texts, config)
    model = Model(config, stored, trainer.groups, FLOAT32)
    return Figures(
        train_tokens=len(trainer.stream),
        held_out_tokens=len(held_out),
        held_out_bytes=sum(len(text.encode()) for text in texts),
        loss_float=held_out_loss(trainer, trainer.weights, held_out, settings),
        loss_stored=held_out_loss(trainer, stored, held_out, settings),
        file_bytes=sum(path.stat().st_size for path in checkpoint.glob("*.safetensors")),
        parameters=sum(prod(spec.shape) for spec in tensor_table(config) if spec.role != "ids"),
        continuations=judged(model, tokenizer, texts, settings),
        originals=judged_originals(tokenizer, texts, settings),
    )


def held_out_loss(trainer: Trainer, weights: Weights, held_out: torch.Tensor, settings: ReportSettings) -> float:
    """Mean loss over evenly spaced windows of the held-out stream; every window starts without context."""
    last = len(held_out) - settings.length - 1
    starts = [last * i // max(1, settings.windows - 1) for i in range(settings.windows)]
    losses = [float(trainer.loss(weights, held_out[i : i + settings.length + 1][None])[0]) for i in starts]
    return sum(losses) / len(losses)


def judged(model: Model, tokenizer: Tokenizer, texts: list[str], settings: ReportSettings) -> tuple[Continuation, ...]:
    """Continuations of held-out definitions, each judged together with its prompt."""
    prompts = [prompt for prompt, _ in definition_prompts(texts, settings.continuations)]
    encoded = [[model.config.bos_token_id, *tokenizer.encode(p, add_special_tokens=False).ids] for p in prompts]
    written = write_continuations(model, encoded, max_new_tokens=settings.new_tokens)
    result = []
    for prompt, ids in zip(prompts, written, strict=True):
        text = tokenizer.decode(list(ids))
        result.append(Continuation(prompt, text, ids, judge(prompt + text)))
    return tuple(result)


def judged_originals(tokenizer: Tokenizer, texts: list[str], settings: ReportSettings) -> Counter[str]:
    """Verdicts on what really follows the same prompts, cut after as many tokens: what a perfect writer could reach."""
    verdicts: Counter[str] = Counter()
    for prompt, rest in definition_prompts(texts, settings.continuations):
        ids = tokenizer.encode(rest, add_special_tokens=False).ids[: settings.new_tokens]
        verdicts[judge(prompt + tokenizer.decode(ids))] += 1
    return verdicts


def smoothed(curve: list[tuple[int, float]], points: int = CURVE_POINTS) -> list[tuple[int, float]]:
    """(last step, mean loss) of about `points` equal runs of the curve."""
    width = max(1, -(-len(curve) // points))
    runs = [curve[i : i + width] for i in range(0, len(curve), width)]
    return [(run[-1][0], sum(loss for _, loss in run) / len(run)) for run in runs]


def write_curve(curve: list[tuple[int, float]], figures: Figures, folder: Path) -> None:
    """sample_loss.csv, and sample_loss.png where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    points = smoothed(curve)
    lines = ["step,loss", *(f"{step},{loss:.4f}" for step, loss in points)]
    (folder / "sample_loss.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([step for step, _ in points], [loss for _, loss in points], label="training")
    axes.axhline(figures.loss_float, color="tab:green", linestyle="--", label="held out, FP32")
    axes.axhline(figures.loss_stored, color="tab:red", linestyle=":", label="held out, as stored")
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.legend()
    figure.savefig(folder / "sample_loss.png", dpi=100, metadata={"Software": None})


SHAPE_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "compress_ratios",
    "vocab_size",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "num_hash_layers",
    "hc_mult",
    "hc_sinkhorn_iters",
    "max_position_embeddings",
)


WHAT_IT_IS = """\
A small V4-architecture model, trained by `python -m meshspark.launch.make_sample` on the source of the Python standard
library (CPython {python}; tests and third-party parts left out) and stored in the official checkpoint layout. It is
there to show real text and to test with; it knows nothing but how Python looks."""

WHAT_IT_SCORES = """\
*Whole*: Python's tokenizer accepts prompt and continuation up to the last complete line. *Cut*: it finds nothing wrong,
but a bracket or a triple-quoted string is still open there, as it often is where real text is cut. The prompts are the
first lines of {count} functions and classes of held-out files; temperature 0.8, top-p 0.95, {new_tokens} tokens, seeds
0 to {last_seed}. The loss curve is in `docs/sample_loss.png`."""

HOW_IT_WAS_MADE = """\
In FP32, Muon steps the matrices and Adam the rest. The indexers stay as drawn: their selection is discrete, so the
language loss gives them no gradient. Expert load is balanced by the bias of the gate alone. In the last part of the run
(`quantised_share`) weights pass through the storage formats, gradients straight through."""


def readme(trainer: Trainer, figures: Figures, settings: ReportSettings) -> str:
    """The sample's README.md."""
    count = len(figures.continuations)
    parts = [
        "# The bundled sample",
        WHAT_IT_IS.format(python=platform.python_version()),
        "## Figures",
        _table(_results(trainer, figures, settings)),
        WHAT_IT_SCORES.format(count=count, new_tokens=settings.new_tokens, last_seed=count - 1),
        "## Training",
        HOW_IT_WAS_MADE,
        _table({name: f"{value:g}" for name, value in asdict(trainer.settings).items()}),
        "## Shape",
        _table(_shape(trainer.config)),
        "## Continuations",
        *(_example(continuation) for continuation in figures.continuations[:EXAMPLES]),
    ]
    return "\n\n".join(parts) + "\n"


def _results(trainer: Trainer, figures: Figures, settings: ReportSettings) -> dict[str, str]:
    verdicts, count = figures.verdicts(), len(figures.continuations)
    per_byte = figures.loss_stored * figures.held_out_tokens / figures.held_out_bytes
    tokens = trainer.step_number * trainer.settings.sequences * trainer.settings.length
    last = smoothed(trainer.curve)[-1][1]
    return {
        "steps": f"{trainer.step_number:,} ({tokens:,} tokens; the training part has {figures.train_tokens:,})",
        "training loss at the end": f"{last:.3f} nats a token",
        "held-out loss before quantisation": f"{figures.loss_float:.3f} nats a token",
        "held-out loss as stored": f"{figures.loss_stored:.3f} nats a token, {per_byte:.3f} a byte",
        "held-out windows": f"{settings.windows} of {settings.length} tokens, of {figures.held_out_tokens:,}",
        "continuations that are whole": f"{verdicts['whole']} of {count}",
        "continuations that are whole or cut": f"{verdicts['whole'] + verdicts['cut']} of {count}",
        "real text behind the same prompts, cut alike": f"{figures.originals['whole']} of {count} whole, "
        f"{figures.originals['whole'] + figures.originals['cut']} whole or cut",
        "distinct 4-grams, all continuations together": f"{figures.distinct():.3f}",
        "distinct 4-grams, within each": f"{figures.distinct_each():.3f}",
        "parameters": f"{figures.parameters:,}",
        "weights file": f"{figures.file_bytes:,} bytes",
    }


def _shape(config: V4Config) -> dict[str, str]:
    names = [f.name for f in fields(config) if f.name in SHAPE_FIELDS]
    values = {name: getattr(config, name) for name in names}
    return {name: ", ".join(map(str, v)) if isinstance(v, tuple) else str(v) for name, v in values.items()}


def _table(rows: dict[str, str]) -> str:
    return "\n".join(["| what | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _example(continuation: Continuation) -> str:
    return f"""\
Prompt:

````python
{continuation.prompt.rstrip()}
````

Continuation ({continuation.verdict}):

````python
{continuation.text.rstrip()}
````"""
