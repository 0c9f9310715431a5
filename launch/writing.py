"""What becomes of a prompt: its text as it comes, and the report at the end."""

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.table import Table

from ..parallel.topology import Topology
from .output import show, two_columns
from .requests import Event
from .tokenizer import TextStream, TextTokenizer

SHOWN = ("rows_per_step", "most_rows", "time_to_first_token", "time_between_tokens", "pools", "prefix")
"""What --json passes on of the engine's metrics as it is."""


class Writing:
    """One prompt and what was written for it; text, ids and the reason of its end."""

    def __init__(
        self, number: int, prompt: str, prompt_ids: Sequence[int], tokenizer: TextTokenizer, stops: Sequence[str]
    ) -> None:
        self.number, self.prompt, self.prompt_ids = number, prompt, list(prompt_ids)
        self.output_ids: list[int] = []
        self.finish_reason: str | None = None
        self.rank = -1
        self._stream = TextStream(tokenizer, stops)

    @property
    def text(self) -> str:
        return self._stream.text

    @property
    def stopped(self) -> bool:
        return self._stream.stopped

    def take(self, event: Event) -> str:
        """News of the request; the text that may be shown now. Tokens after a stop string do not count."""
        shown = ""
        for token_id in event.token_ids:
            if not self.stopped:
                self.output_ids.append(token_id)
                shown += self._stream.push(token_id)
        if event.finish_reason is not None:
            shown += self._stream.finish()
            self.finish_reason = "stop" if self.stopped else event.finish_reason
            self.rank = event.rank
        return shown


class Printer:
    """Shows one writing as it comes, or several as they end; nothing without a stream."""

    def __init__(self, stream: TextIO | None, count: int, *, show_prompt: bool) -> None:
        self._stream, self._live, self._show_prompt = stream, count == 1, show_prompt

    def start(self, writing: Writing) -> None:
        if self._live and self._show_prompt:
            self._print(writing.prompt)

    def more(self, writing: Writing, text: str) -> None:
        if self._live and text:
            self._print(text)

    def end(self, writing: Writing) -> None:
        if self._live:
            self._print("\n\n")
            return
        count = len(writing.output_ids)
        shown = writing.prompt + writing.text if self._show_prompt else writing.text
        self._print(f"--- prompt {writing.number + 1}: {count} tokens, {writing.finish_reason} ---\n{shown}\n\n")

    def _print(self, text: str) -> None:
        if self._stream is None:
            return
        # A terminal's encoding may lack what a model writes.
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, errors="replace").decode(encoding))
        self._stream.flush()


def rates(writings: Sequence[Writing], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Rows, seconds and rates over all groups. Each prompt's first token comes with its prefill.

    The engine counts the seconds: steps with prompt rows in them are prefill, the others decode.
    """
    prefill = sum(len(w.prompt_ids) for w in writings)
    decode = decoded_tokens(writings)
    return {
        "prefill_tokens_per_s": rate(prefill, metrics["prefill_seconds"]),
        "decode_tokens_per_s": rate(decode, metrics["decode_seconds"]),
        "prefill_tokens": prefill,
        "decode_tokens": decode,
        "prefill_seconds": metrics["prefill_seconds"],
        "decode_seconds": metrics["decode_seconds"],
        "steps": metrics["steps"],
        "row_independence": metrics["row_independence"],
        **{name: metrics[name] for name in SHOWN},
        "stages": dict(metrics["stages"]),
    }


def decoded_tokens(writings: Sequence[Writing]) -> int:
    """Tokens that came from decoding: all but each prompt's first, which comes with its prefill."""
    return sum(max(0, len(writing.output_ids) - 1) for writing in writings)


def _waits(times: Mapping[str, float] | None, word: str) -> str:
    return "none" if times is None else f"{word} {times['p50']:.3f} s (p50), {times['p99']:.3f} s (p99)"


def rate(count: int, seconds: float) -> float:
    """Per second; 0 for no time."""
    return count / seconds if seconds > 0 else 0.0


def result_json(writings: Sequence[Writing], topology: Topology, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The result for --json, but for its schema."""
    return {
        "requests": [
            {"prompt_ids": w.prompt_ids, "output_ids": w.output_ids, "text": w.text, "finish_reason": w.finish_reason}
            for w in writings
        ],
        "topology": {"world": topology.world, "tp": topology.tp, "ep": topology.ep, "dp": topology.dp},
        "metrics": rates(writings, metrics),
    }


def result_tables(stream: TextIO, writings: Sequence[Writing], topology: Topology, metrics: Mapping[str, Any]) -> None:
    """Print the rank grid, the rates and the time per stage."""
    figures = rates(writings, metrics)
    summary = two_columns(
        f"world {topology.world}, tp {topology.tp}, ep {topology.ep}, dp {topology.dp}",
        {
            "prefill": f"{figures['prefill_tokens_per_s']:.1f} tokens/s ({figures['prefill_tokens']} tokens)",
            "decode": f"{figures['decode_tokens_per_s']:.1f} tokens/s ({figures['decode_tokens']} tokens)",
            "first token": _waits(figures["time_to_first_token"], "after"),
            "next tokens": _waits(figures["time_between_tokens"], "every"),
            "same bits in any batch and topology": "yes" if figures["row_independence"] else "not promised here",
            "finished": ", ".join(str(w.finish_reason) for w in writings),
        },
    )
    grid = [] if topology.world == 1 else [rank_grid(topology)]
    show(stream, *grid, summary, stage_table(figures["stages"]))


def rank_grid(topology: Topology) -> Table:
    """World ranks by dp_rank and tp_rank, with the ep_rank of each."""
    table = Table("", *(f"tp_rank {tp_rank}" for tp_rank in range(topology.tp)), title="ranks", title_justify="left")
    for dp_rank, ranks in enumerate(topology.tp_groups()):
        places = [topology.coordinates(rank) for rank in ranks]
        cells = [f"rank {p.rank} (ep_rank {p.ep_rank} of block {p.ep_block})" for p in places]
        table.add_row(f"dp_rank {dp_rank}", *cells)
    return table


def stage_table(seconds: Mapping[str, float]) -> Table:
    """Time per stage on world rank 0, longest first."""
    table = Table("stage", "seconds", title="time per stage, rank 0", title_justify="left")
    for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{value:.3f}")
    return table
