"""Times a tower beside transformers' and the limit of the machine.

    python benchmarks/tower.py [--tower gemma3-4b] [--layers 3] [--tiles 1] [--dtype bfloat16] [--rounds 5]

Towers have random weights. --layers of them are made, since each costs the same, and seconds are given a layer. The
systems see the same tile, in turn within a round: prefold, at once and as it works where others generate (a piece at a
time), and transformers eager and sdpa. The limit is that of the
tower's linears at the best rate they reach here with nothing between them, and that of attention at the best rate
measured here for rows that all see each other: by prefold's kernel or by PyTorch, whichever is faster. Norms,
activations and whatever else a layer does have no part in it.
"""

from __future__ import annotations

import argparse
import time

import torch
from common import machine, median, spread, table, write_json
from image_data import SHAPES, random_tower
from torch.nn import functional as F

from prefold.images.config import TowerConfig
from prefold.images.worker import TowerAttend
from prefold.model.products import pack


def products_rate(config, dtype: torch.dtype, rows: int, repeats: int = 5) -> float:
    """FLOP/s of the tower's own linears, packed, with nothing between them: the best of some rounds."""
    shapes = [(3 * config.hidden, config.hidden), (config.hidden, config.hidden)]
    shapes += [(config.intermediate, config.hidden), (config.hidden, config.intermediate)]
    weights = [torch.randn(shape).to(dtype) for shape in shapes]
    products = [pack(weight) or (lambda x, weight=weight: F.linear(x, weight)) for weight in weights]
    inputs = {size: torch.randn(rows, size).to(dtype) for size in (config.hidden, config.intermediate)}
    flops = sum(2 * rows * a * b for a, b in shapes)
    best = 0.0
    for _ in range(repeats):
        begun = time.perf_counter()
        for product, (_, size) in zip(products, shapes, strict=True):
            product(inputs[size])
        best = max(best, flops / (time.perf_counter() - begun))
    return best


def attention_rates(tower, config, dtype: torch.dtype, repeats: int = 5) -> dict[str, float]:
    """FLOP/s of attention over one tile: by prefold's kernel, and by PyTorch's scaled_dot_product_attention."""
    q, k, v = (torch.randn(config.patches, config.heads, config.head_dim).to(dtype) for _ in range(3))
    attend = TowerAttend(tower)
    ways = {
        "prefold": lambda: attend(0, q, k, v, 0),
        "pytorch": lambda: F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in (q, k, v))),
    }
    flops = 4 * config.patches**2 * config.hidden
    found = dict.fromkeys(ways, 0.0)
    for _ in range(repeats):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            found[name] = max(found[name], flops / (time.perf_counter() - begun))
    return found


def transformers_tower(config, dtype: torch.dtype, attention: str):
    """transformers' SigLIP of this shape, with random weights."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    made = SiglipVisionConfig(
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        image_size=config.image_size,
        patch_size=config.patch_size,
        vision_use_head=False,
    )
    made._attn_implementation = attention
    return SiglipVisionModel(made).to(dtype).eval()


def compare(config: TowerConfig, dtype: torch.dtype, *, tiles: int = 1, rounds: int = 5) -> dict:
    """Times the layers of a tower, prints how long they take, and returns it in seconds a layer. config: with as many
    layers as are to be timed."""
    torch.manual_seed(0)
    tower = random_tower(config, dtype)
    attend = TowerAttend(tower)
    pixels = torch.rand(tiles, 3, config.image_size, config.image_size) * 2 - 1
    pieces = config.layers * len(config.pieces(tiles))

    def in_pieces():
        rows = tower.start(pixels, attend)
        for stop in range(1, pieces + 1):
            tower.go_on(rows, stop)

    systems = {"prefold": lambda: tower.go_on(tower.start(pixels, attend)), "prefold, piece by piece": in_pieces}
    for attention in ("sdpa", "eager"):
        other = transformers_tower(config, dtype, attention)
        systems[f"transformers {attention}"] = lambda other=other: other(pixels.to(dtype))
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    with torch.no_grad():
        for system in systems.values():
            system()
        for _ in range(rounds):
            for name, system in systems.items():
                begun = time.perf_counter()
                system()
                seconds[name].append((time.perf_counter() - begun) / config.layers)
        linears = products_rate(config, dtype, tiles * config.patches)
        attention = attention_rates(tower, config, dtype)
    rows = tiles * config.patches
    linear_flops = 2 * rows * (4 * config.hidden**2 + 2 * config.hidden * config.intermediate)
    attention_flops = 4 * rows * config.patches * config.hidden
    limit = linear_flops / linears + attention_flops / max(attention.values())
    print(f"{tiles} tile(s) of {config.patches} patches, {dtype}; limit {limit:.3f} s a layer: linears")
    print(f"{linear_flops / 1e9:.0f} GFLOP at {linears / 1e9:.0f} GFLOP/s, attention {attention_flops / 1e9:.0f} GFLOP")
    print(f"at {attention['prefold'] / 1e9:.0f} (prefold) or {attention['pytorch'] / 1e9:.0f} (PyTorch) GFLOP/s\n")
    lines = []
    for name, times in seconds.items():
        each = median(times)
        lines.append((name, f"{each:.3f}", spread(times), f"{each / limit:.2f}x", f"{len(times)}"))
    print(table(("system", "s a layer", "spread", "of the limit", "rounds"), lines))
    return {"seconds": seconds, "limit": limit, "linears": linears, "attention": attention}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tower", choices=SHAPES, default="gemma3-4b", help="whose shape the tower has")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tiles", type=int, default=1)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    options = parser.parse_args()
    config = TowerConfig(kind="idefics3", merge=4, output=576, **SHAPES[options.tower] | {"layers": options.layers})
    print(table(("", "value"), list(machine().items())), "\n")
    found = compare(config, getattr(torch, options.dtype), tiles=options.tiles, rounds=options.rounds)
    write_json(options.json, **found)


if __name__ == "__main__":
    main()
