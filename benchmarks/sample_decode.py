"""The bundled sample through our engine and through transformers' generate, prefill included."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ..launch.engine import Engine
from ..launch.flags import FlagError
from ..models.checkpoint.loader import load_weights
from ..models.checkpoint.verify import read_config
from ..models.numerics import FLOAT32, MODES
from ..models.request import SamplingParams
from ..models.v4.config import V4Config
from ..models.v4.model import Model
from ..models.v4.traffic import even_load
from ..parallel.groups import Groups
from ..parallel.topology import Topology
from .contest import peer_name, peers_of
from .limits import Meter, least_work
from .peer import peer_model
from .rounds import Load, Rounds, Row, Side, make_row, take_turns


@dataclass(frozen=True)
class SampleWish:
    """A checkpoint, ids of each prompt, and tokens written after each."""

    checkpoint: Path
    prompt_tokens: int
    new_tokens: int

    def check(self) -> V4Config:
        """The checkpoint's config. FlagError where it does not hold that many positions, ValueError without one."""
        path = self.checkpoint / "config.json"
        if not path.is_file():
            raise ValueError(
                f"--checkpoint is {str(self.checkpoint)!r}, but {path} does not exist; give a model's folder"
            )
        config = read_config(self.checkpoint)
        positions = self.prompt_tokens + self.new_tokens
        if positions > config.max_position_embeddings:
            raise FlagError(
                f"--prompt-tokens {self.prompt_tokens} and --new-tokens {self.new_tokens} are {positions} positions, "
                f"allowed: {config.max_position_embeddings}"
            )
        return config


def engine_ids(model: Model, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy continuations by the engine, all prompts at once."""
    longest = max(len(prompt) for prompt in prompts) + new_tokens
    engine = Engine(model, requests=len(prompts), max_context=longest)
    numbers = [engine.add_request(prompt, SamplingParams(max_new_tokens=new_tokens)) for prompt in prompts]
    written: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.active:
        for event in engine.step():
            written[event.request_id] += event.token_ids
    return [written[number] for number in numbers]


@torch.no_grad()
def peer_ids(net: torch.nn.Module, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy continuations by transformers' generate; the prompts have one length."""
    batch = torch.tensor(prompts)
    written = net.generate(  # type: ignore[operator]
        batch,
        attention_mask=torch.ones_like(batch),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    ids: list[list[int]] = written[:, batch.shape[1] :].tolist()
    return ids


def sample_rows(
    wish: SampleWish, batches: Sequence[int], names: Sequence[str], meter: Meter, rounds: int, seed: int
) -> Iterator[tuple[list[Row], Rounds]]:
    """Rows of each batch: ours and the peers in turn. A step's seconds are those of the whole text over its tokens."""
    config = wish.check()
    _, weights = load_weights(wish.checkpoint, Topology(), 0, FLOAT32)
    peers = peers_of(names, lambda dtype: peer_model(config, weights, dtype))
    models = {}
    for name in names:
        _, held = load_weights(wish.checkpoint, Topology(), 0, MODES[name])
        models[name] = Model(config, held, Groups.single(), MODES[name])
    for batch in batches:
        generator = torch.Generator().manual_seed(seed)
        prompts = torch.randint(2, config.vocab_size, (batch, wish.prompt_tokens), generator=generator).tolist()
        yield _batch_rows(wish, models, peers, prompts, meter, rounds)


def _batch_rows(
    wish: SampleWish,
    models: dict[str, Model],
    peers: dict[str, torch.nn.Module],
    prompts: list[list[int]],
    meter: Meter,
    rounds: int,
) -> tuple[list[Row], Rounds]:
    sides: dict[Side, tuple[Callable[[], object], int]] = {}
    for name, model in models.items():
        turn = partial(engine_ids, model, prompts, wish.new_tokens)
        sides[Side(name, wish.prompt_tokens)] = (turn, wish.new_tokens)
    for name, net in peers.items():
        turn = partial(peer_ids, net, prompts, wish.new_tokens)
        sides[Side(name, wish.prompt_tokens, peer=True)] = (turn, wish.new_tokens)
    found = take_turns(sides, meter, rounds)
    load = Load("sample", len(prompts), len(prompts))
    of_rows = even_load(1, requests=len(prompts), rows_each=1, prefill_rows=0)
    middle, rows = wish.prompt_tokens + wish.new_tokens // 2, []
    for name, model in models.items():
        ours, peer = Side(name, wish.prompt_tokens), Side(peer_name(name), wish.prompt_tokens, peer=True)
        work = least_work(model.config, model.numerics, of_rows, middle)
        same = found.first[ours] == found.first[peer]
        rows.append(make_row(load, ours, peer, found, model.numerics, work, same_ids=same))
    return rows, found
