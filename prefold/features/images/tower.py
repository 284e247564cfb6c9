"""The tower: a vision transformer and its projector, as a function of tiles.

Like the text model it calls an `attend` that it is passed; here the rows of a tile see each other, and no others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...model.layers import ActivatedLinear, Linear, Norm
from ...model.ops import Ops, choose_ops
from .config import PIECE_ROWS, TowerConfig

# attend(layer, q, k, v, start) returns attention of q [n, heads, dim], whose first row is row `start` of all, shaped as
# q; k, v [tiles * patches, heads, dim], of all. Every patch sees all patches of its tile.
TowerAttention = Callable[[int, Tensor, Tensor, Tensor, int], Tensor]


@dataclass(slots=True)
class TowerPass:
    """A TowerPass is some tiles on their way through the tower.

    tiles      how many they are
    x, delta   their residual stream, x + delta [tiles * patches, hidden]; delta may be None
    attend     computes attention
    qkv        queries, keys and values in the present layer, [tiles * patches, 3 * heads, dim]
    num_done   pieces of work that are done, over all layers
    """

    tiles: int
    x: Tensor
    delta: Tensor | None
    attend: TowerAttention
    ops: Ops
    qkv: Tensor | None = None
    num_done: int = 0

    @property
    def units(self) -> int:
        """Returns the pieces of a stage of a layer."""
        return -(-len(self.x) // PIECE_ROWS)


class Tower(nn.Module):
    """A Tower computes rows of a model's residual stream from tiles. They take the place of scaled embeddings. Weights
    are left uninitialised: see `load_tower`."""

    def __init__(self, config: TowerConfig, *, dtype: torch.dtype, device: torch.device):
        super().__init__()
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.config = config
        self.patch = Linear(config.patch_inputs, config.hidden, bias=True, **place)
        self.positions = nn.Parameter(torch.empty(config.patches, config.hidden, **place))
        self.layers = nn.ModuleList(TowerLayer(config, **place) for _ in range(config.layers))
        self.norm = _norm(config, **place)
        averages = config.kind == "gemma3"
        self.projector_norm = (
            # Checkpoints store w - 1; float32, because adding 1 in a shorter type would lose the last bits.
            Norm(config.hidden, bias=False, eps=config.projector_eps, dtype=torch.float32, device=device)
            if averages
            else None
        )
        self.projector = Linear(config.merged, config.output, bias=False, **place)

    def forward(self, tiles: Tensor, attend: TowerAttention) -> Tensor:
        """Returns the rows of tiles [tiles, 3, size, size], [tiles * rows, output], in the tower's dtype."""
        rows = self.start(tiles, attend)
        self.go_on(rows)
        return self.finish(rows)

    def start(self, tiles: Tensor, attend: TowerAttention) -> TowerPass:
        """Returns tiles before the first layer; the arguments are those of a call of the tower."""
        config = self.config
        size = config.image_size
        if tiles.ndim != 4 or tiles.shape[1:] != (3, size, size):
            raise ValueError(f"tiles are {list(tiles.shape)}; they must be [tiles, 3, {size}, {size}]")
        side, patch = config.side, config.patch_size
        # Where a patch does not divide the tile, the last pixels are in no patch.
        tiles = tiles.to(self.dtype)[:, :, : side * patch, : side * patch]
        patches = tiles.unflatten(3, (side, patch)).unflatten(2, (side, patch)).permute(0, 2, 4, 1, 3, 5)
        x = self.patch(patches.reshape(-1, config.patch_inputs))
        x = (x.unflatten(0, (-1, config.patches)) + self.positions).flatten(0, 1)
        return TowerPass(len(tiles), x, None, attend, choose_ops(self.dtype, self.device))

    def go_on(self, rows: TowerPass, stop: int | None = None) -> bool:
        """Does the pieces of work up to `stop` (None: all) that are not done. Returns whether all pieces are done now.
        Neighbouring pieces of a stage are computed together, so that pieces cost nothing where no step waits."""
        units = rows.units
        every = 2 * units * self.config.layers
        stop = every if stop is None else min(stop, every)
        while rows.num_done < stop:
            stage, unit = divmod(rows.num_done, units)
            last = min(units, unit + stop - rows.num_done)
            part = slice(unit * PIECE_ROWS, min(last * PIECE_ROWS, len(rows.x)))
            number, second = divmod(stage, 2)
            layer = cast(TowerLayer, self.layers[number])
            if second:
                layer.finish(rows, part, number)
            else:
                layer.begin(rows, part)
            rows.num_done += last - unit
        return rows.num_done >= every

    def finish(self, rows: TowerPass) -> Tensor:
        """Returns the projector's output for tiles that have gone through all layers, [tiles * rows, output]."""
        config, ops = self.config, rows.ops
        x = self.norm(rows.x, rows.delta, ops)[1]
        across = config.side // config.merge
        size = across * config.merge
        x = x.view(rows.tiles, config.side, config.side, config.hidden)[:, :size, :size]
        # [tiles, row, row of its square, column, column of its square, hidden]
        x = x.unflatten(2, (across, config.merge)).unflatten(1, (across, config.merge))
        if self.projector_norm is not None:
            x = x.float().mean((2, 4)).to(x.dtype).reshape(-1, config.hidden)
            x = self.projector_norm(x, None, ops)[1]
        else:
            x = x.transpose(2, 3).reshape(-1, config.merged)
        return self.projector(x)

    @property
    def device(self) -> torch.device:
        """Returns the device that the weights are on."""
        return self.positions.device

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the linears' weights, and of the rows."""
        return self.positions.dtype


