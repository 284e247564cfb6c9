"""Shared by the sections of gpu.py: the device, timing, limits, models, prompts and reports."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from harness import attention_flops, median, table, timed, visible_pairs

from prefold.checkpoint import GEOMETRIES
from prefold.engine.schedule.windows import WindowPlanner
from prefold.model import config_from
from prefold.spec.requests import Readout, Request
from prefold.trie import Spool, Trie
from prefold.worker.torch.model import CausalLM
from prefold.worker.torch.rows import Batch, Path, StepAttend, prepare, row_attention_of

# A model for any machine, for the smoke test of every section.
TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 512, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 4096, "tie_word_embeddings": True, "attention_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@dataclass
class Bench:
    """A run: its device, sizes and results.

    smoke   tiny sizes, to see that everything runs
    result  content of the JSON file, by section
    """

    device: torch.device
    smoke: bool = False
    repeats: int = 3
    models: tuple[str, ...] = ("qwen3-0.6b", "qwen3-4b", "qwen3-8b")
    data: str | None = None
    dtype: torch.dtype = torch.bfloat16
    failures: list[str] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    _limits: dict[str, float] | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def sync(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object], repeats: int | None = None, *, warm: int = 1) -> list[float]:
        """Return the wall time of each run until the device is idle. Warm-up runs, which compile, are not timed."""
        return timed(run, repeats or self.repeats, warm=warm, sync=self.sync)

    def kernel_seconds(self, run: Callable[[], object], *, at_least: float = 0.05) -> float:
        """Return the seconds of one run: the median over five rows of many runs, which hide the launch times."""
        once = min(self.seconds(run, 2))
        count = 2 if self.smoke else max(3, min(200, int(at_least / max(once, 1e-6))))

        def row() -> None:
            for _ in range(count):
                run()

        return median(self.seconds(row, 5, warm=0)) / count

    def attempt(self, name: str, run: Callable[[], Any]) -> Any:
        """Return the result of `run`. If it fails, return None and add a line to `failures`."""
        try:
            return run()
        except Exception as error:
            self.failures.append(name)
            print(f"  {name} FAILED: {type(error).__name__}: {str(error)[:500]}", flush=True)
            print("    " + traceback.format_exc(limit=-4).replace("\n", "\n    "), flush=True)
            self.result.setdefault("failures", {})[name] = traceback.format_exc()
            return None
        finally:
            self.free()

    def free(self) -> None:
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def limits(self) -> dict[str, float]:
        """Return the FLOP/s of a large matrix product, and the bytes/s (read + written) of a large copy."""
        if self._limits is None:
            size, elements = (256, 1 << 16) if self.smoke else (8192, 1 << 31)
            a, b = (torch.randn(size, size, device=self.device, dtype=self.dtype) for _ in range(2))
            product = self.kernel_seconds(lambda: torch.mm(a, b))
            x = torch.empty(elements, dtype=torch.uint8, device=self.device)
            y = torch.empty_like(x)
            copy = self.kernel_seconds(lambda: y.copy_(x))
            self._limits = {"flops": 2 * size**3 / product, "bandwidth": 2 * elements / copy}
            print(f"limits: {self._limits['flops'] / 1e12:.0f} TFLOP/s in a product of {size} x {size}, "
                  f"{self._limits['bandwidth'] / 1e12:.2f} TB/s in a copy", flush=True)  # fmt: skip
            self.result["limits"] = self._limits
        return self._limits

    def show(self, section: str, headers: Sequence[str], rows: Sequence[Sequence[object]], **record: Any) -> None:
        print(table(headers, rows), flush=True)
        self.result.setdefault(section, []).append(
            {"headers": list(headers), "rows": [list(r) for r in rows], **record}
        )

    def model(self, name: str) -> CausalLM:
        return random_model(GEOMETRIES[name] if name != "tiny" else TINY, self.dtype, self.device)


def random_model(config: dict[str, Any], dtype: torch.dtype, device: torch.device, seed: int = 0) -> CausalLM:
    """Return a model with random weights, made on the device."""
    model = CausalLM(config_from(config), dtype=dtype, device=device).eval()
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
    return model


def grid_prompts(batch: int, prefix: int, suffix: int, vocab: int, seed: int = 0) -> list[np.ndarray]:
    """Return prompts with a shared prefix, and suffixes that share nothing."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, vocab, prefix)
    own = rng.choice(vocab, batch, replace=False)  # the first tokens of suffixes differ
    return [
        np.concatenate((shared, own[i : i + 1], rng.integers(0, vocab, suffix - 1))).astype(np.int32)
        for i in range(batch)
    ]


def trie_of(prompts: Sequence[np.ndarray], *, share: bool = True) -> Trie:
    return Trie.build(np.concatenate(prompts), np.cumsum([0, *map(len, prompts)]), share=share)


def one_step(
    model: CausalLM, prompts: Sequence[np.ndarray], sharing: str, readout: Readout, *, rows: int = 1 << 20
) -> Batch:
    """Return all prompts as one step, on the device."""
    with Spool() as spool:
        for number, prompt in enumerate(prompts):
            spool.add(Request(prompt), number.to_bytes(8, "little"))
        window = next(iter(spool.windows(max_tokens=1 << 30, share=sharing == "full")))
    scheduler = WindowPlanner(window, readout, sharing=sharing, max_batch_rows=rows)
    attention = row_attention_of(model.local, model.dtype, model.device)
    return prepare(scheduler.plan().message, model.config, attention)


def forward(model: CausalLM, batch: Batch) -> torch.Tensor:
    """Return the hidden states of all rows of a step, as in the published grid."""
    with torch.inference_mode():
        attend = StepAttend(batch, Path(), model.config.planes, model.config.scale)
        return model(batch.tokens, batch.positions, attend, None)


def floor_seconds(bench: Bench, config, trie: Trie) -> float:
    """Return the seconds of all linears and of attention over all visible pairs, at the rate of a large product."""
    flops = trie.num_rows * config.linear_flops + len(config.planes) * attention_flops(config, visible_pairs(trie.end))
    return flops / bench.limits()["flops"]
