"""What a model calls of the compiled kernels: tensors in, tensors out.

Legend: T rows, h streams, H hidden, W width, I inputs, O outputs, X experts, R rows sorted by expert, G output groups,
K columns of a group's input, N tiles, A heads, D head dim.
"""

import ctypes
from dataclasses import dataclass, field

import torch

from .library import LANES, MOST_COLUMNS, MOST_INPUTS, MOST_LANES, MOST_STREAMS, AttendTask, LaneSet, address

Turn = tuple[torch.Tensor, ...]
"""(cos, sin), each [rows, columns] with columns not below a row's width, of which the last are taken."""

MOST_ROWS = 32
"""Rows of a step up to which products run in kernels: larger ones are faster on their own."""


def block_of(inputs: int) -> int:
    """Inputs that a sum takes in one chain before it is added to the others, as CPU products of torch do."""
    if inputs <= 192:
        return inputs
    return inputs // 2 if inputs <= 384 else 192


@dataclass(frozen=True)
class Kernels:
    """The kernels that a model uses, by what was found to give the plain form's bits here (`choice.choose`).

    products: (inputs, outputs) of the matrices; lanes: numbers of lanes that attention mixes. norms, hyper: whether
    those of the model's widths are used. Kernels take contiguous FP32 on the CPU, record no gradients, and check
    shapes only where memory is at stake.
    """

    library: ctypes.CDLL = field(repr=False)
    norms: bool = True
    hyper: bool = True
    products: frozenset[tuple[int, int]] = frozenset()
    lanes: frozenset[int] = frozenset()
    routes: bool = False

    def parts(self) -> list[str]:
        """The names of what is in use, for people."""
        return [name for name in ("norms", "hyper", "products", "lanes", "routes") if getattr(self, name)]

    def norm_turn(
        self, x: torch.Tensor, gain: torch.Tensor | None, eps: float | None, turn: Turn | None, *, inverse: bool = False
    ) -> torch.Tensor:
        """x [T, W] or [T, A, W], normed over W (eps None: not), then turned by the angles of row T; like x."""
        width = x.shape[-1]
        rows = x.numel() // width if width else 0
        x = x.contiguous()
        y = torch.empty_like(x)
        cos = sin = None
        stride, heads = 0, 1
        if turn is not None:
            stride = turn[0].shape[-1]
            heads = rows * stride // turn[0].numel() if rows else 1
            assert rows * stride == heads * turn[0].numel() and stride >= width and width % 2 == 0
            skip = (stride - width) * 4
            cos, sin = address(turn[0]) + skip, address(turn[1]) + skip
        assert gain is None or gain.numel() == width
        self.library.ms_norm_turn(
            address(x),
            y.data_ptr(),
            rows,
            width,
            None if gain is None else address(gain),
            -1.0 if eps is None else eps,
            cos,
            sin,
            stride,
            heads,
            -1.0 if inverse else 1.0,
        )
        return y

    def collapse(
        self,
        streams_ThH: torch.Tensor,
        raw_TM: torch.Tensor,
        base: torch.Tensor,
        scale: torch.Tensor,
        norm_eps: float,
        iterations: int,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`hc_pre` from the streams' products with fn on -> (x [T, H], post [T, h], mix [T, h, h])."""
        T, h, H = streams_ThH.shape
        streams_ThH, raw_TM = streams_ThH.contiguous(), raw_TM.contiguous()
        assert (
            h <= MOST_STREAMS
            and raw_TM.shape == (T, (2 + h) * h)
            and base.numel() == raw_TM.shape[1]
            and scale.numel() == 3
        )
        logits_TM = torch.empty_like(raw_TM)
        self.library.ms_mixing(
            address(streams_ThH),
            address(raw_TM),
            address(base),
            address(scale),
            logits_TM.data_ptr(),
            T,
            h,
            H,
            norm_eps,
        )
        logits_TM.exp_()
        x_TH, post_Th, mix_Thh = raw_TM.new_empty(T, H), raw_TM.new_empty(T, h), raw_TM.new_empty(T, h, h)
        self.library.ms_gates(
            logits_TM.data_ptr(),
            address(streams_ThH),
            x_TH.data_ptr(),
            post_Th.data_ptr(),
            mix_Thh.data_ptr(),
            T,
            h,
            H,
            iterations,
            eps,
        )
        return x_TH, post_Th, mix_Thh

    def spread(
        self, y_TH: torch.Tensor, streams_ThH: torch.Tensor, post_Th: torch.Tensor, mix_Thh: torch.Tensor
    ) -> torch.Tensor:
        """`hc_post`: [T, h, H]."""
        T, h, H = streams_ThH.shape
        assert y_TH.shape == (T, H) and post_Th.shape == (T, h) and mix_Thh.shape == (T, h, h)
        y_TH, streams_ThH = y_TH.contiguous(), streams_ThH.contiguous()
        z_ThH = torch.empty_like(streams_ThH)
        self.library.ms_spread(
            address(y_TH), address(streams_ThH), address(post_Th), address(mix_Thh), z_ThH.data_ptr(), T, h, H
        )
        return z_ThH

    def takes(self, rows: int, *matrices: torch.Tensor) -> bool:
        """Whether so many rows are multiplied with these matrices [.., O, I] in kernels."""
        return rows <= MOST_ROWS and all(w.shape[-1:-3:-1] in self.products for w in matrices)

    def takes_shapes(self, rows: int, *shapes: tuple[int, int]) -> bool:
        """`takes`, of matrices of these (inputs, outputs)."""
        return rows <= MOST_ROWS and self.products.issuperset(shapes)

    def product(self, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        """`row_linear`: [T, O]."""
        (T, I), O = x_TI.shape, weight_OI.shape[0]
        assert weight_OI.shape == (O, I) and I <= MOST_INPUTS and O >= LANES
        x_TI = x_TI.contiguous()
        y_TO = x_TI.new_empty(T, O)
        self.library.ms_product(address(x_TI), address(weight_OI), y_TO.data_ptr(), T, I, O, block_of(I))
        return y_TO

    def project_groups(self, heads_TGK: torch.Tensor, wo_a: torch.Tensor, wo_b: torch.Tensor) -> torch.Tensor:
        """The whole grouped output projection, its partials added in their tree: [T, H]."""
        T, G, K = heads_TGK.shape
        H, O = wo_b.shape[0], wo_b.shape[1] // G
        assert wo_a.shape == (G * O, K) and max(K, O) <= MOST_INPUTS and min(O, H) >= LANES
        heads_TGK = heads_TGK.contiguous()
        parts_GTH, latent_TO = heads_TGK.new_empty(G, T, H), heads_TGK.new_empty(T, O)
        self.library.ms_project_groups(
            address(heads_TGK),
            address(wo_a),
            address(wo_b),
            latent_TO.data_ptr(),
            parts_GTH.data_ptr(),
            T,
            G,
            K,
            O,
            H,
            block_of(K),
            block_of(O),
        )
        return parts_GTH[0]

    def state_rows(
        self, value_GC: torch.Tensor, score_GC: torch.Tensor, ape: torch.Tensor, position_G: torch.Tensor
    ) -> torch.Tensor:
        """What a compressor's state stores of each row, [G, 2C]."""
        G, C = value_GC.shape
        assert score_GC.shape == (G, C) and ape.shape[1] == C and position_G.shape == (G,)
        value_GC, score_GC, position_G = value_GC.contiguous(), score_GC.contiguous(), position_G.contiguous()
        y_GC = value_GC.new_empty(G, 2 * C)
        self.library.ms_state_rows(
            address(value_GC),
            address(score_GC),
            address(ape),
            address(position_G, torch.int64),
            y_GC.data_ptr(),
            G,
            C,
            ape.shape[0],
        )
        return y_GC

    def write_rows(
        self, pool_SC: torch.Tensor, rows_XC: torch.Tensor, source: torch.Tensor, slot: torch.Tensor
    ) -> None:
        """pool[slot] = rows[source]. Mutates the pool. IndexError where either has no such row."""
        assert pool_SC.shape[1] == rows_XC.shape[1] and source.shape == slot.shape
        rows_XC = rows_XC.contiguous()
        wrong = self.library.ms_write_rows(
            address(pool_SC, rows_XC.dtype),
            pool_SC.shape[0],
            address(rows_XC, rows_XC.dtype),
            rows_XC.shape[0],
            address(source, torch.int64),
            address(slot, torch.int64),
            source.shape[0],
            rows_XC.shape[1] * rows_XC.itemsize,
        )
        if wrong:
            raise IndexError(f"{wrong} rows of {len(source)} are beyond the pool or beyond what is written")

    def attend(
        self,
        q_TAD: torch.Tensor,
        sink_A: torch.Tensor,
        row_NR: torch.Tensor,
        shared: "KernelLanes",
        entries: "KernelLanes | None",
        admitted_NRL: torch.Tensor,
        selected_NRE: torch.Tensor | None,
        visible_NR: torch.Tensor | None,
        out_TAD: torch.Tensor,
    ) -> None:
        """Attention of a batch of tiles, written to its rows of out_TAD."""
        (N, R), (_, A, D) = row_NR.shape, q_TAD.shape
        q_TAD = q_TAD.contiguous()
        none = LaneSet(None, None, None, 0)
        lanes = shared.source_NL.shape[1] + (0 if entries is None else entries.source_NL.shape[1])
        assert lanes <= MOST_LANES and D <= MOST_COLUMNS and D % LANES == 0 and out_TAD.shape == q_TAD.shape
        task = AttendTask(
            N,
            R,
            A,
            D,
            address(row_NR, torch.int64),
            shared.set(),
            none if entries is None else entries.set(),
            address(admitted_NRL, torch.bool),
            None if selected_NRE is None else address(selected_NRE, torch.bool),
            None if visible_NR is None else address(visible_NR, torch.int64),
            D**-0.5,
            block_of(D),
            block_of(lanes),
        )
        scores = q_TAD.new_empty(N, R, A, lanes + 1)
        self.library.ms_scores(task, address(q_TAD), address(sink_A), scores.data_ptr())
        probability = torch.softmax(scores, dim=3)
        self.library.ms_mix(task, probability.data_ptr(), address(out_TAD))


@dataclass(frozen=True)
class KernelLanes:
    """Keys of a batch of tiles: source_NL as attend.c has it, into fresh_XD and pool_SD."""

    source_NL: torch.Tensor
    fresh_XD: torch.Tensor
    pool_SD: torch.Tensor | None

    def set(self) -> LaneSet:
        pool = None if self.pool_SD is None else address(self.pool_SD)
        return LaneSet(address(self.fresh_XD), pool, address(self.source_NL, torch.int64), self.source_NL.shape[1])