class TowerLayer(nn.Module):
    """A TowerLayer computes attention and the MLP of one layer, in two stages, for some rows of a pass at a time."""

    def __init__(self, config: TowerConfig, *, dtype: torch.dtype, device: torch.device):
        super().__init__()
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.config = config
        self.input_norm = _norm(config, **place)
        self.qkv = Linear(config.hidden, 3 * config.hidden, bias=True, **place)
        self.o = Linear(config.hidden, config.hidden, bias=True, **place)
        self.post_norm = _norm(config, **place)
        self.up = ActivatedLinear(config.hidden, config.intermediate, activation="gelu_tanh", bias=True, **place)
        self.down = Linear(config.intermediate, config.hidden, bias=True, **place)

    def begin(self, rows: TowerPass, part: slice) -> None:
        """Computes queries, keys and values of some rows."""
        delta = None if rows.delta is None else rows.delta[part]
        x, h = self.input_norm(rows.x[part], delta, rows.ops)
        qkv = self.qkv(h).unflatten(-1, (3 * self.config.heads, self.config.head_dim))
        if len(x) == len(rows.x):
            rows.x, rows.qkv = x, qkv
            return
        if rows.qkv is None:
            rows.qkv = qkv.new_empty(len(rows.x), *qkv.shape[1:])
        rows.x[part], rows.qkv[part] = x, qkv

    def finish(self, rows: TowerPass, part: slice, number: int) -> None:
        """Computes the rest of the layer of some rows, once all have their queries, keys and values. number: the
        layer's."""
        assert rows.qkv is not None
        q, k, v = rows.qkv.split(self.config.heads, 1)
        delta = self.o(rows.attend(number, q[part], k, v, part.start).flatten(1))
        x, h = self.post_norm(rows.x[part], delta, rows.ops)
        delta = self.down(self.up.activated(h, rows.ops))
        if len(x) == len(rows.x):
            rows.x, rows.delta = x, delta
            return
        if rows.delta is None:
            rows.delta = torch.empty_like(rows.x)
        rows.x[part], rows.delta[part] = x, delta


def _norm(config: TowerConfig, *, dtype: torch.dtype, device: torch.device) -> Norm:
    """Returns a LayerNorm of the tower's residual stream."""
    return Norm(config.hidden, kind="layer", bias=True, eps=config.norm_eps, dtype=dtype, device=device)
