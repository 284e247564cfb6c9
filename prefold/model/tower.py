"""The tower: a vision transformer and its projector, as a function of tiles.

Knows of attention only the `attend` it is given, as the text model does: rows of one tile see each other, and no
others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..media import TowerConfig
from .layers import ActivatedLinear, Linear, Norm
from .ops import Ops, choose_ops
from .transformer import Attend

__all__ = ["Tower", "TowerPass"]


@dataclass(slots=True)
class TowerPass:
    """A TowerPass is some tiles on their way through the tower.

    tiles      how many they are
    x, delta   their residual stream, x + delta [tiles * patches, hidden]; delta may be None
    attend     who attends
    """

    tiles: int
    x: Tensor
    delta: Tensor | None
    attend: Attend
    ops: Ops


class Tower(nn.Module):
    """A Tower makes rows of a model's residual stream out of tiles; they stand where embeddings stand that are scaled
    already. Weights are left uninitialised: see `load_tower`."""

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
            # Stored less one, so float32: 1 + w would lose the last bits of w.
            Norm(config.hidden, kind="rms", eps=config.projector_eps, dtype=torch.float32, device=device)
            if averages
            else None
        )
        self.projector = Linear(config.merged, config.output, bias=False, **place)

    def forward(self, tiles: Tensor, attend: Attend) -> Tensor:
        """Returns the rows of tiles [tiles, 3, size, size], [tiles * rows, output], in the tower's dtype.

        attend: called with the layer's number, and q, k and v [tiles * patches, heads, dim].
        """
        rows = self.start(tiles, attend)
        self.go_through(rows, range(self.config.layers))
        return self.finish(rows)

    def start(self, tiles: Tensor, attend: Attend) -> TowerPass:
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

    def go_through(self, rows: TowerPass, layers: Iterable[int]) -> None:
        """Takes tiles through these layers, in order."""
        every = list(self.layers)
        for number in layers:
            rows.x, rows.delta = every[number](rows, number)

    def finish(self, rows: TowerPass) -> Tensor:
        """Returns what the projector makes of tiles that have gone through all layers, [tiles * rows, output]."""
        config, ops = self.config, rows.ops
        x = self.norm(rows.x, rows.delta, ops)[1]
        across = config.side // config.merge
        kept = across * config.merge
        x = x.view(rows.tiles, config.side, config.side, config.hidden)[:, :kept, :kept]
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
    """A TowerLayer computes attention and the MLP of one layer, for every patch of the tiles it is given."""

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

    def forward(self, rows: TowerPass, number: int) -> tuple[Tensor, Tensor | None]:
        """Returns the residual stream after this layer, as its x and delta."""
        ops, heads = rows.ops, self.config.heads
        x, h = self.input_norm(rows.x, rows.delta, ops)
        q, k, v = self.qkv(h).unflatten(-1, (3 * heads, self.config.head_dim)).split(heads, 1)
        delta = self.o(rows.attend(number, q, k, v).flatten(1))
        x, h = self.post_norm(x, delta, ops)
        return x, self.down(self.up.activated(h, ops))


def _norm(config: TowerConfig, *, dtype: torch.dtype, device: torch.device) -> Norm:
    """Returns a LayerNorm of the tower's residual stream."""
    return Norm(config.hidden, kind="layer", eps=config.norm_eps, dtype=dtype, device=device)
